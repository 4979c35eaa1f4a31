"""The stages that ran in a home, by scale, and the keys of their newest and earlier work: run/identities/."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from infra.storage.manifest_store import step_key
from tasks.monitoring.metric_table import Figures


@dataclass(frozen=True)
class StageRun:
    """A stage of a scale; `keys` from the newest to the oldest."""

    scale: str
    stage: str
    step: str
    keys: tuple[str, ...]


class StageRuns:
    """Reads a stage's file again only when it was replaced."""

    def __init__(self, identities_dir: Path) -> None:
        self._directory = identities_dir
        self._known: dict[Path, tuple[int, StageRun]] = {}

    def look(self, figures: Figures) -> list[StageRun]:
        """All stages; one whose file is not readable is reported and left out."""
        return [run for path in sorted(self._directory.glob("*/*.json")) if (run := self._read(path, figures))]

    def _read(self, path: Path, figures: Figures) -> StageRun | None:
        try:
            changed = path.stat().st_mtime_ns
            if path not in self._known or self._known[path][0] != changed:
                identities = json.loads(path.read_text())
                keys = tuple(step_key(identity) for identity in reversed(identities))
                run = StageRun(path.parent.name, path.stem, identities[-1]["step"], keys)
                self._known[path] = (changed, run)
            return self._known[path][1]
        except (ValueError, KeyError, TypeError, IndexError, OSError):
            figures.unreadable(path)
            return None
