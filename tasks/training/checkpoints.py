"""Commits of resumable state: checkpoints/step-NNNNNN/ plus `latest`, the name of the newest one that was verified.

A commit writes to a temporary directory, fsyncs, adds checksums.json, renames, reads everything back and only then moves `latest`, so
a crash or a full disk at any point leaves the previous checkpoint standing. Every commit carries the fencing number of the supervisor
that started this process; if work/<key>/fencing holds a higher one, another supervisor has taken over and the commit is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKSUMS = "checksums.json"
LATEST = "latest"
FENCING_VARIABLE = "GLM46_FENCING"


class FencedError(RuntimeError):
    """Another supervisor has taken over this work directory."""


def commit_checkpoint(work_dir: Path, step: int, files: Iterable[tuple[str, bytes]], num_kept: int) -> Path:
    """Make the files of one step durable, move `latest` to them, and keep the `num_kept` newest. Raises FencedError."""
    checkpoints_dir = work_dir / "checkpoints"
    checkpoints_dir.mkdir(parents=True, exist_ok=True)
    target = checkpoints_dir / _name(step)
    temporary = checkpoints_dir / f".{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    checksums = {}
    for name, data in files:
        checksums[name] = hashlib.sha256(data).hexdigest()
        _write_durably(temporary / name, data)
    _write_durably(temporary / CHECKSUMS, json.dumps(checksums, indent=1).encode())
    _fsync_directory(temporary)
    with _fenced(work_dir):
        if target.exists():  # found corrupt at resume, or never became `latest`
            shutil.rmtree(target)
        temporary.rename(target)
        _fsync_directory(checkpoints_dir)
        problem = find_damage(target)
        if problem:
            raise OSError(f"checkpoint {target} was not written as meant: {problem}; the one before it still stands")
        replace_durably(checkpoints_dir / LATEST, target.name.encode())
        _fsync_directory(checkpoints_dir)
    saved = sorted(checkpoints_dir.glob("step-*"))
    position = saved.index(target)
    for other in [*saved[: max(0, position + 1 - num_kept)], *saved[position + 1 :]]:  # newer ones were corrupt, else we had resumed there
        shutil.rmtree(other)
    return target


def find_checkpoint(work_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest verified checkpoint, starting from `latest`, and what is wrong with the newer ones that were passed over."""
    checkpoints_dir = work_dir / "checkpoints"
    latest = checkpoints_dir / LATEST
    if not latest.exists():
        return None, []
    committed = [path for path in sorted(checkpoints_dir.glob("step-*"), reverse=True) if path.name <= latest.read_text()]
    problems = []
    for path in committed:
        problem = find_damage(path)
        if not problem:
            return path, problems
        problems.append(f"checkpoint {path} is corrupt ({problem})")
    return None, problems


def find_damage(checkpoint_dir: Path) -> str:
    """What differs between a checkpoint and its checksums; empty if nothing."""
    try:
        checksums: dict[str, str] = json.loads((checkpoint_dir / CHECKSUMS).read_text())
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    for name, checksum in checksums.items():
        path = checkpoint_dir / name
        if not path.is_file():
            return f"{name} is missing"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                return f"{name} does not have its sha256"
    return ""


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a small file atomically."""
    temporary = path.with_name(f".{path.name}")
    _write_durably(temporary, data)
    os.replace(temporary, path)


@contextmanager
def _fenced(work_dir: Path) -> Iterator[None]:
    """Hold the fencing file while the commit becomes visible: a new supervisor waits for that before it takes its number."""
    own = int(os.environ.get(FENCING_VARIABLE, "0"))  # 0: started by hand, without a supervisor
    descriptor = os.open(work_dir / "fencing", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        current = int(os.pread(descriptor, 32, 0) or 0)
        if own < current:
            raise FencedError(f"this process was started with fencing number {own}, {work_dir} belongs to {current}: it may not save")
        yield
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
