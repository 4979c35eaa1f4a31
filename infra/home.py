"""`GLM46_HOME`: the one directory a machine keeps (store/ prefect/ mlflow/ work/ cache/ run/), by default ./.glm46."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """Absolute root directory and the names below it."""

    root: Path

    @property
    def store_dir(self) -> Path:
        return self.root / "store"

    @property
    def prefect_dir(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow_dir(self) -> Path:
        return self.root / "mlflow"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def cache_dir(self) -> Path:
        return self.root / "cache"

    def work_dir(self, key: str) -> Path:
        """Progress of an unfinished step: survives crashes, goes after the commit."""
        return self.root / "work" / key


def open_home() -> Home:
    """The home named by GLM46_HOME, created if need be. Raises ValueError if it cannot be written."""
    home = Home(Path(os.environ.get("GLM46_HOME", ".glm46")).absolute())
    try:
        for directory in (home.prefect_dir, home.mlflow_dir, home.run_dir, home.root / "work"):
            directory.mkdir(parents=True, exist_ok=True)
        probe = home.run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"GLM46_HOME {home.root} cannot be written ({error.strerror}): free it or name another directory") from error
    return home
