"""Looks at a node from inside a job: `python -m infra.cluster.probe_node WORK_DIR`, one rank per node.

In: request.json. Out: report-N.json of node N. The nodes meet in the work directory, which tests the shared file system
(do others see a renamed file, do locks hold between nodes), and each connects to the next one over TCP.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from configs.files.atomic_files import replace_durably
from infra.cluster.disk_speed import DiskSpeed, measure_disk
from infra.cluster.gpus import Gpu, query_gpus, torch_versions
from infra.machine.doctor import Check, check_environment
from infra.machine.network import RdmaPort, default_interface, live_interfaces, rdma_ports

LEADER = 0
MEET_SECONDS = 60.0
"""For all nodes to be seen. Nodes of one job start within seconds of each other."""
POLL_SECONDS = 0.2
CONNECT_SECONDS = 10
SAVED_BYTES = 64 << 20
NAME_VARIABLES = ("GLM46_NODE_NAME", "SLURMD_NODENAME")


@dataclass(frozen=True)
class ProbeRequest:
    """What each node is to look at; empty names are left out."""

    num_nodes: int
    ranks_per_node: int
    nvme_dir: str = ""
    makes_nvme_dir: bool = False
    fio_seconds: int = 0
    """0 measures no disk."""
    data: str = ""
    interface: str = ""
    """Whose address the nodes connect to; empty for that of each node's default route."""


@dataclass(frozen=True)
class SharedFiles:
    """How the work directory behaves; empty problems where it does as it must."""

    problem: str
    lock_problem: str
    connect_problem: str
    save_bytes_per_second: float
    """Of one file, with fsync and reading back."""


@dataclass(frozen=True)
class NodeReport:
    """What a node sees."""

    name: str
    gpus: tuple[Gpu, ...]
    gpu_problem: str
    cuda: str
    """Of PyTorch, like NCCL's version; empty without a GPU."""
    nccl: str
    rdma: tuple[RdmaPort, ...]
    interfaces: dict[str, str]
    environment: tuple[Check, ...]
    """Python, packages, compiler: the checks of `glm46 doctor`."""
    shared: SharedFiles
    nvme_problem: str
    """Why the directory cannot be used; empty also where none was named."""
    disk: DiskSpeed | None
    num_data_entries: int | None
    """None where it is no directory here, or none was named."""


@dataclass(frozen=True)
class ProbeFailure:
    """Why a node could not be looked at."""

    name: str
    error: str


ANSWER: TypeAdapter[NodeReport | ProbeFailure] = TypeAdapter(NodeReport | ProbeFailure)
REQUEST = TypeAdapter(ProbeRequest)


def probe_node(request: ProbeRequest, work_dir: Path, node: int) -> NodeReport:
    """Look at this node, while the others look at theirs."""
    shared = _meet(request, work_dir, node)
    gpus, gpu_problem = [], ""
    try:
        gpus = query_gpus()
    except (RuntimeError, OSError, ValueError) as error:
        gpu_problem = str(error)
    cuda, nccl = torch_versions() if gpus else ("", "")
    nvme_problem = _prepare_nvme(request) if request.nvme_dir else ""
    measures = request.fio_seconds and request.nvme_dir and not nvme_problem
    disk = measure_disk(Path(request.nvme_dir), request.fio_seconds) if measures else None
    data = Path(request.data) if request.data else None
    return NodeReport(
        name=node_name(),
        gpus=tuple(gpus),
        gpu_problem=gpu_problem,
        cuda=cuda,
        nccl=nccl,
        rdma=tuple(rdma_ports()),
        interfaces=live_interfaces(),
        environment=tuple(check_environment()),
        shared=shared,
        nvme_problem=nvme_problem,
        disk=disk,
        num_data_entries=_count_entries(data) if data is not None else None,
    )


def node_name() -> str:
    """As people know this node."""
    return next((os.environ[name] for name in NAME_VARIABLES if os.environ.get(name)), os.uname().nodename)


def _prepare_nvme(request: ProbeRequest) -> str:
    """Make the directory if that was asked for; why it cannot be used, empty where it can."""
    directory, user = Path(request.nvme_dir), os.environ.get("USER") or str(os.geteuid())
    try:
        if request.makes_nvme_dir:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = directory / f".glm46-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except PermissionError:
        return f"needs root: on {node_name()} run `sudo install -d -o {user} -m 0700 {directory}`"
    except FileNotFoundError:
        return f"{node_name()} has no {directory}: glm46 cluster setup makes it"
    except OSError as error:
        return f"{node_name()}: {directory}: {error.strerror}"
    return ""


def _count_entries(directory: Path) -> int | None:
    """Entries of the directory that this user can list, none where it is not there."""
    try:
        with os.scandir(directory) as entries:
            return sum(1 for _ in entries)
    except OSError:
        return None


def _meet(request: ProbeRequest, work_dir: Path, node: int) -> SharedFiles:
    """Exchange addresses by files, then try the leader's lock and the next node's port."""
    meeting = work_dir / "meeting"
    meeting.mkdir(exist_ok=True)
    lock = os.open(meeting / "lock", os.O_RDWR | os.O_CREAT)
    lock_problem = ""
    if node == LEADER:
        lock_problem = _take_lock(lock)
    with socket.create_server(("", 0), backlog=16) as listener:
        address = _own_address(request.interface)
        _write(meeting / f"here-{node}", json.dumps([address, listener.getsockname()[1]]))
        missing = _await_all(meeting, "here", request.num_nodes)
        connect_problem = ""
        if not missing and request.num_nodes > 1:
            connect_problem = _connect(meeting, (node + 1) % request.num_nodes) if address else _no_address()
            if node != LEADER:
                lock_problem = _try_held_lock(lock)
        _write(meeting / f"tried-{node}", "")
        if not missing:
            _await_all(meeting, "tried", request.num_nodes)
    os.close(lock)
    problem = f"{node_name()} does not see node {', '.join(map(str, missing))} there" if missing else ""
    speed, save_problem = _save(work_dir, node)
    return SharedFiles(problem or save_problem, lock_problem, connect_problem, speed)


def _write(path: Path, text: str) -> None:
    replace_durably(path, text.encode())


def _await_all(meeting: Path, name: str, num_nodes: int) -> list[int]:
    """Wait for the file of each node; those that did not come."""
    return _await(lambda: [node for node in range(num_nodes) if not (meeting / f"{name}-{node}").exists()])


def _await(missing: Callable[[], list[int]]) -> list[int]:
    deadline = time.monotonic() + MEET_SECONDS
    while (absent := missing()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return absent


def _take_lock(lock: int) -> str:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"{node_name()}: flock: {error.strerror}"
    return ""


def _try_held_lock(lock: int) -> str:
    """The leader holds it: taking it must fail."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as error:
        return f"{node_name()}: flock: {error.strerror}"
    return f"{node_name()} got a lock that node {LEADER} holds"


def _own_address(interface: str) -> str:
    """Of the interface, else of the default route's, else of the host's name; empty where others reach none of them.
    The name comes last: Debian's /etc/hosts has it as 127.0.1.1."""
    live = live_interfaces()
    if address := live.get(interface) or live.get(default_interface() or ""):
        return address
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if address.startswith("127.") else address


def _no_address() -> str:
    return f"{node_name()} has no default route, and its host name has only a loopback address: give --interfaces"


def _connect(meeting: Path, other: int) -> str:
    """Why the other node is not reached; empty also where it has no address, as it says so itself."""
    address, port = json.loads((meeting / f"here-{other}").read_text())
    if not address:
        return ""
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{node_name()} does not reach node {other} at {address}, port {port}: {error}"
    return ""


def _save(work_dir: Path, node: int) -> tuple[float, str]:
    """Write a file as a checkpoint is written, and read it back."""
    block = os.urandom(1 << 20)
    path = work_dir / f"saved-{node}"
    began = time.perf_counter()
    try:
        replace_durably(path, block * (SAVED_BYTES >> 20))
        read = hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        return 0.0, f"{node_name()} cannot write there: {error.strerror}"
    finally:
        path.unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    same = read == hashlib.sha256(block * (SAVED_BYTES >> 20)).digest()
    return SAVED_BYTES / seconds, "" if same else f"{node_name()} read back other bytes than it wrote"


def main() -> int:
    work_dir = Path(sys.argv[1])
    request = REQUEST.validate_json((work_dir / "request.json").read_bytes())
    node, local_rank = divmod(int(os.environ["RANK"]), request.ranks_per_node)
    if local_rank:
        return 0
    try:
        answer = probe_node(request, work_dir, node)
    except Exception as error:  # whatever a sick node raises, it is named and the others' reports are read
        traceback.print_exc()
        answer = ProbeFailure(node_name(), f"{type(error).__name__}: {error} (logs: {work_dir / 'logs'})")
    replace_durably(work_dir / f"report-{node}.json", ANSWER.dump_json(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
