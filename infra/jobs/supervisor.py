"""The detached process that runs one job on this machine: `python -m infra.jobs.supervisor WORK_DIR`.

In: command.json (what to run). Out: job.json (pid, port, exit code, failing rank), fencing (a number that grows with
every start), logs/rank-N.log. It holds an exclusive lock on WORK_DIR/lock as long as it runs. So if the lock is free
and there is no exit code, it was killed. Ranks die with it, and if one dies the others are killed. SIGTERM is passed
on: ranks save and exit with os.EX_TEMPFAIL.

The command exits at once: with 0 when the detached child holds the lock and has written job.json, with EXIT_LOCKED when
another supervisor runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from configs.files.atomic_files import replace_durably
from configs.machine import this_machine
from infra.child_process import free_port
from infra.jobs.rank_processes import RENDEZVOUS_PREFIX, Command, RanksEnd, Start, start_ranks, wait_for_ranks

EXIT_LOCKED = 3
LOCK_PATIENCE_SECONDS = 3.0
"""A poller holds the lock for an instant; a running supervisor holds it until it ends."""
POLL_SECONDS = 0.05
RESTART_MARK = "+"
"""Between the name of a scheduler's job and how often it was requeued: the nodes of a start find each other."""
FENCING_DIGITS = 12
"""Fixed, so that the number is replaced by one write and never empty."""


@dataclass(frozen=True)
class JobFile:
    """job.json: who runs, and how it ended."""

    pid: int
    started_at: float
    """Start of the supervisor, seconds since the epoch."""
    fencing: int
    master_port: int
    """Names DeepSpeed's shared memory; nobody listens there."""
    scheduler_job: str = ""
    """The scheduler's name of the job, `+N` after it where it was requeued N times; empty on this machine."""
    machine: str = ""
    """Kind of the machine on which the supervisor, and so rank 0, runs."""
    rank_pids: tuple[int, ...] = ()
    exit_code: int | None = None
    """0 success, os.EX_TEMPFAIL saved, else the first failing rank's (negative: the signal); None while it runs or when
    it was killed."""
    failing_rank: int | None = None
    log_path: str = ""
    """Of the failing rank."""
    log_tail: list[str] = field(default_factory=list)
    reason: str = ""
    """Why, where no rank is the cause."""

    def is_of(self, scheduler_job: str) -> bool:
        """Whether it is of this job of a scheduler, however often either was requeued."""
        return self.scheduler_job.partition(RESTART_MARK)[0] == scheduler_job.partition(RESTART_MARK)[0]


def read_job_file(work_dir: Path) -> JobFile | None:
    """The last supervisor's job.json, none before the first start."""
    try:
        return JobFile(**json.loads((work_dir / "job.json").read_text()))
    except FileNotFoundError:
        return None


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file atomically and durably."""
    replace_durably(path, json.dumps(value, indent=1).encode())


def is_locked(work_dir: Path) -> bool:
    """Whether a supervisor runs. It creates no file: the directory may be about to be removed."""
    try:
        with open(work_dir / "lock", "rb") as lock:
            return not _try_lock(lock.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _advance_fencing(work_dir: Path) -> int:
    """The number of this start. Waits for a checkpoint commit under way: commits hold the file's lock
    (tasks/training/state/checkpoints.py)."""
    descriptor = os.open(work_dir / "fencing", os.O_RDWR | os.O_CREAT)  # by flock: the locked file holds the number
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        number = int(os.pread(descriptor, FENCING_DIGITS, 0) or 0) + 1
        os.pwrite(descriptor, f"{number:0{FENCING_DIGITS}d}".encode(), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return number


def read_command(work_dir: Path) -> Command:
    """What was submitted. Raises FileNotFoundError before anything was."""
    values = json.loads((work_dir / "command.json").read_text())
    return Command(**{**values, "arguments": tuple(values["arguments"]), "roots": tuple(values.get("roots", ()))})


def supervise(work_dir: Path, ready: int) -> None:
    """Run the job to its end; `ready` is the descriptor that is written to when job.json exists."""
    # A SIGTERM before the ranks exist waits until `wait_for_ranks` has its handler, otherwise they would miss it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    job = begin_job(work_dir)
    os.write(ready, b"1")
    os.close(ready)
    ranks = start_ranks(read_command(work_dir), Start(job.fencing, job.master_port), work_dir, node=0)
    job = replace(job, rank_pids=tuple(process.pid for process in ranks))
    write_json(work_dir / "job.json", asdict(job))
    end_job(work_dir, job, wait_for_ranks(ranks, work_dir, first_rank=0))


def begin_job(work_dir: Path, scheduler_job: str = "") -> JobFile:
    """Write job.json of a new start; call with the lock held."""
    (work_dir / "logs").mkdir(exist_ok=True)
    fencing, machine = _advance_fencing(work_dir), str(this_machine())
    job = JobFile(os.getpid(), time.time(), fencing, free_port(), scheduler_job, machine)
    for abandoned in work_dir.glob(f"{RENDEZVOUS_PREFIX}*"):
        abandoned.unlink()
    write_json(work_dir / "job.json", asdict(job))
    return job


def end_job(work_dir: Path, job: JobFile, end: RanksEnd) -> None:
    """Write how it ended."""
    write_json(work_dir / "job.json", asdict(replace(job, **asdict(end))))


def take_lock(work_dir: Path, patience_seconds: float = LOCK_PATIENCE_SECONDS) -> bool:
    """Hold WORK_DIR/lock until this process ends; False if another supervisor does. By flock, not filelock: a detached
    child inherits it."""
    lock = os.open(work_dir / "lock", os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + patience_seconds
    while not _try_lock(lock, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def main() -> int:
    work_dir = Path(sys.argv[1])
    if not take_lock(work_dir):
        return EXIT_LOCKED
    is_ready, ready = os.pipe()
    if os.fork():
        os.close(ready)
        return 0 if os.read(is_ready, 1) else 1
    os.close(is_ready)
    supervise(work_dir, ready)  # the lock goes when this process ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
