"""Submits, polls, cancels and looks up jobs: phases, and steps that run as jobs (step_jobs.py).

A job is named by its step key, so a restarted flow attaches to it again. LocalLauncher runs ranks on this machine
below a detached supervisor (infra/jobs/supervisor.py) that outlives the flow; jobs on nodes are in scheduled_jobs.py.
Files of a job in work/<key>/: command.json, job.json, lock, fencing, supervisor.log, logs/rank-N.log, and
progress.json, which the job itself writes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from configs.files import progress_file
from infra.code_digest import ROOT, refuse_changed_code
from infra.jobs.build_ops import op_environment
from infra.jobs.rank_processes import Command
from infra.jobs.supervisor import EXIT_LOCKED, is_locked, read_job_file, write_json
from infra.step import Progress

if TYPE_CHECKING:
    from configs.schema import Device, QueueResources

JobState = Literal["queued", "stuck", "running", "succeeded", "failed", "interrupted", "lost"]
"""queued: a scheduler has not started it yet. stuck: nor will it, until somebody changes the job or the cluster.
failed: the program ended with an error of its own. interrupted: someone asked it to stop, and it saved. lost: it was
taken away, which says nothing about the program: here its supervisor or a rank got SIGKILL (the kernel does that when
memory runs out, and a machine when it goes down); on a scheduler it was preempted, its node failed or its time limit
came. Submitted again, the last three continue from the latest checkpoint; only a lost one is submitted again without
being asked (flows/running/run_step.py)."""
SUBMISSION_FILE = "submission.json"
"""What a scheduler was given under a key (scheduled_jobs.py)."""
CANCEL_POLL_SECONDS = 0.1
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one machine listen only to each other."""
CPU_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Compiling graphs costs seconds per shape and gains nothing on a CPU. Threads that spin while they wait for each other
make a step 3 to 5 times slower as soon as anything else runs on the machine (measured, 2 cores)."""
CUDA_ENVIRONMENT = {"DS_ACCELERATOR": "cuda", "TORCHDYNAMO_DISABLE": "0", "OMP_WAIT_POLICY": ""}
"""Said, because ranks of this machine inherit what the flow's process was given. Empty: its value is not inherited."""


@dataclass(frozen=True)
class Job:
    """What to run under which key: `python -m module *arguments`, once per rank. `environment` is added to the
    launcher's own."""

    key: str
    module: str
    arguments: tuple[str, ...]
    num_ranks: int
    environment: dict[str, str]
    num_nodes: int = 1
    queue: QueueResources | None = None
    """How a scheduler is asked; None on this machine."""
    device: Device = "cpu"
    """Of every rank; on `cuda` each rank has a GPU."""
    name: str = ""
    """The stage that it computes, for people."""
    roots: tuple[str, ...] = ()
    """Modules beside `module` that it starts by name: on nodes their code must be that of this machine."""

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def gpus_per_node(self) -> int:
        return self.ranks_per_node if self.device == "cuda" else 0

    def command(self, environment: dict[str, str], code: str = "") -> Command:
        """What each node runs. Settings of CPUs never reach the ranks of a job on GPUs; the queue's variables win over
        those of the network."""
        own = CPU_ENVIRONMENT if self.device == "cpu" else CUDA_ENVIRONMENT
        loopback = LOOPBACK if self.num_nodes == 1 else {}
        asked = {} if self.queue is None else self.queue.environment
        variables = {**op_environment(), **own, **loopback, **environment, **asked, **self.environment}
        return Command(
            self.module, self.arguments, self.num_ranks, self.num_nodes, variables, code, self.name, self.roots
        )


@dataclass(frozen=True)
class JobHandle:
    """Names a submitted job; enough to find it from another process."""

    key: str


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, from facts that its launcher looks up and not from memory."""

    state: JobState
    progress: Progress | None
    exit_code: int | None
    failing_rank: int | None
    log_path: str
    log_tail: tuple[str, ...]
    """Last lines of the failing rank."""
    reason: str = ""
    """Why it waits or was lost, in the scheduler's records."""


class JobFailedError(RuntimeError):
    """A job that ended with an error: names exit code, failing rank, its last lines and the log."""

    def __init__(self, name: str, status: JobStatus) -> None:
        tail = "\n".join(f"    {line}" for line in status.log_tail)
        failed = status.reason or "its script ended"
        if status.failing_rank is not None:
            failed = (
                f"rank {status.failing_rank} ended with exit code {status.exit_code}{_signal_name(status.exit_code)}"
            )
        log = f". Log: {status.log_path}, last lines:\n{tail}" if status.log_path else ""
        super().__init__(f"{name} failed: {failed}{log}")


class JobLostError(RuntimeError):
    """A job that was taken away; submitted again it continues. `step` is that of its latest checkpoint, 0 before the
    first."""

    def __init__(self, name: str, status: JobStatus, step: int) -> None:
        self.step = step
        lost = status.reason or "its supervisor was killed"
        if not status.reason and status.failing_rank is not None:
            lost = (
                f"rank {status.failing_rank} was killed{_signal_name(status.exit_code)}, as when memory runs out. "
                f"Log: {status.log_path}"
            )
        super().__init__(
            f"{name} was lost: {lost}; it continues "
            f"{f'from the checkpoint of step {step}' if step else 'from its beginning'}"
        )


class TooFewNodesError(ValueError):
    """Some nodes of a job cannot be had now; `num_usable` can."""

    def __init__(self, message: str, num_usable: int) -> None:
        super().__init__(message)
        self.num_usable = num_usable


class Launcher(Protocol):
    def submit(self, job: Job) -> JobHandle:
        """Start the job, or attach to it where it runs already. Raises TooFewNodesError."""
        ...

    def poll(self, handle: JobHandle) -> JobStatus: ...

    def cancel(self, handle: JobHandle, grace_seconds: float) -> None:
        """Ask the job to save and end; after the grace it is killed."""
        ...

    def find(self, key: str) -> JobHandle | None:
        """The job submitted under a key, running or ended."""
        ...


class LocalLauncher:
    """Jobs on this machine; `work_root` is the home's directory of work directories."""

    def __init__(self, work_root: Path) -> None:
        self.work_root = work_root

    def submit(self, job: Job) -> JobHandle:
        work_dir = self.work_root / job.key
        work_dir.mkdir(parents=True, exist_ok=True)
        if is_locked(work_dir):
            return JobHandle(job.key)
        refuse_changed_code(job.name or job.module, (job.module, *job.roots))
        (work_dir / SUBMISSION_FILE).unlink(missing_ok=True)
        write_json(work_dir / "command.json", asdict(job.command({})))
        with open(work_dir / "supervisor.log", "ab") as log:
            code = subprocess.run(
                [sys.executable, "-m", "infra.jobs.supervisor", str(work_dir)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).returncode
        if code not in (0, EXIT_LOCKED):
            raise RuntimeError(
                f"the supervisor of job {job.key} did not start (exit code {code}): see {work_dir / 'supervisor.log'}"
            )
        return JobHandle(job.key)

    def poll(self, handle: JobHandle) -> JobStatus:
        work_dir = self.work_root / handle.key
        progress = read_progress(work_dir)
        if is_locked(work_dir):
            return JobStatus("running", progress, None, None, "", ())
        job = read_job_file(work_dir)
        assert job is not None, f"no job was submitted under {handle.key}"
        return JobStatus(
            final_state(job.exit_code), progress, job.exit_code, job.failing_rank, job.log_path, tuple(job.log_tail)
        )

    def cancel(self, handle: JobHandle, grace_seconds: float) -> None:
        work_dir = self.work_root / handle.key
        job = read_job_file(work_dir)
        if job is None or not is_locked(work_dir):
            return
        deadline = time.monotonic() + grace_seconds
        with suppress(ProcessLookupError):  # it ended between the look at the lock and here
            os.kill(job.pid, signal.SIGTERM)
            while is_locked(work_dir):
                if time.monotonic() > deadline:
                    os.kill(job.pid, signal.SIGKILL)
                time.sleep(CANCEL_POLL_SECONDS)

    def find(self, key: str) -> JobHandle | None:
        work_dir = self.work_root / key
        return JobHandle(key) if (work_dir / "job.json").exists() else None


def job_keys(work_root: Path) -> list[str]:
    """Keys of all submitted jobs whose work directory is still there."""
    return sorted({path.parent.name for name in ("job.json", SUBMISSION_FILE) for path in work_root.glob(f"*/{name}")})


def final_state(exit_code: int | None) -> JobState:
    """The state of a job whose lock is free."""
    if exit_code is None:
        return "lost"  # a free lock without an exit code: the ranks were killed with their supervisor
    if exit_code == -signal.SIGKILL:
        return "lost"  # no program ends itself so
    if exit_code == os.EX_TEMPFAIL:
        return "interrupted"
    return "failed" if exit_code else "succeeded"


def read_progress(work_dir: Path) -> Progress | None:
    """What the job itself wrote last."""
    path = work_dir / progress_file.NAME
    return Progress(**json.loads(path.read_text())) if path.exists() else None


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    return f" ({signal.Signals(-exit_code).name})"
