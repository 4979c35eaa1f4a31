"""The ranks of one node of a scheduler's job: `python -m infra.jobs.node_ranks WORK_DIR FENCING MASTER_PORT`, which
infra/jobs/slurm_supervisor.py starts once per node.

Out, in nodes/: FENCING-NODE.json, how they ended, and FENCING-NODE.beat, a number that grows while they run.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path
from threading import Thread

from infra.jobs.rank_processes import Start, start_ranks, wait_for_ranks
from infra.jobs.supervisor import read_command, read_job_file, write_json

BEAT_SECONDS = 1.0


def main() -> int:
    work_dir, start = Path(sys.argv[1]), Start(int(sys.argv[2]), int(sys.argv[3]))
    node = int(os.environ["SLURM_NODEID"])
    job = read_job_file(work_dir) if work_dir.is_dir() else None
    if job is None or job.fencing != start.fencing:
        print(
            f"{os.uname().nodename} does not see {work_dir} as the job's first node does: put GLM46_HOME on a "
            f"directory that all nodes mount",
            file=sys.stderr,
        )
        return 1
    command = read_command(work_dir)
    end_file(work_dir, start.fencing, node).parent.mkdir(exist_ok=True)
    ranks = start_ranks(command, start, work_dir, node)
    Thread(target=_beat, args=(_beat_file(work_dir, start.fencing, node),), daemon=True).start()
    end = wait_for_ranks(ranks, work_dir, node * command.ranks_per_node)
    write_json(end_file(work_dir, start.fencing, node), {**asdict(end), "ended_at": time.time()})
    return 0 if end.failing_rank is None else 1


def end_file(work_dir: Path, fencing: int, node: int) -> Path:
    """Where a node says how its ranks ended."""
    return work_dir / "nodes" / f"{fencing}-{node}.json"


def beat_of(work_dir: Path, fencing: int, node: int) -> str:
    """A node's sign of life: another text than a moment ago while it lives."""
    try:
        return _beat_file(work_dir, fencing, node).read_text()
    except FileNotFoundError:
        return ""


def _beat_file(work_dir: Path, fencing: int, node: int) -> Path:
    return end_file(work_dir, fencing, node).with_suffix(".beat")


def _beat(path: Path) -> None:
    for number in count():
        path.write_text(str(number))
        time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
