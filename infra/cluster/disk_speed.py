"""Sequential reading and writing of a node's disk, measured by fio past the page cache."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from infra.jobs.scheduled_jobs import last_line

MAX_BYTES = 10 << 30
MAX_SHARE_OF_FREE = 4
"""Part of the free space that a measurement may use, as 1/N."""
PATIENCE_SECONDS = 60
"""For a disk to take the files before they are read, and the last fsync."""
NO_FIO = "fio is not installed (Debian: apt-get install fio)"
SECONDS = 10
NUM_JOBS = 4
QUEUE_DEPTH = 16
"""S2's one job without a queue measures the page cache's write-back, not the disk."""


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second; `problem` says why there are none."""

    write: float = 0.0
    read: float = 0.0
    problem: str = ""


def measure_disk(directory: Path, seconds: int = SECONDS) -> DiskSpeed:
    """Write and read files below the directory, which are removed. `seconds` is the time of each measurement."""
    fio = shutil.which("fio")
    if fio is None:
        return DiskSpeed(problem=NO_FIO)
    size = min(MAX_BYTES, shutil.disk_usage(directory).free // MAX_SHARE_OF_FREE) // NUM_JOBS
    speeds, limit = {}, PATIENCE_SECONDS + 4 * seconds
    try:
        for kind in ("write", "read"):
            command = [fio, "--name=glm46-disk", f"--directory={directory}", f"--rw={kind}", "--bs=1M", "--direct=1"]
            command += [f"--size={size}", f"--numjobs={NUM_JOBS}", f"--iodepth={QUEUE_DEPTH}", "--ioengine=libaio"]
            command += [f"--runtime={seconds}", "--time_based", "--end_fsync=1", "--group_reporting"]
            command += ["--output-format=json", "--thread"]  # threads end with fio, also where it is killed
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
            if answer.returncode:
                return DiskSpeed(problem=f"fio: {last_line(answer.stderr or answer.stdout)}")
            speeds[kind] = parse_fio(answer.stdout, kind)
    except subprocess.TimeoutExpired:
        return DiskSpeed(problem=f"fio did not end in {limit} s, of which {seconds} s were to measure")
    except (ValueError, LookupError) as error:
        return DiskSpeed(problem=f"fio printed no measurement: {error}")
    finally:
        for path in directory.glob("glm46-disk.*"):
            path.unlink(missing_ok=True)
    return DiskSpeed(**speeds)


def parse_fio(text: str, kind: str) -> float:
    """Bytes per second of fio's JSON; warnings may come before it."""
    return float(sum(job[kind]["bw_bytes"] for job in json.loads(text[text.index("{") :])["jobs"]))
