"""The process of a Slurm job on its first node: `python -m infra.jobs.slurm_supervisor WORK_DIR`, in the job's script.

It holds the lock of the work directory, writes job.json as infra/jobs/supervisor.py does, and starts the ranks of every
node by srun. A SIGTERM, by which Slurm announces the time limit and a user cancels, is passed on to the ranks. When a
rank fails it looks which nodes still give signs of life: ranks whose peer went with its node fail too, and are not the
cause.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from infra.jobs.node_ranks import BEAT_SECONDS, beat_of, end_file
from infra.jobs.rank_processes import RanksEnd
from infra.jobs.supervisor import EXIT_LOCKED, begin_job, end_job, read_command, take_lock

STEP = 0
"""Slurm's number of the ranks' step: the first that the script starts."""
POLL_SECONDS = 0.5
SILENT_SECONDS = 10 * BEAT_SECONDS
"""After a failure a node that gives no sign for so long is gone."""


def main() -> int:
    work_dir = Path(sys.argv[1])
    if not take_lock(work_dir):
        print(f"another job runs in {work_dir}: this one ends", file=sys.stderr)
        return EXIT_LOCKED
    command, job = read_command(work_dir), begin_job(work_dir, os.environ["SLURM_JOB_ID"])
    ranks = [sys.executable, "-m", "infra.jobs.node_ranks", str(work_dir), str(job.fencing), str(job.master_port)]
    srun = subprocess.Popen(["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", *ranks])
    # srun itself would kill the step at a SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: _signal_ranks("TERM"))
    end = _watch(srun, work_dir, job.fencing, command.num_nodes)
    end_job(work_dir, job, end)
    return 0 if end.exit_code == 0 else 1


def _watch(srun: subprocess.Popen[bytes], work_dir: Path, fencing: int, num_nodes: int) -> RanksEnd:
    """How the job ended: the first failure, unless a node went; none that is left runs on."""
    nodes = range(num_nodes)
    while srun.poll() is None and not _failed(work_dir, fencing, nodes):
        time.sleep(POLL_SECONDS)
    failed = _failed(work_dir, fencing, nodes)
    is_whole = not failed or _all_nodes_live(work_dir, fencing, nodes)
    if srun.poll() is None:
        _signal_ranks("KILL")
    exit_code = srun.wait()
    if failed and is_whole:
        return failed[0]
    ends = _ends(work_dir, fencing, nodes)
    if len(ends) < num_nodes:
        gone = failed or exit_code > 128  # a shell's way to say that a signal ended it
        return RanksEnd(-signal.SIGKILL if gone else exit_code or 1, None, os.environ["GLM46_JOB_LOG"])
    return RanksEnd(os.EX_TEMPFAIL if any(end.exit_code for end in ends) else 0)


def _all_nodes_live(work_dir: Path, fencing: int, nodes: range) -> bool:
    """Whether every node has ended its ranks or still gives signs."""
    before = {node: beat_of(work_dir, fencing, node) for node in nodes}
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        ended = {node for node in nodes if end_file(work_dir, fencing, node).exists()}
        if all(node in ended or beat_of(work_dir, fencing, node) != before[node] for node in nodes):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _ends(work_dir: Path, fencing: int, nodes: range) -> list[RanksEnd]:
    """What the nodes wrote, in the order of time."""
    files = [end_file(work_dir, fencing, node) for node in nodes]
    written = sorted((json.loads(path.read_text()) for path in files if path.exists()), key=lambda end: end["ended_at"])
    return [RanksEnd(**{name: value for name, value in end.items() if name != "ended_at"}) for end in written]


def _failed(work_dir: Path, fencing: int, nodes: range) -> list[RanksEnd]:
    return [end for end in _ends(work_dir, fencing, nodes) if end.failing_rank is not None]


def _signal_ranks(name: str) -> None:
    step = f"{os.environ['SLURM_JOB_ID']}.{STEP}"
    subprocess.run(["scancel", f"--signal={name}", step], check=False)


if __name__ == "__main__":
    sys.exit(main())
