"""`glm46 cluster setup`: eight actions, each looks first and does nothing where all is as it should be.

What they change is below $GLM46_HOME/cluster/, except keys in ~/.ssh (launcher ssh only) and the directory on the
nodes' disks. No action needs root, unless that directory has to be made where this user may not write.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from configs.files.atomic_files import replace_durably
from infra.cluster.checklist import about_nodes, look_at_cluster
from infra.cluster.cluster_settings import ClusterSettings, read_settings, write_settings
from infra.cluster.host_names import expand_hosts, hosts_of_slurm
from infra.cluster.items import Cluster
from infra.cluster.launch_scripts import driver_script, environment_script, launch_script
from infra.cluster.node_jobs import NodeJobs
from infra.cluster.ssh_keys import authorize_own_key, describe_key
from infra.home import Home
from infra.jobs.ssh_jobs import read_hostfile
from infra.machine.doctor import check_environment, check_launchers
from infra.machine.network import (
    Network,
    choose_network,
    default_interface,
    live_interfaces,
    rdma_ports,
    read_network,
    write_network,
)

State = Literal["unchanged", "done", "would do", "skipped", "failed"]


@dataclass(frozen=True)
class Action:
    """What became of one."""

    name: str
    state: State
    text: str


@dataclass(frozen=True)
class NetworkChoice:
    """What the user said of the network; empty where it is to be detected."""

    profile: str
    interfaces: tuple[str, ...]
    hcas: tuple[str, ...]
    added: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Setup:
    """One call of the command."""

    home: Home
    settings: ClusterSettings
    hosts: str
    """Names as `node[001-128],login`; empty where a hostfile is given or the scheduler knows them."""
    choice: NetworkChoice
    is_dry: bool

    @property
    def cluster_dir(self) -> Path:
        return self.home.root / "cluster"

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Those of the choice, else that of this machine's default route."""
        return self.choice.interfaces or tuple(filter(None, [default_interface()]))

    def look(self, *, makes_nvme_dir: bool = False) -> Cluster:
        """Ask the nodes by a job."""
        return look_at_cluster(
            self.home,
            self.settings,
            NodeJobs(self.home, self.settings),
            fio_seconds=0,
            interfaces=self.interfaces,
            makes_nvme_dir=makes_nvme_dir,
        )


class ActionFailedError(ValueError):
    """An action cannot be done; later ones that do not need it are tried."""


def set_up_cluster(setup: Setup) -> Iterable[Action]:
    """Each action as it ends. The settings are kept first: `glm46 cluster check` needs them."""
    if not setup.is_dry:
        setup.cluster_dir.mkdir(exist_ok=True)
    yield _attempt("prerequisites", lambda: _prerequisites(setup))
    hostfile = _attempt("hostfile", lambda: _hostfile(setup))
    yield hostfile
    if setup.settings.kind == "manual" and not setup.settings.hostfile and setup.hosts:
        setup = replace(setup, settings=setup.settings.model_copy(update={"hostfile": str(_own_hostfile(setup))}))
    has_hosts = hostfile.state != "failed" or setup.settings.launcher != "ssh"
    no_hosts = "needs the hostfile"
    yield _attempt("settings", lambda: _settings(setup)) if has_hosts else Action("settings", "skipped", no_hosts)
    yield _attempt("ssh keys", lambda: _ssh_keys(setup))
    cluster = Cluster(setup.home, setup.settings, read_network(setup.home.root), (), "")
    if not has_hosts:
        yield Action("nodes", "skipped", no_hosts)
    elif setup.is_dry:
        yield Action("nodes", "would do", f"run a job on {setup.settings.num_nodes} nodes that looks at them")
    else:
        cluster = setup.look()
        yield _nodes(cluster)
    for name, act in (("nvme directory", _nvme), ("network", _network)):
        if cluster.reports or (setup.is_dry and has_hosts):
            yield _attempt(name, partial(act, setup, cluster))
        else:
            yield Action(name, "skipped", "needs the answers of the nodes")
    yield _attempt("launch script", lambda: _launch_script(setup))
    yield _attempt("submission script", lambda: _driver_script(setup))


def _attempt(name: str, act: Callable[[], Action]) -> Action:
    try:
        return act()
    except (ValueError, OSError) as error:
        return Action(name, "failed", str(error))


def _written(setup: Setup, name: str, path: Path, text: str, mode: int = 0o600) -> Action:
    """Write a file where it has another text."""
    if path.exists() and path.read_text() == text:
        return Action(name, "unchanged", str(path))
    if setup.is_dry:
        return Action(name, "would do", f"write {path}")
    replace_durably(path, text.encode())
    path.chmod(mode)
    return Action(name, "done", f"wrote {path}")


def _prerequisites(setup: Setup) -> Action:
    """Of this machine; those of the nodes are looked at by a job."""
    missing = [check for check in (*check_environment(), *check_launchers([setup.settings.launcher])) if check.fix]
    if missing:
        said = "; ".join(f"{check.name}: {check.found} ({check.fix})" for check in missing)
        return Action("prerequisites", "failed", said)
    return Action("prerequisites", "unchanged", "Python, packages, compiler and the launcher's commands are there")


def _own_hostfile(setup: Setup) -> Path:
    return setup.cluster_dir / "hostfile"


def _hostfile(setup: Setup) -> Action:
    settings = setup.settings
    if settings.hostfile:
        number = len(read_hostfile(Path(settings.hostfile)))
        return Action("hostfile", "unchanged", f"{settings.hostfile} names {number} hosts")
    names = expand_hosts(setup.hosts) if setup.hosts else []
    if not names and settings.kind == "slurm":
        names = hosts_of_slurm(settings.partition)
    if not names:
        return Action("hostfile", "skipped", f"launcher {settings.launcher} needs none; --hosts NAMES writes one")
    if len(names) < settings.num_nodes:
        raise ActionFailedError(f"{len(names)} hosts are known, --nodes is {settings.num_nodes}: name more by --hosts")
    slots = f" slots={settings.gpus_per_node}" if settings.gpus_per_node else ""
    return _written(setup, "hostfile", _own_hostfile(setup), "".join(f"{name}{slots}\n" for name in names))


def _settings(setup: Setup) -> Action:
    if read_settings(setup.home) == setup.settings:
        return Action("settings", "unchanged", str(setup.cluster_dir / "cluster.json"))
    if setup.is_dry:
        return Action("settings", "would do", f"write {setup.cluster_dir / 'cluster.json'}")
    write_settings(setup.home, setup.settings)
    return Action("settings", "done", f"wrote {setup.cluster_dir / 'cluster.json'}")


def _ssh_keys(setup: Setup) -> Action:
    if setup.settings.launcher != "ssh":
        return Action("ssh keys", "skipped", f"launcher {setup.settings.launcher} reaches the nodes without ssh")
    ssh_dir = Path(os.path.expanduser("~")) / ".ssh"
    if missing := describe_key(ssh_dir):
        if setup.is_dry:
            return Action("ssh keys", "would do", missing)
        authorize_own_key(ssh_dir)
        return Action("ssh keys", "done", f"a key of {ssh_dir} is authorized; other homes need ssh-copy-id HOST")
    return Action("ssh keys", "unchanged", f"a key of {ssh_dir} is authorized there")


def _nodes(cluster: Cluster) -> Action:
    """Do all answer, and do they have what ranks need."""
    if cluster.unreached:
        return Action("nodes", "failed", cluster.unreached)
    wrong = [
        item for item in about_nodes(cluster) if item.state == "failed" and item.id in ("gpus", "versions", "ports")
    ]
    if wrong:
        return Action("nodes", "failed", "; ".join(f"{item.measured} ({item.fix})" for item in wrong))
    gpus = f", {cluster.settings.gpus_per_node} GPUs each" if cluster.settings.gpus_per_node else ""
    return Action("nodes", "unchanged", f"{len(cluster.reports)} answer{gpus}")


def _nvme(setup: Setup, cluster: Cluster) -> Action:
    directory = setup.settings.nvme_dir
    if not directory:
        return Action("nvme directory", "skipped", "no --nvme-path was given")
    if setup.is_dry:
        return Action("nvme directory", "would do", f"make {directory} on each node, mode 0700, where it is missing")
    if not any(report.nvme_problem for report in cluster.reports):
        return Action("nvme directory", "unchanged", f"{directory} is there and writable")
    made = setup.look(makes_nvme_dir=True)
    problems = [made.unreached] if made.unreached else [report.nvme_problem for report in made.reports]
    if any(problems):
        raise ActionFailedError("; ".join(sorted({problem for problem in problems if problem})))
    return Action("nvme directory", "done", f"made {directory} on each node that lacked it")


def _network(setup: Setup, cluster: Cluster) -> Action:
    """The profile and environment.sh, which sets its variables in a shell."""
    path = setup.cluster_dir / "environment.sh"
    reports = cluster.reports
    if setup.settings.num_nodes == 1:
        return Action("network", "skipped", "ranks of one node use its loopback")
    ports = {report.name: report.rdma for report in reports} or {"this machine": rdma_ports()}
    up = [set(report.interfaces) for report in reports] or [set(live_interfaces())]
    interfaces = setup.interfaces
    missing = set(interfaces) - set.intersection(*up)
    if missing or not interfaces:
        common = ", ".join(sorted(set.intersection(*up)))
        raise ActionFailedError(
            f"interface {', '.join(sorted(missing)) or 'of the default route'} is not up on all nodes: give "
            f"--interfaces, all have {common}"
        )
    profile, hcas = choose_network(setup.choice.profile, ports, interfaces, setup.choice.hcas)
    network = Network(profile, interfaces, hcas, setup.choice.added)
    said = f"profile {profile}, interfaces {', '.join(interfaces)}" + (f", {', '.join(hcas)}" if hcas else "")
    script = _written(setup, "network", path, environment_script(network))
    if read_network(setup.home.root) == network:
        return Action("network", script.state, said)
    if not setup.is_dry:
        write_network(setup.home.root, network)
    return Action("network", "would do" if setup.is_dry else "done", said)


def _launch_script(setup: Setup) -> Action:
    return _written(setup, "launch script", setup.cluster_dir / "launch.sh", launch_script(setup.home.root), 0o700)


def _driver_script(setup: Setup) -> Action:
    name = {"slurm": "driver.sbatch", "pbs": "driver.pbs"}.get(setup.settings.kind)
    if name is None:
        return Action(
            "submission script", "skipped", f"{shlex.quote(str(setup.cluster_dir / 'launch.sh'))} starts a run"
        )
    text = driver_script(setup.settings, setup.cluster_dir)
    return _written(setup, "submission script", setup.cluster_dir / name, text, 0o700)
