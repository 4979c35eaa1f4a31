"""`glm46 cluster setup`: names, profiles and keys by themselves; a set-up that is run twice; real hosts (long)."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.cluster import probe_node, setup_actions
from infra.cluster.checklist import look_at_cluster
from infra.cluster.cluster_settings import ClusterSettings, make_settings
from infra.cluster.host_names import expand_hosts
from infra.cluster.items import Cluster
from infra.cluster.launch_scripts import driver_script, environment_script, launch_script
from infra.cluster.node_jobs import NodeJobs
from infra.cluster.setup_actions import NetworkChoice, Setup, set_up_cluster
from infra.cluster.ssh_keys import authorize_own_key, describe_key
from infra.jobs.launchers import Job
from infra.jobs.scheduled_jobs import ScheduledLauncher, SchedulerRecord
from infra.machine.network import Network, RdmaPort, checked_additions, choose_network, write_network
from tests.infra.test_launcher import wait_for
from tests.support.cluster import slurm
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.cluster.ssh_hosts import missing_programs, ssh_hosts
from tests.support.pipeline import glm46

ANY_NETWORK = NetworkChoice("detect", (), (), ())


def rdma(device: str, layer: str = "InfiniBand", state: str = "ACTIVE") -> RdmaPort:
    return RdmaPort(device, 1, state, "LinkUp", "400 Gb/sec (4X NDR)", layer)


def test_hosts_are_written_short():
    assert expand_hosts("node[001-003,7],login") == ["node001", "node002", "node003", "node7", "login"]
    assert expand_hosts("a,b.example.org") == ["a", "b.example.org"]
    assert expand_hosts("r[1-2]-gpu") == ["r1-gpu", "r2-gpu"]
    as_sinfo_prints = expand_hosts("rack[1-2]node[01-02,7], login")
    assert as_sinfo_prints == [*(f"rack{rack}node{node}" for rack in "12" for node in ("01", "02", "7")), "login"]
    for text in ("node[3-1]", "node[a]", "node[1-2", "node[1,2", "a b", "node[1-900000]", "r[1-999]n[1-999]", "[]"):
        with pytest.raises(ValueError, match="--hosts"):
            expand_hosts(text)


def test_a_profile_is_the_fastest_that_all_nodes_have():
    both = {"a": [rdma("mlx5_10"), rdma("mlx5_2"), rdma("mlx5_3", "Ethernet")], "b": [rdma("mlx5_2"), rdma("mlx5_10")]}
    assert choose_network("detect", both, ("eth0",), ()) == ("infiniband", ("mlx5_2", "mlx5_10"))
    assert choose_network("infiniband", both, ("eth0",), ("mlx5_2",)) == ("infiniband", ("mlx5_2",))
    all_down = {node: [rdma("mlx5_0", state="DOWN")] for node in "ab"}
    assert choose_network("detect", all_down, ("eth0",), ()) == ("tcp", ())
    assert choose_network("detect", all_down, ("eth0", "eth1"), ()) == ("multi_nic", ())
    assert choose_network("tcp", both, ("eth0", "eth1"), ()) == ("tcp", ())
    assert choose_network("multi_nic", both, ("eth0",), ()) == ("multi_nic", ())
    assert choose_network("detect", {"a": [rdma("rxe0", "Ethernet")]}, ("eth0",), ()) == ("roce", ("rxe0",))
    with pytest.raises(ValueError, match="--network infiniband: no node has an active InfiniBand card"):
        choose_network("infiniband", all_down, ("eth0",), ())
    with pytest.raises(ValueError, match="give one of detect, infiniband, roce, tcp, multi_nic"):
        choose_network("ethernet", {}, ("eth0",), ())


CARDS = [f"mlx5_{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"mlx5_3": "DOWN"}, r"on 1 of 128 nodes a card is not active: gpu077: mlx5_3 is DOWN \(LinkUp\); bring"),
        (dict.fromkeys(CARDS, "INIT"), r"on 1 of 128 nodes .* gpu077: mlx5_0 is INIT \(LinkUp\), mlx5_1 is INIT"),
        ({"mlx5_3": ""}, "gpu077: there is no mlx5_3; bring"),
    ],
)
def test_one_bad_card_is_named_and_neither_dropped_on_all_nodes_nor_a_reason_for_tcp(bad, why):
    """As nobody would look for the cable, and all nodes would be slow."""
    ports = {f"gpu{number:03d}": [rdma(card) for card in CARDS] for number in range(1, 129)}
    ports["gpu077"] = [rdma(card, state=state) for card in CARDS if (state := bad.get(card, "ACTIVE"))]
    for profile in ("detect", "infiniband"):
        with pytest.raises(ValueError, match=f"--network {profile}: .*{why}"):
            choose_network(profile, ports, ("eth0",), ())
    assert choose_network("tcp", ports, ("eth0",), ()) == ("tcp", ())
    if good := tuple(card for card in CARDS if card not in bad):
        assert choose_network("detect", ports, ("eth0",), good) == ("infiniband", good), "as the user said"


def test_cards_that_are_named_are_used_or_refused():
    ports = {node: [rdma("mlx5_0"), rdma("mlx5_1"), rdma("mlx5_2", "Ethernet")] for node in "ab"}
    for hcas in (("mlx5_0:1", "mlx5_1:1"), ("mlx5_1",)):
        assert choose_network("detect", ports, ("eth0",), hcas) == ("infiniband", hcas)
    assert choose_network("detect", ports, ("eth0",), ("mlx5_2:1",)) == ("roce", ("mlx5_2:1",))
    for profile, hcas, why in [
        ("detect", ("mlx5_0", "mlx5_9"), "on 2 of 2 nodes a card is not active: a: there is no mlx5_9; b: there"),
        ("detect", ("mlx5_9",), "a: there is no mlx5_9"),
        ("detect", ("mlx5_0:2",), "a: there is no mlx5_0:2"),
        ("detect", ("mlx5_0", "mlx5_2"), "a: mlx5_2 is not InfiniBand but Ethernet"),
        ("roce", ("mlx5_0",), "a: mlx5_0 is not Ethernet but InfiniBand"),
        ("tcp", ("mlx5_0",), "--network tcp uses no RDMA card: leave out --hcas mlx5_0"),
    ]:
        with pytest.raises(ValueError, match=why):
            choose_network(profile, ports, ("eth0",), hcas)


def test_each_profile_says_what_nccl_and_gloo_use():
    infiniband = Network("infiniband", ("eth0",), ("mlx5_0", "mlx5_1"), (("NCCL_IB_TIMEOUT", "23"),)).variables
    assert infiniband["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"
    assert (infiniband["NCCL_IB_DISABLE"], infiniband["NCCL_IB_TIMEOUT"]) == ("0", "23"), "the user's value wins"
    assert infiniband.keys() == Network("roce", ("eth0",), ("mlx5_0",), ()).variables.keys()
    tcp, many = (Network(profile, ("eth0", "eth1"), (), ()).variables for profile in ("tcp", "multi_nic"))
    assert (tcp["NCCL_IB_DISABLE"], tcp["NCCL_SOCKET_IFNAME"], tcp["GLOO_SOCKET_IFNAME"]) == (
        "1",
        "=eth0,eth1",
        "eth0,eth1",
    )
    assert int(many["NCCL_SOCKET_NTHREADS"]) * int(many["NCCL_NSOCKS_PERTHREAD"]) <= 64


def test_variables_without_effect_are_refused_with_the_reason():
    assert checked_additions(["NCCL_IB_TC=160"]) == (("NCCL_IB_TC", "160"),)
    clouds = ["NCCL_TOPO_FILE=/opt/ndv4-topo.xml", "NCCL_NET_PLUGIN=ofi", "NCCL_IB_PCI_RELAXED_ORDERING=1"]
    tuning = ["NCCL_NET_GDR_LEVEL=SYS", "NCCL_NVLS_ENABLE=0", "NCCL_DEBUG_SUBSYS=INIT,NET"]
    assert [f"{name}={value}" for name, value in checked_additions(clouds + tuning)] == clouds + tuning
    for text, why in [
        ("NCCL_TIMEOUT=3600000", "neither NCCL nor PyTorch reads it"),
        ("NCCL_TREE_THRESHOLD=0", "NCCL 2.5 removed it"),
        ("LD_PRELOAD=/x.so", "NAME is one of NCCL_ALGO"),
        ("NCCL_IB_TC", "write NAME=VALUE"),
    ]:
        with pytest.raises(ValueError, match=why):
            checked_additions([text])


class Recording:
    """A scheduler that takes every job."""

    name, look_seconds = "recording", 1.0

    def find(self, job: Job, work_dir: Path) -> str | None:
        return None

    def submit(self, job: Job, work_dir: Path) -> str:
        return "1"

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        return None

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        return

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        return work_dir / "log"


def test_the_profile_reaches_the_ranks_of_several_nodes_and_only_those(home):
    write_network(home.root, Network("multi_nic", ("eth0", "eth1"), (), ()))
    launcher = ScheduledLauncher(home.work_root, Recording())
    environments = []
    for num_nodes in (1, 2):
        job = Job(f"key{num_nodes}", "tests.support.toy_job", (), 2, {}, num_nodes, DEFAULT_QUEUE)
        launcher.submit(job)
        environments.append(json.loads((home.work_root / job.key / "command.json").read_text())["environment"])
    one, two = environments
    assert (one["NCCL_SOCKET_IFNAME"], one["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")
    assert (two["NCCL_SOCKET_IFNAME"], two["GLOO_SOCKET_IFNAME"]) == ("=eth0,eth1", "eth0,eth1")
    assert two["NCCL_SOCKET_NTHREADS"] == "4"


def test_a_key_is_made_once_and_other_keys_stay(tmp_path):
    ssh_dir = tmp_path / ".ssh"
    assert "make" in describe_key(ssh_dir)
    ssh_dir.mkdir()
    (ssh_dir / "authorized_keys").write_text("ssh-ed25519 AAAAother someone")
    authorize_own_key(ssh_dir)
    assert describe_key(ssh_dir) == ""
    text = (ssh_dir / "authorized_keys").read_text()
    assert len(text.splitlines()) == 2 and text.startswith("ssh-ed25519 AAAAother someone\n")
    authorize_own_key(ssh_dir)
    assert (ssh_dir / "authorized_keys").read_text() == text
    assert stat.S_IMODE((ssh_dir / "id_ed25519").stat().st_mode) == 0o600


def test_a_directory_that_only_root_can_make_says_how(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    request = probe_node.ProbeRequest(1, 1, str(tmp_path / "nvme"), makes_nvme_dir=True)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "needs root: on" in (said := probe_node._prepare_nvme(request))
    assert f"-m 0700 {tmp_path / 'nvme'}`" in said
    monkeypatch.undo()
    look = probe_node.ProbeRequest(1, 1, str(tmp_path / "nvme"))
    assert "glm46 cluster setup makes it" in probe_node._prepare_nvme(look)
    assert probe_node._prepare_nvme(request) == probe_node._prepare_nvme(look) == ""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kind": "lsf"}, "--type lsf: give one of slurm, pbs, kubernetes, manual"),
        ({"kind": "kubernetes"}, "give --image and --volume-claim"),
        ({"kind": "slurm", "nvme_dir": "nvme"}, "--nvme-path nvme: write the whole path"),
    ],
)
def test_settings_that_no_cluster_has_are_refused(values, why):
    with pytest.raises(ValueError, match=why):
        make_settings(**values)


def test_scripts_start_and_submit_a_run(tmp_path):
    launch = launch_script(tmp_path / "a b")
    assert f"export GLM46_HOME='{tmp_path}/a b'" in launch and launch.rstrip().endswith('glm46 run "$@"')
    slurm_lines = driver_script(ClusterSettings(kind="slurm", partition="cpu"), tmp_path).splitlines()
    assert {"#SBATCH --partition=cpu", "#SBATCH --nodes=1", f'{tmp_path}/launch.sh "$@" &'} <= set(slurm_lines)
    assert not [line for line in slurm_lines if "account" in line]
    for kind, line in (("slurm", "#SBATCH --output='{}/a b/driver-%j.log'"), ("pbs", "#PBS -o '{}/a b/driver.log'")):
        assert line.format(tmp_path) in driver_script(ClusterSettings(kind=kind), tmp_path / "a b").splitlines()
    pbs = driver_script(ClusterSettings(kind="pbs", account="team"), tmp_path).splitlines()
    assert {"#PBS -A team", "#PBS -l select=1:ncpus=4", f'exec {tmp_path}/launch.sh "$SCALE"'} <= set(pbs)
    shell = environment_script(Network("tcp", ("eth0",), (), ()))
    shown = subprocess.run(["sh", "-c", f"{shell}\nenv"], capture_output=True, text=True, check=True).stdout
    assert {"NCCL_SOCKET_IFNAME==eth0", "NCCL_IB_DISABLE=1"} <= set(shown.splitlines())


@pytest.mark.parametrize(("sent", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_the_run_goes_back_into_the_queue_before_its_time_limit_and_not_when_it_is_cancelled(
    sent, is_requeued, tmp_path
):
    """Slurm sends SIGUSR1 to the script; the run gets SIGTERM and ends as it does by itself."""
    (tmp_path / "launch.sh").write_text(
        f"#!/bin/bash\ntrap 'sleep 0.3; echo saved >> {tmp_path}/log; exit 1' TERM\necho began >> {tmp_path}/log\n"
        "while true; do sleep 0.05; done\n"
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/log\n')
    (tmp_path / "driver.sbatch").write_text(driver_script(ClusterSettings(kind="slurm"), tmp_path))
    for name in ("launch.sh", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    driver = subprocess.Popen(["bash", str(tmp_path / "driver.sbatch"), "micro"], env=environment)
    wait_for((tmp_path / "log").exists)
    driver.send_signal(sent)
    assert driver.wait(60) == 1
    assert (tmp_path / "log").read_text().splitlines() == ["began", "saved", *["requeue 7"] * is_requeued]


def test_a_file_of_your_own_is_found_from_the_directory_of_the_command(tmp_path, monkeypatch):
    glm46 = tmp_path / "bin" / "glm46"
    glm46.parent.mkdir()
    glm46.write_text('#!/bin/sh\nls "$2"\n')
    glm46.chmod(0o700)
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setattr(sys, "executable", str(glm46.with_name("python")))
    (tmp_path / "launch.sh").write_text(launch_script(tmp_path / "home"))
    (tmp_path / "launch.sh").chmod(0o700)
    subprocess.run(["sh", tmp_path / "launch.sh", "mine.yaml"], cwd=tmp_path, check=True)
    (tmp_path / "driver.pbs").write_text(driver_script(ClusterSettings(kind="pbs"), tmp_path))
    variables = {**os.environ, "SCALE": "mine.yaml", "PBS_O_WORKDIR": str(tmp_path)}
    subprocess.run(["bash", tmp_path / "driver.pbs"], cwd="/", env=variables, check=True)


def states(setup: Setup) -> dict[str, str]:
    return {action.name: action.state for action in set_up_cluster(setup)}


def test_a_set_up_is_shown_done_and_then_unchanged(home, tmp_path):
    settings = ClusterSettings(nvme_dir=str(tmp_path / "nvme" / "glm46"))
    before = sorted(home.root.rglob("*"))
    dry = states(Setup(home, settings, "", ANY_NETWORK, is_dry=True))
    assert {name for name, state in dry.items() if state == "would do"} == {
        *("settings", "nodes", "nvme directory", "launch script")
    }
    assert sorted(home.root.rglob("*")) == before and not (tmp_path / "nvme").exists(), "a dry run changes nothing"

    setup = Setup(home, settings, "", ANY_NETWORK, is_dry=False)
    done = states(setup)
    assert {name for name, state in done.items() if state == "done"} == {"settings", "nvme directory", "launch script"}
    assert stat.S_IMODE((tmp_path / "nvme" / "glm46").stat().st_mode) == 0o700
    assert set(states(setup).values()) == {"unchanged", "skipped"}


def test_the_network_needs_interfaces_that_all_nodes_have(home):
    setup = Setup(home, ClusterSettings(num_nodes=2), "", NetworkChoice("tcp", ("nowhere0",), (), ()), is_dry=True)
    action = setup_actions._attempt(
        "network", lambda: setup_actions._network(setup, Cluster(home, setup.settings, None, (), ""))
    )
    assert action.state == "failed" and "nowhere0 is not up on all nodes: give --interfaces, all have" in action.text


def test_nodes_connect_to_the_interfaces_that_are_about_to_be_written(home, monkeypatch):
    """Not to those of an earlier setup; the first one has no network.json yet."""
    asked = []
    monkeypatch.setattr(NodeJobs, "probe", lambda jobs, request: asked.append(request.interface) or [])
    monkeypatch.setattr(setup_actions, "default_interface", lambda: "eth9")
    write_network(home.root, Network("tcp", ("eth0",), (), ()))
    for interfaces in ((), ("ib0", "ib1")):
        states(Setup(home, ClusterSettings(), "", NetworkChoice("tcp", interfaces, (), ()), is_dry=False))
    assert asked == ["eth9", "ib0"]


def test_a_scheduler_that_is_not_here_is_one_sentence(home, monkeypatch):
    monkeypatch.setenv("PATH", "")
    seen = look_at_cluster(home, ClusterSettings(kind="pbs"), None, 0, interfaces=())  # no job is submitted
    assert seen.unreached.startswith("no qsub, qstat, qdel: run on a machine that submits to pbs")


ACTIONS = [
    *("prerequisites", "hostfile", "settings", "ssh keys", "nodes"),
    *("nvme directory", "network", "launch script", "submission script"),
]


def test_off_the_cluster_every_action_is_shown_and_those_that_need_no_scheduler_are_done(home, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    settings = ClusterSettings(kind="slurm", num_nodes=2, nvme_dir=str(tmp_path / "nvme"))
    seen = {action.name: action for action in set_up_cluster(Setup(home, settings, "", ANY_NETWORK, is_dry=False))}
    assert list(seen) == ACTIONS
    states_seen = {name: action.state for name, action in seen.items()}
    assert states_seen == dict(
        zip(
            ACTIONS,
            ["failed", "failed", "done", "skipped", "failed", "skipped", "skipped", "done", "done"],
            strict=True,
        )
    )
    assert seen["network"].text == "needs the answers of the nodes"
    assert (home.root / "cluster" / "driver.sbatch").is_file() and not (tmp_path / "nvme").exists()
    dry = states(Setup(home, settings, "", NetworkChoice("tcp", ("lo",), (), ()), is_dry=True))
    assert list(dry) == ACTIONS and dry["nodes"] == dry["network"] == "would do"


def test_without_hosts_nothing_is_set_up_over_ssh_that_needs_them(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ClusterSettings(kind="manual", num_nodes=3)
    seen = {
        action.name: action for action in set_up_cluster(Setup(home, settings, "node[1-2]", ANY_NETWORK, is_dry=False))
    }
    assert list(seen) == ACTIONS and "--nodes is 3: name more by --hosts" in seen["hostfile"].text
    for name in ("settings", "nodes"):
        assert (seen[name].state, seen[name].text) == ("skipped", "needs the hostfile")
    assert seen["launch script"].state == "done" and not (home.root / "cluster" / "cluster.json").exists()


@pytest.mark.long
def test_hosts_are_set_up_over_ssh_and_wrong_use_is_refused(home, tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    options = ("cluster", "setup", "--type", "manual", "--nodes", "2", "--interfaces", "lo")
    more = ("--hosts", "node[1-2]", "--nvme-path", str(tmp_path / "nvme"))
    with ssh_hosts(tmp_path / "hosts"):
        first, second = (glm46(*options, *more, home=home.root, HOME=str(tmp_path)) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.stdout + first.stderr
    assert first.stdout.count("\ndone ") == 6 and "2 answer" in first.stdout
    assert {line.split()[0] for line in second.stdout.splitlines()} == {"unchanged", "skipped"}
    assert (home.root / "cluster" / "hostfile").read_text() == "node1\nnode2\n"
    assert "NCCL_SOCKET_IFNAME==lo" in (home.root / "cluster" / "environment.sh").read_text()
    for wrong, why in [((), "name the hosts by --hostfile or --hosts"), (("--master-port", "29500"), "leave it out")]:
        refused = glm46(*options, *wrong, home=home.root, HOME=str(tmp_path))
        assert refused.exit_code == 2 and why in refused.stderr


@pytest.mark.long
def test_a_real_slurm_is_set_up_and_takes_the_script_of_a_run(home, tmp_path):
    if reason := slurm.missing_programs():
        pytest.skip(reason)
    settings = ClusterSettings(kind="slurm", num_nodes=2)
    setup = Setup(home, settings, "", NetworkChoice("tcp", ("lo",), (), ()), is_dry=False)
    with slurm.slurm_cluster(tmp_path / "slurm"):
        done, again = states(setup), states(setup)
        assert "failed" not in done.values() and set(again.values()) == {"unchanged", "skipped"}
        assert (home.root / "cluster" / "hostfile").read_text() == "node1\nnode2\n"
        script = home.root / "cluster" / "driver.sbatch"
        script.write_text(script.read_text().replace("--cpus-per-task=4", "--cpus-per-task=1"))
        number = subprocess.run(
            ["sbatch", "--parsable", str(script), "--help"], capture_output=True, text=True, check=True
        ).stdout.strip()
        log = home.root / "cluster" / f"driver-{number}.log"
        slurm.wait_until(lambda: log.exists() and "Run the pipeline at a scale" in log.read_text())
        time.sleep(0.1)
