"""progress.json: how far a process that runs apart from the flow has come (infra/step.py's Progress)."""

from __future__ import annotations

import json
import time
from pathlib import Path

from configs.files.atomic_files import replacing

NAME = "progress.json"
INTERVAL_SECONDS = 0.2


class ProgressFile:
    """Replaces the file in a work directory, at most five times a second, and always at the end."""

    def __init__(self, work_dir: Path) -> None:
        self.path = work_dir / NAME
        self.written_at = 0.0

    def write(self, done: float, total: float, unit: str, message: str, figure: float | None = None) -> None:
        if done < total and time.monotonic() - self.written_at < INTERVAL_SECONDS:
            return
        self.written_at = time.monotonic()
        with replacing(self.path) as temporary:
            progress = {"done": done, "total": total, "unit": unit, "message": message, "figure": figure}
            temporary.write_text(json.dumps(progress))
