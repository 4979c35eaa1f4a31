"""An Output in a directory, for steps that are called without a store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from infra.step import Output, Progress


def local_output(directory: Path, report: Callable[[Progress], None] = lambda progress: None) -> Output:
    """Everything is written below `directory`."""

    def remove(name: str) -> None:
        shutil.rmtree(directory / name, ignore_errors=True)

    return Output(directory, str(directory), directory, "key", report, lambda rows: None, remove)
