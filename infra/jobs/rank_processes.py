"""The ranks of a job on one node: each runs the job's command, and the first that fails ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from infra.child_process import die_with_parent

TAIL_LINES = 30
RENDEZVOUS_PREFIX = "rendezvous-"
"""File in which the ranks of one start find each other: on several nodes their work directory is a shared one."""


@dataclass(frozen=True)
class Command:
    """What a job runs: `python -m module *arguments`, once per rank."""

    module: str
    arguments: tuple[str, ...]
    num_ranks: int
    num_nodes: int
    environment: dict[str, str]
    """Added to what a rank inherits; a variable with an empty value is taken from it."""
    code: str = ""
    """Digest of the code that the submitting machine would run; nodes with other code refuse. Empty on one machine."""
    name: str = ""
    """The stage that it computes, for people."""
    roots: tuple[str, ...] = ()
    """Modules beside `module` that it starts by name."""

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    fencing: int
    """Grows with every start."""
    master_port: int
    """Names DeepSpeed's shared memory; nobody listens there."""


@dataclass(frozen=True)
class RanksEnd:
    """How the ranks of a node ended."""

    exit_code: int
    """0 success, os.EX_TEMPFAIL saved, else the first failing rank's (negative: the signal)."""
    failing_rank: int | None = None
    log_path: str = ""
    """Of the failing rank."""
    log_tail: list[str] = field(default_factory=list)
    reason: str = ""
    """Why, where no rank is the cause."""


def start_ranks(command: Command, start: Start, work_dir: Path, node: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of one node; they die with this process."""
    first = node * command.ranks_per_node
    return [_start_rank(command, start, work_dir, first, first + index) for index in range(command.ranks_per_node)]


def _start_rank(command: Command, start: Start, work_dir: Path, first: int, rank: int) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name not in command.environment}
    environment = {
        **inherited,
        **{name: value for name, value in command.environment.items() if value},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - first),
        "WORLD_SIZE": str(command.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(start.master_port),
        "GLM46_FENCING": str(start.fencing),
        "PYTHONUNBUFFERED": "1",
        "GLM46_RENDEZVOUS": str(work_dir / f"{RENDEZVOUS_PREFIX}{start.fencing}"),
    }
    with open(_log_path(work_dir, rank), "ab") as log:
        log.write(f"== start {start.fencing}, rank {rank} of {command.num_ranks}\n".encode())
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", command.module, *command.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_prepare_rank,
        )


def _prepare_rank() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def wait_for_ranks(ranks: list[subprocess.Popen[bytes]], work_dir: Path, first_rank: int) -> RanksEnd:
    """How they ended; the others are killed when one fails. A SIGTERM is passed on to them."""
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
    for index, process in enumerate(ranks):
        Thread(target=lambda index=index, process=process: ended.put((process.wait(), index)[1]), daemon=True).start()
    for _ in ranks:
        index = ended.get()
        if ranks[index].returncode not in well:
            for process in ranks:
                process.kill()
                process.wait()
            path = _log_path(work_dir, first_rank + index)
            return RanksEnd(ranks[index].returncode, first_rank + index, str(path), tail_of(path))
    return RanksEnd(os.EX_TEMPFAIL if any(process.returncode for process in ranks) else 0)


def tail_of(path: Path) -> list[str]:
    """The last lines of a log."""
    return path.read_text(errors="replace").splitlines()[-TAIL_LINES:]


def _log_path(work_dir: Path, rank: int) -> Path:
    return work_dir / "logs" / f"rank-{rank}.log"
