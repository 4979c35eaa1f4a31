"""What the nodes of a job tell each other through its work directory, which all of them mount.

In nodes/, per start (FENCING) and node: FENCING-NODE.beat, whose time of change is renewed while the node lives and
whose text is the node's name; FENCING-NODE.json, how its ranks ended; FENCING.order, what all nodes are to do with
their ranks: TERM (save and end) or KILL. Clocks of machines are never compared: ages are differences between two files'
times, which the file system's own clock gives.
"""

from __future__ import annotations

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
START_SECONDS = 600.0
"""Between the start of a job on its first node and that on its last: images are pulled, file systems mounted."""

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
        path = self._path(f"-{node}.beat")
        return f"{path.read_text()} (node {node})" if path.exists() else f"node {node}"

    def is_silent(self, node: int, num_seconds: float = SILENT_SECONDS) -> bool:
        """Whether a node that has begun gave no sign for so long."""
        age = age_of(self._path(f"-{node}.beat"))
        return age is not None and age > num_seconds

    def has_begun(self, node: int) -> bool:
        return self._path(f"-{node}.beat").exists()

    def live_nodes(self, num_nodes: int) -> list[int]:
        """Those that have begun, give signs of life and have not ended."""
        ended = self.ends(num_nodes)
        return [
            node for node in range(num_nodes) if node not in ended and self.has_begun(node) and not self.is_silent(node)
        ]

    def order(self, order: Order) -> None:
        """Tell all nodes; a KILL is not taken back."""
        if self.ordered() != "KILL":
            self._path(".order").parent.mkdir(exist_ok=True)
            replace_durably(self._path(".order"), order.encode())

    def ordered(self) -> str:
        """The last order, empty before the first."""
        try:
            return self._path(".order").read_text()
        except FileNotFoundError:
            return ""

    def write_end(self, node: int, end: RanksEnd) -> None:
        text = json.dumps({**asdict(end), "ended_at": time.time()})
        replace_durably(self._path(f"-{node}.json"), text.encode())

    def ends(self, num_nodes: int) -> dict[int, RanksEnd]:
        """How the ranks of nodes ended, in the order of time."""
        written = []
        for node in range(num_nodes):
            path = self._path(f"-{node}.json")
            if path.exists():
                values = json.loads(path.read_text())
                written.append((values.pop("ended_at"), node, RanksEnd(**values)))
        return {node: end for _, node, end in sorted(written, key=lambda each: each[0])}


def age_of(path: Path) -> float | None:
    """Seconds since a file changed, by the clock of its file system; None where it is not there. It is opened, as NFS
    asks its server only then."""
    try:
        with open(path, "rb") as file:
            changed_at = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    probe = path.parent / f".now-{os.uname().nodename}-{os.getpid()}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink(missing_ok=True)
    return now - changed_at
