"""Commits resumable state: checkpoints/step-NNNNNN/ plus `latest`, the name of the newest committed one.

Every rank writes and hashes files of its own. A commit adds index.json, what each file holds and the digests of its
blocks, to a temporary directory whose files are on the disk. It renames the directory and only then moves `latest`. So
a crash or a full disk at any point leaves the previous checkpoint in place. Who reads a block compares it with its
digest. Every commit carries the fencing number of the supervisor that started this process. If work/<key>/fencing holds
a higher one, another supervisor has taken over and the commit is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.files.atomic_files import replace_durably, sync_directory, write_durably
from configs.files.file_digests import BLOCK_BYTES, block_digest_of
from configs.files.stored_files import CorruptFileError, StoredFile, read_block
from tasks.training.state.tensor_runs import Box, Run

INDEX_FILE = "index.json"
LATEST = "latest"
FENCING_VARIABLE = "GLM46_FENCING"


class FencedError(RuntimeError):
    """Another supervisor has taken over this work directory."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint does not read as it was written; raised on all ranks."""

    def __init__(self, checkpoint_dir: Path, damage: str) -> None:
        super().__init__(f"checkpoint {checkpoint_dir} is corrupt ({damage})")
        self.step = _step_of(checkpoint_dir)


@dataclass(frozen=True)
class SavedFile:
    """What the index says of a file."""

    size: int
    """Bytes."""
    blocks: tuple[str, ...]
    """Digest of each block of BLOCK_BYTES."""
    runs: tuple[tuple[str, Run], ...] = ()
    """Kind of tensor, and which elements: float32, one run after the other. None where the file holds something
    else."""

    def stored(self, path: Path) -> StoredFile:
        return StoredFile(str(path), self.size, _digest_of("".join(self.blocks).encode()), self.blocks)


def saved_file(values: Mapping[str, Any]) -> SavedFile:
    """From JSON."""
    runs = tuple(
        (kind, Run(name, tuple(shape), Box(*box), *rest)) for kind, (name, shape, box, *rest) in values["runs"]
    )
    return SavedFile(values["size"], tuple(values["blocks"]), runs)


def start_checkpoint(work_dir: Path, step: int) -> Path:
    """An empty temporary directory, which ranks may fill together."""
    temporary = unfinished_dir_of(work_dir, step)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def write_file(path: Path, data: memoryview | bytes, runs: tuple[tuple[str, Run], ...] = ()) -> SavedFile:
    """Write and hash a file in one pass."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")  # an empty view has no cast
    blocks = []
    with open(path, "wb") as file:
        for begin in range(0, len(view), BLOCK_BYTES):
            block = view[begin : begin + BLOCK_BYTES]
            blocks.append(block_digest_of(hashlib.sha256(block)))
            file.write(block)
    return SavedFile(len(view), tuple(blocks), runs)


def finish_checkpoint(
    work_dir: Path, step: int, files: Mapping[str, SavedFile], num_kept: int, protected_steps: Collection[int] = ()
) -> Path:
    """Commit what the ranks wrote: no file is read, but all must be there with their sizes. Moves `latest` to it and
    drops what need not be kept. Raises FencedError."""
    checkpoints_dir = work_dir / "checkpoints"
    target = checkpoints_dir / _name(step)
    temporary = unfinished_dir_of(work_dir, step)
    write_index(temporary, files)
    sync_directory(temporary)
    with _fenced(work_dir):
        if target.exists():  # found corrupt at resume, or never became `latest`
            shutil.rmtree(target)
        temporary.rename(target)
        sync_directory(checkpoints_dir)
        problem = _find_other_size(target, files)
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


def write_index(directory: Path, files: Mapping[str, SavedFile]) -> None:
    """Describe the files of a checkpoint, whose digests the index holds beside its own."""
    text = _canonical({name: as_json(file) for name, file in sorted(files.items())})
    content = f'{{"sha256": "{_digest_of(text.encode())}", "files": {text}}}\n'
    write_durably(directory / INDEX_FILE, content.encode())


def read_index(checkpoint_dir: Path) -> dict[str, SavedFile]:
    """The files of a checkpoint by name. Raises ValueError or OSError where the index does not read as it was
    written."""
    values = json.loads((checkpoint_dir / INDEX_FILE).read_text())
    if not isinstance(values, dict) or values["sha256"] != _digest_of(_canonical(values["files"]).encode()):
        raise ValueError("it does not have its sha256")
    return {name: saved_file(file) for name, file in values["files"].items()}


def as_json(file: SavedFile) -> dict[str, Any]:
    """For JSON."""
    return {"size": file.size, "blocks": file.blocks, "runs": file.runs}


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
    """The newest checkpoint whose index reads and whose files have their sizes, starting from `latest`, and the
    problems of the newer ones that were skipped. Who reads the files finds what else is wrong with them."""
    checkpoints_dir = work_dir / "checkpoints"
    latest = checkpoints_dir / LATEST
    if not latest.exists():
        return None, []
    committed = [
        path for path in sorted(checkpoints_dir.glob("step-*"), reverse=True) if path.name <= latest.read_text()
    ]
    problems = []
    for path in committed:
        problem = find_missing(path)
        if not problem:
            return path, problems
        problems.append(str(DamagedCheckpointError(path, problem)))
    return None, problems


def find_damage(checkpoint_dir: Path) -> str:
    """What differs between a checkpoint and its index, all files read; empty if nothing."""
    return find_missing(checkpoint_dir) or find_damage_among(checkpoint_dir, read_index(checkpoint_dir))


def find_damage_among(directory: Path, files: Mapping[str, SavedFile]) -> str:
    """What differs between some files, all read, and what is known of them; empty if nothing."""
    for name, file in files.items():
        try:
            with open(directory / name, "rb") as opened:
                for number in range(len(file.blocks)):
                    read_block(file.stored(directory / name), number, opened.fileno())
        except CorruptFileError as error:
            return f"{name}: {error.problem}"
        except OSError as error:
            return str(error)
    return ""


def find_missing(checkpoint_dir: Path) -> str:
    """Why the index does not read, or which file is missing or has another size; empty if nothing. Reads no file."""
    try:
        return _find_other_size(checkpoint_dir, read_index(checkpoint_dir))
    except (OSError, ValueError) as error:
        return f"{INDEX_FILE} cannot be read: {error}"


def _find_other_size(directory: Path, files: Mapping[str, SavedFile]) -> str:
    for name, file in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != file.size:
            return f"{name} has {path.stat().st_size} bytes, not {file.size}"
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


def _canonical(values: object) -> str:
    return json.dumps(values, separators=(",", ":"))


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
