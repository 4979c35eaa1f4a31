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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from configs.files.atomic_files import replace_durably
from infra.jobs.rank_processes import RanksEnd

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""A node that gives no sign for so long is gone. Shared file systems pause for seconds."""
BEATS_AWAITED = 3
"""Before a node counts as gone: a clock that was set makes every sign look old, or of the future, until the next."""

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

    def silent_nodes(self, nodes: Iterable[int], now: float | None) -> list[int]:
        """Those of the nodes that have begun and gave no sign for so long; `now` by the file system's clock. Where a
        node seems so, its next beats are waited for."""
        signs = {node: heard_at for node in nodes if (heard_at := self.heard_at(node)) is not None}
        suspects = [node for node, sign in signs.items() if now is not None and abs(now - sign) > SILENT_SECONDS]
        if suspects:
            time.sleep(BEATS_AWAITED * BEAT_SECONDS)
        return [node for node in suspects if self.heard_at(node) == signs[node]]

    def has_begun(self, node: int) -> bool:
        return self._path(f"-{node}.beat").exists()

    def live_nodes(self) -> list[int]:
        """Those that have begun, may give signs of life again and have not ended."""
        running = self._not_ended()
        silent = self.silent_nodes(running, clock_of(self.work_dir))
        return [node for node in running if node not in silent]

    def beating_nodes(self) -> list[int]:
        """Those that gave a sign of life at this moment and have not ended."""
        now, awaited = clock_of(self.work_dir), BEATS_AWAITED * BEAT_SECONDS
        return [node for node in self._not_ended() if abs(now - (self.heard_at(node) or 0.0)) < awaited]

    def _not_ended(self) -> list[int]:
        begun = [int(path.stem.partition("-")[2]) for path in (self.work_dir / "nodes").glob(f"{self.fencing}-*.beat")]
        ended = self.ends(max(begun, default=-1) + 1)
        return [node for node in begun if node not in ended]

    def order(self, order: Order) -> None:
        """Tell all nodes; a KILL is not taken back."""
        if self.ordered() != "KILL":
            self._path(".order").parent.mkdir(exist_ok=True)
            replace_durably(self._path(".order"), order.encode())

    def ordered(self) -> str:
        """The last order, empty before the first."""
        return _text(self._path(".order")) or ""

    def write_end(self, node: int, end: RanksEnd) -> None:
        replace_durably(self._path(f"-{node}.json"), json.dumps(asdict(end)).encode())

    def ends(self, num_nodes: int) -> dict[int, RanksEnd]:
        """How the ranks of nodes ended, in the order of time by the file system's clock."""
        seen = {node: _read(self._path(f"-{node}.json")) for node in range(num_nodes)}
        written = [(at, node, text) for node, end in seen.items() if end is not None for text, at in [end]]
        return {node: RanksEnd(**json.loads(text)) for _, node, text in sorted(written)}


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
