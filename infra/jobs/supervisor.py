"""The detached process that runs one training job on this machine: `python -m infra.jobs.supervisor WORK_DIR`.

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
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from configs.files.atomic_files import replace_durably
from infra.child_process import die_with_parent, free_port

EXIT_LOCKED = 3
LOCK_PATIENCE_SECONDS = 3.0
"""A poller holds the lock for an instant; a running supervisor holds it until it ends."""
POLL_SECONDS = 0.05
TAIL_LINES = 30
RENDEZVOUS_PREFIX = "rendezvous-"
"""File in which the ranks of one start find each other."""
FENCING_DIGITS = 12
"""Fixed, so that the number is replaced by one write and never empty."""


@dataclass(frozen=True)
class Command:
    """What a job runs: `python -m module *arguments`, once per rank."""

    module: str
    arguments: tuple[str, ...]
    num_ranks: int
    environment: dict[str, str]


@dataclass(frozen=True)
class JobFile:
    """job.json: who runs, and how it ended."""

    pid: int
    started_at: float
    """Start of the supervisor, seconds since the epoch."""
    fencing: int
    master_port: int
    """Names DeepSpeed's shared memory; nobody listens there."""
    rank_pids: tuple[int, ...] = ()
    exit_code: int | None = None
    """0 success, os.EX_TEMPFAIL saved, else the first failing rank's (negative: the signal); None while it runs or when
    it was killed."""
    failing_rank: int | None = None
    log_path: str = ""
    """Of the failing rank."""
    log_tail: list[str] = field(default_factory=list)


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


def _rank_environment(command: Command, rank: int, job: JobFile, work_dir: Path) -> dict[str, str]:
    return {
        **os.environ,
        **command.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(command.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.master_port),
        "GLM46_FENCING": str(job.fencing),
        "PYTHONUNBUFFERED": "1",
        "GLM46_RENDEZVOUS": str(work_dir / f"{RENDEZVOUS_PREFIX}{job.fencing}"),
    }


def _prepare_rank() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _start_ranks(command: Command, work_dir: Path, job: JobFile) -> list[subprocess.Popen[bytes]]:
    for abandoned in work_dir.glob(f"{RENDEZVOUS_PREFIX}*"):
        abandoned.unlink()
    ranks = []
    for rank in range(command.num_ranks):
        with open(_log_path(work_dir, rank), "ab") as log:
            log.write(f"== start {job.fencing}, rank {rank} of {command.num_ranks}\n".encode())
            log.flush()
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", command.module, *command.arguments],
                    env=_rank_environment(command, rank, job, work_dir),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_prepare_rank,
                )
            )
    return ranks


def _log_path(work_dir: Path, rank: int) -> Path:
    return work_dir / "logs" / f"rank-{rank}.log"


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-TAIL_LINES:]


def _wait(ranks: list[subprocess.Popen[bytes]]) -> tuple[int, int | None]:
    """Exit code of the job and the rank that failed first; the others are killed then."""
    well = [0, os.EX_TEMPFAIL]

    def pass_on(number: int, frame: object) -> None:
        well.append(-signal.SIGTERM)  # the rank was still starting: it has nothing to save
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # A thread per rank, so that ends are seen in their order: a rank that waits for a dead one fails a moment later and
    # is not the cause.
    ended: SimpleQueue[int] = SimpleQueue()
    for rank, process in enumerate(ranks):
        Thread(target=lambda rank=rank, process=process: ended.put((process.wait(), rank)[1]), daemon=True).start()
    for _ in ranks:
        rank = ended.get()
        if ranks[rank].returncode not in well:
            for process in ranks:
                process.kill()
                process.wait()
            return ranks[rank].returncode, rank
    return (os.EX_TEMPFAIL if any(process.returncode for process in ranks) else 0), None


def supervise(work_dir: Path, ready: int) -> None:
    """Run the job to its end; `ready` is the descriptor that is written to when job.json exists."""
    values = json.loads((work_dir / "command.json").read_text())
    command = Command(values["module"], tuple(values["arguments"]), values["num_ranks"], values["environment"])
    (work_dir / "logs").mkdir(exist_ok=True)
    # A SIGTERM before the ranks exist waits until `_wait` has its handler, otherwise they would miss it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    job = JobFile(os.getpid(), time.time(), _advance_fencing(work_dir), free_port())
    write_json(work_dir / "job.json", asdict(job))
    os.write(ready, b"1")
    os.close(ready)
    ranks = _start_ranks(command, work_dir, job)
    job = replace(job, rank_pids=tuple(process.pid for process in ranks))
    write_json(work_dir / "job.json", asdict(job))
    exit_code, failing_rank = _wait(ranks)
    if failing_rank is not None:
        log_path = _log_path(work_dir, failing_rank)
        job = replace(job, failing_rank=failing_rank, log_path=str(log_path), log_tail=_tail(log_path))
    write_json(work_dir / "job.json", asdict(replace(job, exit_code=exit_code)))


def main() -> int:
    work_dir = Path(sys.argv[1])
    lock = os.open(work_dir / "lock", os.O_RDWR | os.O_CREAT)  # by flock, not filelock: the detached child inherits it
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while not _try_lock(lock, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return EXIT_LOCKED
        time.sleep(POLL_SECONDS)
    is_ready, ready = os.pipe()
    if os.fork():
        os.close(ready)
        return 0 if os.read(is_ready, 1) else 1
    os.close(is_ready)
    supervise(work_dir, ready)  # the lock goes when this process ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
