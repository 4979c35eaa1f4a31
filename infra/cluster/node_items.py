"""Items of the checklist that judge what the nodes have reported."""

from __future__ import annotations

from packaging.version import Version

from infra.cluster.disk_speed import NO_FIO
from infra.cluster.items import GB, Cluster, Item, judged, skipped
from infra.machine.network import LINK_LAYERS, active_cards, card_faults

MIN_DISK_BYTES = 7e9
MIN_DRIVER, MIN_CUDA, MIN_NCCL = "530.30.02", "12.1", "2.18"
MIN_NCCL_ROCE = "2.21"
"""Older ones do not choose the GID of RoCE v2 by themselves."""
GPUS = f"gpus_per_node on each node, driver {MIN_DRIVER} or later"


def _gpus(cluster: Cluster) -> Item:
    wanted = cluster.settings.gpus_per_node
    if not wanted:
        return skipped("gpus", GPUS, _no_gpus(cluster))
    problems = [f"{report.name}: {report.gpu_problem}" for report in cluster.reports if report.gpu_problem]
    for report in cluster.reports:
        if not report.gpu_problem and len(report.gpus) != wanted:
            problems.append(f"{report.name} has {len(report.gpus)} of {wanted}")
        old = {gpu.driver for gpu in report.gpus if Version(gpu.driver) < Version(MIN_DRIVER)}
        problems += [f"{report.name} has driver {driver}" for driver in sorted(old)]
    names = sorted({f"{gpu.name}, driver {gpu.driver}" for report in cluster.reports for gpu in report.gpus})
    fix = "drain the node, update its driver or replace the GPU, and see `nvidia-smi` and `dmesg` there"
    return judged("gpus", GPUS, f"{wanted} per node: {'; '.join(names)}", problems, fix)


def _no_gpus(cluster: Cluster) -> str:
    seen = max((len(report.gpus) for report in cluster.reports), default=0)
    return f"gpus_per_node is 0{f', but nodes have {seen}: give --gpus-per-node {seen}' if seen else ''}"


CLOCKS = "no GPU is slowed down by heat, power or application clocks"


def _gpu_clocks(cluster: Cluster) -> Item:
    if not cluster.settings.gpus_per_node:
        return skipped("gpu_clocks", CLOCKS, _no_gpus(cluster))
    every = [(report.name, gpu) for report in cluster.reports for gpu in report.gpus]
    problems = [f"{name} GPU {gpu.index}: {', '.join(gpu.slow_reasons)}" for name, gpu in every if gpu.slow_reasons]
    clocks = sorted({f"{gpu.max_clock_mhz} MHz at most" for _, gpu in every})
    fix = "see `nvidia-smi -q -d PERFORMANCE,CLOCK` there: mend cooling or power, or reset clocks by `nvidia-smi -rac`"
    return judged("gpu_clocks", CLOCKS, ", ".join(clocks), problems, fix)


RDMA = "the profile's RDMA cards, and those that another node has active, are ACTIVE and LinkUp on each node"


def _rdma(cluster: Cluster) -> Item:
    network = cluster.network
    ports = {report.name: report.rdma for report in cluster.reports}
    active = [port for of in ports.values() for port in of if port.is_active]
    if network is None and cluster.settings.num_nodes == 1:
        return skipped("rdma", RDMA, "ranks of one node use its loopback")
    if network is None or network.profile not in LINK_LAYERS:
        if not active:
            return skipped("rdma", RDMA, "no node has an active RDMA card")
        unused = f"{len(active)} ports are active, and profile {network.profile if network else 'none'} uses no card"
        return Item("rdma", RDMA, unused, "failed", "run glm46 cluster setup without --network: it takes RDMA cards")
    hcas, devices = network.hcas, {hca.partition(":")[0] for hca in network.hcas}
    unnamed = [card for card in active_cards(ports, network.profile) if card not in devices]
    problems = card_faults(ports, network.profile, (*hcas, *unnamed))
    measured = f"{len(hcas)} RDMA cards per node: {', '.join(sorted({port.rate for port in active}))}"
    fix = "see `ibstat` and the cable there; on InfiniBand a subnet manager must run"
    return judged("rdma", RDMA, measured, problems, fix)


NVME = f"fio reads and writes more than {MIN_DISK_BYTES / GB:.0f} GB/s on each node"


def _nvme(cluster: Cluster) -> Item:
    if not cluster.settings.nvme_dir:
        return skipped("nvme", NVME, "no directory was named: give --nvme-path")
    unusable = [report.nvme_problem for report in cluster.reports if report.nvme_problem]
    if unusable:
        return judged("nvme", NVME, "", unusable, "run glm46 cluster setup, or name another --nvme-path")
    disks = {report.name: report.disk for report in cluster.reports if report.disk is not None}
    without_fio = [f"{name}: {NO_FIO}" for name, disk in disks.items() if disk.problem == NO_FIO]
    problems = [f"{name}: {disk.problem}" for name, disk in disks.items() if disk.problem not in ("", NO_FIO)]
    speeds = {name: min(disk.write, disk.read) for name, disk in disks.items() if not disk.problem}
    problems += [
        f"{name} writes {disks[name].write / GB:.2f} and reads {disks[name].read / GB:.2f} GB/s"
        for name, speed in speeds.items()
        if speed <= MIN_DISK_BYTES
    ]
    if not problems and (without_fio or not disks):
        return skipped("nvme", NVME, without_fio[0] if disks else "--fio-seconds is 0")
    fix = "put --nvme-path on an NVMe disk of its own, or on a RAID 0 of several"
    return judged("nvme", NVME, f"slowest {min(speeds.values(), default=0) / GB:.2f} GB/s", problems, fix)


SHARED = "each node sees the files of the others, and a lock of one keeps out the others"


def _shared_storage(cluster: Cluster) -> Item:
    if cluster.settings.num_nodes == 1:
        return skipped("shared_storage", SHARED, "one node shares with nobody")
    shared = [report.shared for report in cluster.reports]
    problems = [text for each in shared for text in (each.problem, each.lock_problem) if text]
    fix = (
        "put GLM46_HOME on a file system that all nodes mount, with locks between nodes (Lustre: -o flock; NFS: "
        "vers=4.2 without nolock; BeeGFS: tuneUseGlobalFileLocks)"
    )
    return judged("shared_storage", SHARED, f"{len(shared)} nodes agree", problems, fix)


CHECKPOINTS = "each node writes a file with fsync below GLM46_HOME and reads it back"


def _checkpoint_dir(cluster: Cluster) -> Item:
    problems = [report.shared.problem for report in cluster.reports if report.shared.problem]
    speed = min(report.shared.save_bytes_per_second for report in cluster.reports)
    measured = f"slowest {speed / GB:.2f} GB/s on {cluster.home.work_root}"
    return judged("checkpoint_dir", CHECKPOINTS, measured, problems, "make GLM46_HOME writable on all nodes")


DATA = "each node lists the documents' directory"


def _data(cluster: Cluster) -> Item:
    path = cluster.settings.data
    if not path:
        return skipped("data", DATA, "no directory was named: give --data")
    counts = {report.name: report.num_data_entries for report in cluster.reports}
    seen = {count for count in counts.values() if count is not None}
    problems = [f"{name} does not list {path}" for name, count in counts.items() if not count]
    if len(seen) > 1:
        problems.append(f"nodes list {', '.join(map(str, sorted(seen)))} entries")
    return judged("data", DATA, f"{max(seen, default=0)} entries", problems, "mount the same directory on all nodes")


PORTS = "each node reaches the next one at a free TCP port"


def _ports(cluster: Cluster) -> Item:
    if cluster.settings.num_nodes == 1:
        return skipped("ports", PORTS, "one node connects to nobody")
    problems = [report.shared.connect_problem for report in cluster.reports if report.shared.connect_problem]
    fix = "open the ports of net.ipv4.ip_local_port_range between nodes, or give --interfaces of a network that is open"
    return judged("ports", PORTS, f"{len(cluster.reports)} connections", problems, fix)


VERSIONS = f"Python, packages and compiler; with GPUs CUDA {MIN_CUDA} and NCCL {MIN_NCCL} or later"


def _versions(cluster: Cluster) -> Item:
    problems = [
        f"{report.name}: {check.name} {check.found} ({check.fix})"
        for report in cluster.reports
        for check in report.environment
        if not check.passed
    ]
    floor = MIN_NCCL_ROCE if cluster.network and cluster.network.profile == "roce" else MIN_NCCL
    seen = sorted({(report.cuda, report.nccl) for report in cluster.reports if report.gpus})
    for cuda, nccl in seen:
        if not cuda:
            problems.append("PyTorch is built without CUDA")
        elif Version(cuda) < Version(MIN_CUDA) or Version(nccl) < Version(floor):
            problems.append(f"CUDA {cuda} and NCCL {nccl}, asked for {MIN_CUDA} and {floor}")
    libraries = ", ".join(f"CUDA {cuda}, NCCL {nccl}" for cuda, nccl in seen)
    fix = "make the project's environment anew on all nodes, with a PyTorch for CUDA where there are GPUs"
    return judged("versions", VERSIONS, libraries or "as asked", problems, fix)


ON_NODES = (
    ("gpus", GPUS, _gpus),
    ("rdma", RDMA, _rdma),
    ("nvme", NVME, _nvme),
    ("shared_storage", SHARED, _shared_storage),
    ("checkpoint_dir", CHECKPOINTS, _checkpoint_dir),
    ("data", DATA, _data),
    ("versions", VERSIONS, _versions),
    ("gpu_clocks", CLOCKS, _gpu_clocks),
    ("ports", PORTS, _ports),
)
"""Items that read the reports of nodes."""
