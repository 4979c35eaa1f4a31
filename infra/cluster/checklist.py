"""The checklist before a large training: each item has a threshold, what was measured, and the fix in one sentence.

Thirteen items are those of a published guide (docs/source-documents.md, S2), in its order; versions, clocks and ports
are three more. What needs hardware that is not there is skipped with the reason, which fails nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.cluster.cluster_settings import ClusterSettings
from infra.cluster.items import GB, Cluster, Item, first_of, judged, skipped
from infra.cluster.node_items import ON_NODES
from infra.cluster.node_jobs import NodeJobs, failure_sentence
from infra.cluster.probe_node import NodeReport, ProbeFailure, ProbeRequest
from infra.cluster.trial_job import HOLD_STEP, TrialResult, expected_value
from infra.home import Home
from infra.jobs.ssh_jobs import read_hostfile
from infra.machine.doctor import check_launchers
from infra.machine.network import REFUSED, read_network
from infra.monitoring.services import read_services

MIN_BUS_BYTES = 300e9
ORDER = (
    *("nodes", "gpus", "rdma", "nccl", "nvme", "shared_storage", "environment", "hostfile", "monitoring"),
    *("checkpoint_dir", "data", "small_job", "recovery"),
    *("versions", "gpu_clocks", "ports"),
)
MEASURED_SERVICES = ("prometheus", "exporter")


def check_cluster(home: Home, settings: ClusterSettings, fio_seconds: int) -> list[Item]:
    """Ask the nodes by a job, try two more jobs, and judge."""
    jobs = NodeJobs(home, settings)
    network = read_network(home.root)
    cluster = look_at_cluster(home, settings, jobs, fio_seconds, interfaces=network.interfaces if network else ())
    trial, recovery = _tried(cluster, jobs.try_job), _tried(cluster, jobs.try_recovery)
    items = [
        *(about_nodes(cluster)),
        _nodes(cluster),
        _environment(cluster),
        _hostfile(settings),
        _monitoring(home),
        _nccl(settings, trial),
        _small_job(settings, trial),
        _recovery(settings, recovery),
    ]
    by_id = {item.id: item for item in items}
    return [by_id[name] for name in ORDER]


def look_at_cluster(
    home: Home,
    settings: ClusterSettings,
    jobs: NodeJobs,
    fio_seconds: int,
    *,
    interfaces: Sequence[str],
    makes_nvme_dir: bool = False,
) -> Cluster:
    """What all nodes report, or why they do not. They connect to each other's first interface."""
    network = read_network(home.root)
    missing = [f"{check.found}: {check.fix}" for check in check_launchers([settings.launcher]) if not check.passed]
    if missing:
        return Cluster(home, settings, network, (), missing[0])
    request = ProbeRequest(
        num_nodes=settings.num_nodes,
        ranks_per_node=max(1, settings.gpus_per_node),
        nvme_dir=settings.nvme_dir,
        makes_nvme_dir=makes_nvme_dir,
        fio_seconds=fio_seconds,
        data=settings.data,
        interface=next(iter(interfaces), ""),
    )
    try:
        answers = jobs.probe(request)
    except (ValueError, RuntimeError, OSError) as error:
        return Cluster(home, settings, network, (), failure_sentence(error))
    reports = tuple(answer for answer in answers if isinstance(answer, NodeReport))
    failures = [f"{answer.name}: {answer.error}" for answer in answers if isinstance(answer, ProbeFailure)]
    return Cluster(home, settings, network, reports, first_of(failures))


def about_nodes(cluster: Cluster) -> list[Item]:
    """The items that read the reports of nodes; all skipped where there are none."""
    if cluster.reports:
        return [judge(cluster) for _, _, judge in ON_NODES]
    return [skipped(name, threshold, "no node was asked: see nodes") for name, threshold, _ in ON_NODES]


def _tried(cluster: Cluster, attempt: Callable[[], TrialResult]) -> TrialResult | str:
    """Its result, or why there is none; empty where no node answers."""
    if not cluster.reports:
        return ""
    try:
        return attempt()
    except (ValueError, RuntimeError, OSError) as error:
        return failure_sentence(error)


def _nodes(cluster: Cluster) -> Item:
    number, launcher = cluster.settings.num_nodes, cluster.settings.launcher
    threshold = f"a job of launcher {launcher} runs on {number} node{'s' * (number > 1)}"
    names = [report.name for report in cluster.reports]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    problems = [cluster.unreached] if cluster.unreached else []
    return judged("nodes", threshold, shown, problems, "do what the launcher or the node says of it, then check again")


def _environment(cluster: Cluster) -> Item:
    threshold = "jobs on several nodes get a network profile whose interfaces are up, and no variable without effect"
    network = cluster.network
    problems = [f"{name} is set: {REFUSED[name]}" for name in sorted(REFUSED) if os.environ.get(name)]
    if network is None and cluster.settings.num_nodes > 1:
        problems.append("no network profile was chosen")
    for report in cluster.reports:
        missing = set(network.interfaces) - set(report.interfaces) if network else set()
        problems += [f"{report.name} has no interface {name} that is up" for name in sorted(missing)]
    measured = f"profile {network.profile}, {', '.join(network.interfaces)}" if network else "one node needs no profile"
    fix = "run glm46 cluster setup with --network and --interfaces, and unset what has no effect"
    return judged("environment", threshold, measured, problems, fix)


def _hostfile(settings: ClusterSettings) -> Item:
    threshold = "a host per line, as many as nodes, each with slots for its GPUs"
    if settings.launcher != "ssh":
        return skipped("hostfile", threshold, f"launcher {settings.launcher} needs none")
    fix = "correct it, or let glm46 cluster setup --hosts write it"
    try:
        hosts = read_hostfile(Path(settings.hostfile))
    except ValueError as error:
        return judged("hostfile", threshold, "", [str(error)], fix)
    fitting = [host for host in hosts if host.slots is None or host.slots >= settings.gpus_per_node]
    few = f"{len(fitting)} of {len(hosts)} hosts have enough slots, {settings.num_nodes} are needed"
    problems = [few] if len(fitting) < settings.num_nodes else []
    return judged("hostfile", threshold, f"{len(hosts)} hosts in {settings.hostfile}", problems, fix)


def _monitoring(home: Home) -> Item:
    running = read_services(home)
    missing = [name for name in MEASURED_SERVICES if name not in running]
    problems = [f"{' and '.join(missing)} of this home do not run"] if missing else []
    threshold = "Prometheus and the exporter run"
    measured = ", ".join(f"{name} {service.url}" for name, service in running.items())
    return judged("monitoring", threshold, measured, problems, "glm46 up --monitoring")


def _nccl(settings: ClusterSettings, trial: TrialResult | str) -> Item:
    threshold = f"summing 1 GiB over all GPUs moves more than {MIN_BUS_BYTES / GB:.0f} GB/s (bus bandwidth)"
    if not settings.gpus_per_node:
        return skipped("nccl", threshold, "gpus_per_node is 0")
    if isinstance(trial, str):
        return skipped("nccl", threshold, "no sum was measured: see small_job")
    if trial.num_ranks == 1:
        return skipped("nccl", threshold, "one GPU sums with nobody")
    measured = f"{trial.bus_bytes_per_second / GB:.1f} GB/s over {trial.num_ranks} GPUs"
    slow = [measured] if trial.bus_bytes_per_second <= MIN_BUS_BYTES else []
    fix = "see rdma and environment, then run nccl-tests with NCCL_DEBUG=INFO: it names the transport that NCCL takes"
    return judged("nccl", threshold, measured, slow, fix)


def _small_job(settings: ClusterSettings, trial: TrialResult | str) -> Item:
    threshold = "a job on all nodes sums over its ranks, and the sum is right"
    if trial == "":
        return skipped("small_job", threshold, "no node was asked: see nodes")
    if isinstance(trial, str):
        return judged("small_job", threshold, "", [trial], "see its log, then check again")
    problems = _wrong_value(trial)
    measured = f"ranks {trial.num_ranks}, nodes {settings.num_nodes}, sum {trial.value:.0f}"
    if trial.bus_bytes_per_second:
        measured += f", {trial.bus_bytes_per_second / GB:.2f} GB/s"
    return judged("small_job", threshold, measured, problems, "look for a faulty GPU, network card or memory")


def _recovery(settings: ClusterSettings, recovery: TrialResult | str) -> Item:
    threshold = f"a job that is killed at step {HOLD_STEP} resumes there and ends in the same sum"
    if recovery == "":
        return skipped("recovery", threshold, "no node was asked: see nodes")
    if isinstance(recovery, str):
        return judged("recovery", threshold, "", [recovery], "see its log, then check again")
    problems = _wrong_value(recovery)
    if recovery.began_at != HOLD_STEP:
        problems.append(f"it went on from step {recovery.began_at}")
    measured = f"nodes {settings.num_nodes}, resumed after step {recovery.began_at}, sum {recovery.value:.0f}"
    return judged("recovery", threshold, measured, problems, "see whether GLM46_HOME keeps what was written with fsync")


def _wrong_value(result: TrialResult) -> list[str]:
    expected = expected_value(result.num_ranks)
    return [] if result.value == expected else [f"the sum is {result.value}, it should be {expected}"]
