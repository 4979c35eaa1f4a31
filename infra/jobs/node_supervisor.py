"""The supervisor of a job on one of its nodes: `python -m infra.jobs.node_supervisor WORK_DIR JOB NODE`, started once
per node by Slurm, PBS, Kubernetes or ssh. JOB is the scheduler's name of the job.

Node 0 leads: it holds the lock of the work directory, writes job.json as infra/jobs/supervisor.py does, and looks at
the other nodes' files (node_files.py). When a rank fails or a node is silent it orders all nodes to kill their ranks.
A node that hears nothing of node 0 kills its own. A SIGTERM and the order TERM are passed on to the ranks, which save.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

from infra.code_digest import ROOT, code_digest
from infra.jobs.node_files import BEAT_SECONDS, SILENT_SECONDS, NodeFiles
from infra.jobs.rank_processes import RanksEnd, Start, start_ranks, wait_for_ranks
from infra.jobs.supervisor import EXIT_LOCKED, JobFile, begin_job, end_job, read_command, read_job_file, take_lock

LEADER = 0
LOOK_SECONDS = 1.0
NAME_VARIABLE = "GLM46_NODE_NAME"
"""How messages name this node; its host name where it is not set."""
START_VARIABLE = "GLM46_START_SECONDS"
START_SECONDS = 300.0
"""Between the start of a job on its first node and that on its last, where the variable says nothing else."""
SAVE_AFTER_VARIABLE = "GLM46_SAVE_AFTER_SECONDS"
"""When the ranks are told to save, where the scheduler itself does not announce its time limit."""


def main() -> int:
    work_dir, scheduler_job, node = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if not (work_dir / "command.json").exists():
        return _refuse(f"does not see {work_dir}: put GLM46_HOME on a directory that all nodes mount")
    if not has_same_code(work_dir):
        return _refuse(f"has other code of the project in {ROOT} than the machine of `glm46 run`: update it")
    if node != LEADER:
        job = _wait_for_leader(work_dir, scheduler_job)
    # A SIGTERM waits until the ranks exist, as in supervisor.py.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if node == LEADER:
        if not take_lock(work_dir) and not _end_earlier_start(work_dir, scheduler_job):
            return _refuse(f"finds another job in {work_dir}: this one ends", EXIT_LOCKED)
        job = begin_job(work_dir, scheduler_job)
    if job is None or job.exit_code is not None:
        return _refuse(
            f"finds no job {scheduler_job} that runs in {work_dir}: it has failed on another node, or GLM46_HOME is "
            f"not on a directory that all nodes mount"
        )
    return _supervise(work_dir, job, node)


def _end_earlier_start(work_dir: Path, scheduler_job: str) -> bool:
    """Whether the lock was had from an earlier start of this job, which its scheduler believed to have ended."""
    earlier = read_job_file(work_dir)
    if earlier is None or earlier.scheduler_job == scheduler_job or not earlier.is_of(scheduler_job):
        return False
    NodeFiles(work_dir, earlier.fencing).order("KILL")
    return take_lock(work_dir, 2 * SILENT_SECONDS)


def has_same_code(work_dir: Path) -> bool:
    """Whether this machine would run the code that the submitting one has: the step's key names it."""
    command = read_command(work_dir)
    return code_digest((command.module, *command.roots)) == command.code


def _refuse(why: str, exit_code: int = 1) -> int:
    print(f"{_name()} {why}", file=sys.stderr)
    return exit_code


def _name() -> str:
    return os.environ.get(NAME_VARIABLE) or os.uname().nodename


def _start_seconds() -> float:
    return float(os.environ.get(START_VARIABLE) or START_SECONDS)


def _wait_for_leader(work_dir: Path, scheduler_job: str) -> JobFile | None:
    """Its job.json of this start."""
    deadline = time.monotonic() + _start_seconds()
    while (job := read_job_file(work_dir)) is None or job.scheduler_job != scheduler_job:
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK_SECONDS)
    return job


def _supervise(work_dir: Path, job: JobFile, node: int) -> int:
    command, files = read_command(work_dir), NodeFiles(work_dir, job.fencing)
    files.begin(node, _name())
    ranks = start_ranks(command, Start(job.fencing, job.master_port), work_dir, node)
    Thread(target=_beat, args=(files, node), daemon=True).start()
    watch = Watch(files, node, command.num_nodes, ranks)
    Thread(target=watch.run, daemon=True).start()
    end = wait_for_ranks(ranks, work_dir, node * command.ranks_per_node)
    if watch.has_killed:
        end = RanksEnd(-signal.SIGKILL)
    files.write_end(node, end)
    if node == LEADER:
        end = watch.wait_for_nodes()
        end_job(work_dir, job, end)
    return 0 if end.exit_code in (0, os.EX_TEMPFAIL) else 1


def _beat(files: NodeFiles, node: int) -> None:
    while True:
        with suppress(OSError):  # a shared disk that stumbles: the others miss a node only after several beats
            files.beat(node)
        time.sleep(BEAT_SECONDS)


class Watch:
    """What a node does while its ranks run: looks at the others, and obeys."""

    def __init__(self, files: NodeFiles, node: int, num_nodes: int, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.files, self.node, self.num_nodes, self.ranks = files, node, num_nodes, ranks
        self.started_at = time.monotonic()
        self.start_seconds = _start_seconds()
        self.save_after_seconds = float(os.environ.get(SAVE_AFTER_VARIABLE) or "inf")
        self.has_killed = False

    def run(self) -> None:
        is_told = False
        while True:
            if self.node == LEADER:
                self._lead()
            ordered = self.files.ordered()
            if ordered == "KILL" or (self.node != LEADER and self.files.silent_nodes([LEADER], self._now())):
                self.has_killed = True
                for process in self.ranks:
                    process.kill()
                return
            if ordered == "TERM" and not is_told:
                is_told = True
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LOOK_SECONDS)

    def _lead(self) -> None:
        if self._failed() or self._gone() or self._late():
            self.files.order("KILL")
        elif time.monotonic() - self.started_at > self.save_after_seconds:
            self.files.order("TERM")

    def _failed(self) -> list[RanksEnd]:
        return [end for end in self.files.ends(self.num_nodes).values() if end.failing_rank is not None]

    def _now(self) -> float | None:
        """By the file system's clock: this node's own sign is at most a second old."""
        return self.files.heard_at(self.node)

    def _gone(self) -> list[int]:
        """Nodes that neither ended nor live."""
        ended, now = self.files.ends(self.num_nodes), self._now()
        return self.files.silent_nodes([node for node in range(self.num_nodes) if node not in ended], now)

    def _late(self) -> list[int]:
        """Nodes that did not begin in time."""
        if time.monotonic() - self.started_at < self.start_seconds:
            return []
        return [node for node in range(self.num_nodes) if not self.files.has_begun(node)]

    def wait_for_nodes(self) -> RanksEnd:
        """How the job ended: that a node went, else the first failure, else that a node did not begin."""
        while True:
            ends, gone, failed, late = self.files.ends(self.num_nodes), self._gone(), self._failed(), self._late()
            begun = [node for node in range(self.num_nodes) if self.files.has_begun(node)]
            if set(begun) <= ends.keys() | set(gone) and (failed or gone or late or len(begun) == self.num_nodes):
                break
            self._lead()
            time.sleep(LOOK_SECONDS)
        if gone:
            return RanksEnd(-signal.SIGKILL, reason=f"no sign of life of {self._names(gone)}")
        if failed:
            return failed[0]
        if late:
            return RanksEnd(
                1,
                reason=f"in {self.start_seconds:.0f} s the job did not begin on {self._names(late)}: see the log there "
                f"and put GLM46_HOME on a directory that all nodes mount",
            )
        codes = [end.exit_code for end in ends.values()]
        return RanksEnd(-signal.SIGKILL if -signal.SIGKILL in codes else os.EX_TEMPFAIL if any(codes) else 0)

    def _names(self, nodes: list[int]) -> str:
        return ", ".join(map(self.files.name_of, nodes))


if __name__ == "__main__":
    sys.exit(main())
