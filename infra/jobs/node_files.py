"""What the nodes of a job tell each other through its work directory, which all of them mount.

In nodes/, per start (FENCING) and node: FENCING-NODE.beat, whose time of change is renewed while the node lives and
whose text is the node's name; FENCING-NODE.json, how its ranks ended; FENCING.order, what all nodes are to do with
their ranks: TERM (save and end) or KILL. Clocks of machines are never compared: ages are differences between two files'
times, which the file system's own clock gives.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from configs.files.atomic_files import replace_durably
from infra.jobs.rank_processes import RanksEnd

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""A node that gives no sign for so long is gone. Shared file systems pause for seconds."""

Order = Literal["TERM", "KILL"]


@dataclass(frozen=True)
class NodeFiles:
    """The files of one start."""

    work_dir: Path
    fencing: int

    def _path(self, name: str) -> Path:
        return self.work_dir / "nodes" / f"{self.fencing}{name}"

    def begin(self, node: int, name: str) -> None:
        """Give the first sign of life."""
        path = self._path(f"-{node}.beat")
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)

    def beat(self, node: int) -> None:
        os.utime(self._path(f"-{node}.beat"))

    def name_of(self, node: int) -> str:
        """The node's name as a person knows it."""
        name = _text(self._path(f"-{node}.beat"))
        return f"node {node}" if name is None else f"{name} (node {node})"

    def heard_at(self, node: int) -> float | None:
        """When a node gave its last sign, by the file system's clock; None before the first."""
        return changed_at(self._path(f"-{node}.beat"))

    def is_silent(self, node: int, now: float | None) -> bool:
        """Whether a node that has begun gave no sign for so long."""
        heard_at = self.heard_at(node)
        return now is not None and heard_at is not None and now - heard_at > SILENT_SECONDS

    def has_begun(self, node: int) -> bool:
        return self._path(f"-{node}.beat").exists()

    def live_nodes(self) -> list[int]:
        """Those that have begun, give signs of life and have not ended."""
        begun = [int(path.stem.partition("-")[2]) for path in (self.work_dir / "nodes").glob(f"{self.fencing}-*.beat")]
        ended, now = self.ends(max(begun, default=-1) + 1), clock_of(self.work_dir)
        return [node for node in begun if node not in ended and not self.is_silent(node, now)]

    def order(self, order: Order) -> None:
        """Tell all nodes; a KILL is not taken back."""
        if self.ordered() != "KILL":
            self._path(".order").parent.mkdir(exist_ok=True)
            replace_durably(self._path(".order"), order.encode())

    def ordered(self) -> str:
        """The last order, empty before the first."""
        return _text(self._path(".order")) or ""

    def write_end(self, node: int, end: RanksEnd) -> None:
        text = json.dumps({**asdict(end), "ended_at": time.time()})
        replace_durably(self._path(f"-{node}.json"), text.encode())

    def ends(self, num_nodes: int) -> dict[int, RanksEnd]:
        """How the ranks of nodes ended, in the order of time."""
        written = []
        for node in range(num_nodes):
            text = _text(self._path(f"-{node}.json"))
            if text is not None:
                values = json.loads(text)
                written.append((values.pop("ended_at"), node, RanksEnd(**values)))
        return {node: end for _, node, end in sorted(written, key=lambda each: each[0])}


def changed_at(path: Path) -> float | None:
    """When a file changed; None where it is not there."""
    seen = _read(path)
    return None if seen is None else seen[1]


def _text(path: Path) -> str | None:
    seen = _read(path)
    return None if seen is None else seen[0]


def _read(path: Path) -> tuple[str, float] | None:
    """Text and time of a small file. It is opened for both, as NFS asks its server only then; of a file that is just
    being replaced NFS may say ESTALE."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def clock_of(work_dir: Path) -> float:
    """The time by the file system's clock: that of a file made now."""
    probe = work_dir / f".now-{os.uname().nodename}-{os.getpid()}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink(missing_ok=True)
    return now
