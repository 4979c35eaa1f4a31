"""Commits resumable state: checkpoints/step-NNNNNN/ plus `latest`, the name of the newest verified one.

A commit adds checksums.json to a temporary directory whose files are on the disk, renames it, reads everything back and
only then moves `latest`. So a crash or a full disk at any point leaves the previous checkpoint in place. Every commit
carries the fencing number of the supervisor that started this process. If work/<key>/fencing holds a higher one,
another supervisor has taken over and the commit is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from configs.files.atomic_files import replace_durably, sync_directory, write_durably

CHECKSUMS = "checksums.json"
LATEST = "latest"
FENCING_VARIABLE = "GLM46_FENCING"


class FencedError(RuntimeError):
    """Another supervisor has taken over this work directory."""


def start_checkpoint(work_dir: Path, step: int) -> Path:
    """An empty temporary directory, which ranks may fill together."""
    temporary = unfinished_dir_of(work_dir, step)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def write_files(temporary: Path, files: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Checksums by name; OSError, of a full disk for example, is raised after all files were iterated over: making them
    may need all ranks."""
    checksums: dict[str, str] = {}
    failed: OSError | None = None
    for name, data in files:
        if failed is None:
            try:
                (temporary / name).write_bytes(data)
            except OSError as error:
                failed = error
        checksums[name] = hashlib.sha256(data).hexdigest()
    if failed is not None:
        raise failed
    return checksums


def finish_checkpoint(
    work_dir: Path, step: int, checksums: Mapping[str, str], num_kept: int, protected_steps: Collection[int] = ()
) -> Path:
    """Verify what the ranks wrote, move `latest` to it and drop what need not be kept. Raises FencedError."""
    checkpoints_dir = work_dir / "checkpoints"
    target = checkpoints_dir / _name(step)
    temporary = unfinished_dir_of(work_dir, step)
    write_durably(temporary / CHECKSUMS, json.dumps(dict(sorted(checksums.items())), indent=1).encode())
    sync_directory(temporary)
    with _fenced(work_dir):
        if target.exists():  # found corrupt at resume, or never became `latest`
            shutil.rmtree(target)
        temporary.rename(target)
        sync_directory(checkpoints_dir)
        problem = find_damage(target)
        if problem:
            raise OSError(f"checkpoint {target} was not written as meant: {problem}; the one before it is kept")
        replace_durably(checkpoints_dir / LATEST, target.name.encode())
        sync_directory(checkpoints_dir)
    saved = sorted(checkpoints_dir.glob("step-*"))
    position = saved.index(target)
    for other in [
        *saved[: max(0, position + 1 - num_kept)],
        *saved[position + 1 :],
    ]:  # newer ones were corrupt, else we had resumed there
        if other > target or _step_of(other) not in protected_steps:
            shutil.rmtree(other)
    return target


def remove_unfinished(work_dir: Path) -> None:
    """What a kill left of checkpoints that were being written."""
    for temporary in (work_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(temporary)


def saved_steps(work_dir: Path) -> list[int]:
    """Steps whose checkpoints are kept, ascending; they are verified when they are read."""
    return sorted(_step_of(path) for path in (work_dir / "checkpoints").glob("step-*"))


def latest_step(work_dir: Path) -> int:
    """Step of the checkpoint from which a resumed training continues, unless that is corrupt; 0 before the first."""
    latest = work_dir / "checkpoints" / LATEST
    return _step_of(Path(latest.read_text())) if latest.exists() else 0


def checkpoint_dir_of(work_dir: Path, step: int) -> Path:
    return work_dir / "checkpoints" / _name(step)


def discard_checkpoints(work_dir: Path, last_step: int) -> None:
    """Go back to the newest checkpoint at or before a step: later ones are removed, `latest` first. Raises
    FencedError."""
    checkpoints_dir = work_dir / "checkpoints"
    steps = saved_steps(work_dir)
    kept = [step for step in steps if step <= last_step]
    if len(kept) == len(steps):
        return
    with _fenced(work_dir):
        if kept:
            replace_durably(checkpoints_dir / LATEST, _name(kept[-1]).encode())
        else:
            (checkpoints_dir / LATEST).unlink(missing_ok=True)
        sync_directory(checkpoints_dir)
        for step in steps[len(kept) :]:
            shutil.rmtree(checkpoint_dir_of(work_dir, step))


def find_checkpoint(work_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest verified checkpoint, starting from `latest`, and the problems of the newer ones that were skipped."""
    checkpoints_dir = work_dir / "checkpoints"
    latest = checkpoints_dir / LATEST
    if not latest.exists():
        return None, []
    committed = [
        path for path in sorted(checkpoints_dir.glob("step-*"), reverse=True) if path.name <= latest.read_text()
    ]
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
    return find_damage_among(checkpoint_dir, checksums)


def find_damage_among(checkpoint_dir: Path, checksums: Mapping[str, str]) -> str:
    """What differs between some files of a checkpoint and their checksums; empty if nothing."""
    for name, checksum in checksums.items():
        path = checkpoint_dir / name
        if not path.is_file():
            return f"{name} is missing"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                return f"{name} does not have its sha256"
    return ""


@contextmanager
def _fenced(work_dir: Path) -> Iterator[None]:
    """Hold the fencing file while the commit becomes visible: a new supervisor waits for this before it takes its
    number."""
    own = own_fencing()
    descriptor = os.open(
        work_dir / "fencing", os.O_RDWR | os.O_CREAT
    )  # by flock, not filelock: the locked file holds the number
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        current = int(os.pread(descriptor, 32, 0) or 0)
        if own < current:
            raise FencedError(
                f"this process was started with fencing number {own}, {work_dir} belongs to {current}: it may not save"
            )
        yield
    finally:
        os.close(descriptor)


def own_fencing() -> int:
    """The number of the start that this process belongs to; 0: started by hand, without a supervisor."""
    return int(os.environ.get(FENCING_VARIABLE, "0"))


def unfinished_dir_of(work_dir: Path, step: int) -> Path:
    return work_dir / "checkpoints" / f".{_name(step)}"


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
