"""A real Slurm with two nodes on this machine, for tests: no systemd, everything below one directory, cgroups only
where a test asks for limits of memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.child_process import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
NODES = ("node1", "node2")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
SlurmctldPort={ports[0]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=10
BatchStartTimeout=20
MessageTimeout=10
MinJobAge=600
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes=node1,node2 Default=YES MaxTime=01:00:00 State=UP
"""
LIMITED_MEMORY = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/cgroup",
    "SelectTypeParameters": "CR_Core_Memory",
}
"""Settings with which a job that takes more than the node's memory is killed."""
CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""


@dataclass(frozen=True)
class SlurmCluster:
    root: Path

    def kill_node(self, name: str) -> None:
        """End a node's daemon and what runs under it, as when the machine goes down."""
        pid = int((self.root / f"slurmd.{name}.pid").read_text())
        for process in (*self._processes_of(name), pid):
            with suppress(ProcessLookupError):  # ranks end with their supervisor
                os.kill(process, signal.SIGKILL)

    def lose_node(self, name: str, why: str) -> None:
        """It goes down, and the administrator sets it down for good."""
        self.kill_node(name)
        self.set_node(name, "down", why)

    def set_node(self, name: str, state: str, why: str = "") -> None:
        """As an administrator does: drain, down, resume."""
        reason = [f"reason={why}"] if why else []
        subprocess.run(["scontrol", "update", f"nodename={name}", f"state={state}", *reason], check=True)

    def start_node(self, name: str, *, idle: bool = True) -> None:
        """It comes back; idle: wait until it takes jobs, and none has it at once."""
        subprocess.run(["slurmd", "-N", name, "-f", str(self.root / "slurm.conf")], check=True)
        if idle:
            wait_until(lambda: name in _idle_nodes())

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Slurm's commands find nobody meanwhile."""
        path = self.root / "slurmctld.pid"
        os.kill(int(path.read_text()), signal.SIGKILL)
        try:
            yield
        finally:
            subprocess.run(["slurmctld", "-f", str(self.root / "slurm.conf")], check=True)
            wait_until(lambda: _shown("sinfo", "--noheader"))

    def _processes_of(self, name: str) -> list[int]:
        """What runs on a node: the daemons of its steps, which are to report nothing, then what they started."""
        import psutil

        started, daemons = [], set()
        for process in psutil.process_iter(["environ", "ppid"]):
            own = process.info["environ"] or {}
            is_here = own.get("SLURM_CONF") == str(self.root / "slurm.conf")  # another cluster has nodes of these names
            if is_here and own.get("SLURMD_NODENAME") == name:
                started.append(process.pid)
                daemons.add(process.info["ppid"])
        return [*(pid for pid in daemons if is_step_daemon(pid)), *started]


def is_step_daemon(pid: int) -> bool:
    path = Path(f"/proc/{pid}/comm")
    return path.exists() and path.read_text().strip() == "slurmstepd"


def missing_programs() -> str:
    """What a test needs and this machine lacks; empty where all is there."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return (
        f"no {', '.join(missing)} (apt-get install slurm-wlm)" if missing else "" if os.geteuid() == 0 else "not root"
    )


@contextmanager
def slurm_cluster(root: Path, **settings: str) -> Iterator[SlurmCluster]:
    """Two idle nodes; SLURM_CONF is in the environment while they are up. settings: of slurm.conf, in place of those
    above."""
    for name in ("state", *(f"spool.{node}" for node in NODES), "munge"):
        (root / name).mkdir(parents=True)
    (root / "munge").chmod(0o700)
    (root / "munge" / "key").write_bytes(os.urandom(1024))
    (root / "munge" / "key").chmod(0o400)
    configuration = root / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    host = socket.gethostname().split(".")[0]
    configuration.write_text(_changed(CONFIGURATION.format(root=root, host=host, ports=ports), settings))
    (root / "cgroup.conf").write_text(CGROUPS)
    os.environ["SLURM_CONF"] = str(configuration)
    try:
        subprocess.run(_munged(root), check=True)
        subprocess.run(["slurmctld", "-c", "-f", str(configuration)], check=True)
        for node in NODES:
            subprocess.run(["slurmd", "-N", node, "-f", str(configuration)], check=True)
        wait_until(lambda: set(NODES) == _idle_nodes())
        yield SlurmCluster(root)
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        with suppress(AssertionError):  # a daemon that is told to end waits for its jobs, without its pid file
            wait_until(lambda: not _shown("squeue", "--noheader"), seconds=20)
        subprocess.run(["scontrol", "shutdown"], check=False, capture_output=True)
        time.sleep(1)
        for path in root.glob("*.pid"):
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                continue
        del os.environ["SLURM_CONF"]


def _changed(text: str, settings: dict[str, str]) -> str:
    for name, value in settings.items():
        text, number = re.subn(rf"^({name}=).*$", rf"\g<1>{value}", text, flags=re.M)
        assert number == 1, name
    return text


def limits_memory() -> bool:
    """Whether Slurm can limit memory here: it has the first version of control groups, which it may write."""
    return os.access("/sys/fs/cgroup/memory/tasks", os.W_OK)


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "Slurm's nodes did not become idle, or its jobs did not end"
        time.sleep(0.2)


def _idle_nodes() -> set[str]:
    return set(_shown("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())


def _shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _munged(root: Path) -> list[str]:
    files = {"key-file": "munge/key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munge/log"}
    options = [f"--{name}={root / path}" for name, path in files.items()]
    return ["munged", *options, f"--seed-file={root / 'munge' / 'seed'}", "--force", "--num-threads=2"]
