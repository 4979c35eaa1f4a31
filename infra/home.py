"""`GLM46_HOME`: the one directory a machine keeps (store/ prefect/ mlflow/ work/ cache/ run/), by default ./.glm46."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = ".glm46"
OWN_NAMES = {"store", "prefect", "mlflow", "work", "cache", "run", "reports", "cluster"}
OWN_NAMES |= {"blocked_documents.txt", "lost+found"}
"""What a directory may hold and still become a home: the block list may be there before the first run, and `lost+found`
is in the root of a new ext4 volume."""


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

    @property
    def work_root(self) -> Path:
        """Parent of the work directories."""
        return self.root / "work"

    def work_dir(self, key: str) -> Path:
        """Progress of an unfinished step: survives crashes, goes after the commit."""
        return self.work_root / key

    def is_at(self, root: str) -> bool:
        """Whether an absolute path names this home, perhaps by another name: through a link, or mounted again."""
        try:
            return root == str(self.root) or (os.path.isabs(root) and self.root.samefile(root))
        except OSError:
            return False


def named_home() -> Home:
    """The home named by GLM46_HOME, which may not exist. An empty variable is as an unset one."""
    return Home(Path(os.environ.get("GLM46_HOME") or DEFAULT_ROOT).expanduser().absolute())


def known_home() -> Home:
    """The home named by GLM46_HOME, for commands that look something up: nothing is created. Raises ValueError for a
    directory with other things in it."""
    home = named_home()
    _refuse_other_directory(home)
    return home


def refuse_missing_home(home: Home, other: str = "") -> None:
    """Raises ValueError for a directory in which nothing has run yet, a mistyped one for example."""
    if not home.run_dir.is_dir():
        raise ValueError(
            f"{home.root} is no home of glm46 yet: run `glm46 run tiny` first, or set GLM46_HOME to where it was "
            f"run{other}"
        )


def open_home() -> Home:
    """The home named by GLM46_HOME, created if needed. Raises ValueError if it cannot be written, and for a directory
    with other things in it, whose mode stays.

    Other users cannot enter it: a home that they could enter becomes 0700. One with bits for its group only (`chmod
    750`) stays as it is: the group can read artifacts, but neither databases nor logs.
    """
    home = known_home()
    try:
        home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.root.stat().st_mode & 0o007:
            home.root.chmod(0o700)
        for directory in (home.prefect_dir, home.mlflow_dir, home.run_dir, home.work_root):
            directory.mkdir(exist_ok=True)
        for directory in (home.prefect_dir, home.run_dir):
            directory.chmod(0o700)
        probe = home.run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)  # another thread may have removed it
    except OSError as error:
        raise ValueError(
            f"GLM46_HOME {home.root} cannot be written ({error.strerror}): make it writable or name another directory"
        ) from error
    return home


def _refuse_other_directory(home: Home) -> None:
    try:
        names = set(os.listdir(home.root))
    except OSError:  # not there, or no directory: open_home says so
        return
    if not names <= OWN_NAMES and not {home.prefect_dir.name, home.run_dir.name} <= names:
        raise ValueError(
            f"GLM46_HOME {home.root} is not empty and no home of glm46: name a new directory, or the home of your runs"
        )


def private_file(path: Path) -> Path:
    """The path of a file that only its owner can read, made empty where there is none."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path
