"""Checkpoints are written by every rank while training goes on: to the node's own disk, then to the work directory.

A save copies what the rank writes to host memory and returns. A thread then writes and hashes it on the node's disk,
uploads it and says so in a part file; that of rank 0 puts the parts together and commits the whole (checkpoints.py). It
reads no other rank's data, and no collective waits for a disk. One checkpoint is on its way at a time. After a kill the
next start finishes an upload whose files are all on nodes that are there, before it looks for the newest checkpoint.

Files on a node: NODE_DIR/KEY-xxxxxxxx/rank-R/step-NNNNNNNNN/, with upload.json written last. Where node_dir is empty
they are in the work directory, and uploading makes a second name of the same bytes.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from configs.files.atomic_files import link_or_copy, replace_durably, sync_file
from tasks.training.parallel.control import gathered, on_first_rank, wait_for_all
from tasks.training.state.checkpoints import (
    SavedFile,
    as_json,
    checkpoint_dir_of,
    find_damage_among,
    finish_checkpoint,
    latest_step,
    own_fencing,
    remove_unfinished,
    saved_file,
    start_checkpoint,
    unfinished_dir_of,
    write_file,
)
from tasks.training.state.job import TrainingJob
from tasks.training.state.position import Position
from tasks.training.state.saved_state import STATE_FILE
from tasks.training.state.state import Snapshot, take_snapshot

if TYPE_CHECKING:
    from tasks.training.parallel.trainable import Trainable

UPLOAD_FILE = "upload.json"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Upload:
    """A rank's part of a checkpoint. upload.json is this, with what it has written."""

    step: int
    rank: int
    num_ranks: int
    """All of them have a part."""
    protected_steps: tuple[int, ...]
    fencing: int
    """Of the start that wrote it. Only the next start may finish it: one later may continue another history."""


class NodeCheckpoints:
    """The saves of one training; all ranks call every method together."""

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.work_dir = job, Path(job.work_dir)
        self._upload: Upload | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_uploaded, self._is_given_up = threading.Event(), threading.Event()

    def save(self, trainable: Trainable, position: Position, protected_steps: Collection[int] = ()) -> None:
        """Begin to write a checkpoint. Those of the protected steps are kept. Raises OSError, on all ranks, where one
        could not write the one before."""
        self.finish()
        rank, step = dist.get_rank(), position.step
        directory = _step_dir(self.job, rank, step)
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        except OSError as error:
            raise OSError(f"{error}: set node_dir to a directory on a disk of each node, or to ''") from error
        on_first_rank(lambda: start_checkpoint(self.work_dir, step))
        self._upload = Upload(step, rank, dist.get_world_size(), tuple(protected_steps), own_fencing())
        self._is_uploaded, self._is_given_up = threading.Event(), threading.Event()
        arguments = (self._upload, take_snapshot(trainable, position), directory)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last save is committed. Raises as `save`."""
        if self._upload is None or self._thread is None:
            return
        self._is_uploaded.wait()
        if any(gathered(self._failure())):
            self._is_given_up.set()  # on a full disk a rank has no part file either, for which rank 0 would wait
        self._thread.join()
        upload, self._upload, self._thread = self._upload, None, None
        _raise_failures(upload.step, gathered(self._failure()))
        shutil.rmtree(_step_dir(self.job, upload.rank, upload.step), ignore_errors=True)

    def _failure(self) -> str:
        """Why this rank could not write; empty where it could, or has not failed so far."""
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        return "" if self._error is None else str(self._error)

    def _run(self, upload: Upload, snapshot: Snapshot, directory: Path) -> None:
        try:
            files: dict[str, SavedFile] | str = write_snapshot(directory, upload.rank, snapshot)
            replace_durably(directory / UPLOAD_FILE, json.dumps({**vars(upload), "files": _as_json(files)}).encode())
        except OSError as error:
            files = str(error)
        try:
            upload_files(self.work_dir, upload, files, directory)
            self._is_uploaded.set()
            if upload.rank == 0:
                _commit(self.job, upload, self._is_given_up)
        except Exception as error:
            self._error = error
        finally:
            self._is_uploaded.set()


def write_snapshot(directory: Path, rank: int, snapshot: Snapshot) -> dict[str, SavedFile]:
    """A rank's files of a checkpoint, and what the index says of them; the position is in those of rank 0."""
    name = f"rank-{rank:05d}.bin"
    files = {name: write_file(directory / name, snapshot.elements.numpy().data, snapshot.runs)}
    if rank == 0:
        files[STATE_FILE] = write_file(directory / STATE_FILE, snapshot.position)
    return files


def upload_files(work_dir: Path, upload: Upload, files: dict[str, SavedFile] | str, directory: Path) -> None:
    """Bring a rank's files, or why there are none, into the checkpoint that is being written, and tell rank 0. Raises
    OSError."""
    temporary = unfinished_dir_of(work_dir, upload.step)
    why = files if isinstance(files, str) else ""
    try:
        for name in () if isinstance(files, str) else files:
            source, target = directory / name, temporary / name
            link_or_copy(source, target)
            sync_file(target)
            if not target.samefile(source) and not filecmp.cmp(source, target, shallow=False):
                why = f"{target} does not hold what was copied from {source}"
    except OSError as error:
        why = str(error)
    part = {"why": why, "files": {} if why else _as_json(files)}
    try:
        replace_durably(_part(temporary, upload.rank), json.dumps(part).encode())
    except OSError as error:
        why = why or str(error)
    if why:
        raise OSError(why)


def _commit(job: TrainingJob, upload: Upload, is_given_up: threading.Event) -> None:
    """Wait for the parts of all ranks, unless it is given up meanwhile, and make the checkpoint the newest one."""
    work_dir = Path(job.work_dir)
    temporary = unfinished_dir_of(work_dir, upload.step)
    while len(parts := sorted(temporary.glob("part-*"))) < upload.num_ranks:
        if is_given_up.wait(POLL_SECONDS):
            return
    contents = [json.loads(part.read_text()) for part in parts]
    if any(content["why"] for content in contents):
        return  # that rank raises its reason
    for part in parts:
        part.unlink()
    files = {name: saved_file(values) for content in contents for name, values in content["files"].items()}
    finish_checkpoint(work_dir, upload.step, files, job.resources.num_kept_checkpoints, upload.protected_steps)


def finish_uploads(job: TrainingJob) -> None:
    """After a kill: commit the newest checkpoint that is whole on the nodes, where the work directory has only older
    ones, and remove the rest there. All ranks call it before they look for a checkpoint."""
    work_dir = Path(job.work_dir)
    on_first_rank(lambda: remove_unfinished(work_dir))
    latest = on_first_rank(lambda: latest_step(work_dir))
    own = {(upload.step, upload.rank): (upload, files, path) for upload, files, path in _left_on_node(job)}
    by_rank = gathered({key: upload for key, (upload, _, _) in own.items()})
    holders: dict[tuple[int, int], int] = {}
    uploads: dict[int, Upload] = {}
    for rank, held in enumerate(by_rank):
        for key, upload in held.items():
            holders.setdefault(key, rank)
            uploads[key[0]] = upload
    whole = [
        step
        for step, upload in uploads.items()
        if step > latest and all((step, rank) in holders for rank in range(upload.num_ranks))
    ]
    if whole:
        step = max(whole)
        on_first_rank(lambda: start_checkpoint(work_dir, step))
        for key, (upload, files, path) in own.items():
            if key[0] == step and holders[key] == dist.get_rank():
                upload_files(work_dir, upload, files, path)
        wait_for_all()
        on_first_rank(lambda: _commit(job, uploads[step], threading.Event()))
        if dist.get_rank() == 0:
            print(f"checkpoint of step {step} was whole on the nodes: uploaded", flush=True)
    if _is_first_of_node():
        shutil.rmtree(_node_dir(job), ignore_errors=True)
    wait_for_all()


def _left_on_node(job: TrainingJob) -> list[tuple[Upload, dict[str, SavedFile], Path]]:
    """What the start before this one left, undamaged."""
    if not _is_first_of_node():
        return []
    left = []
    for path in sorted(_node_dir(job).glob(f"rank-*/step-*/{UPLOAD_FILE}")):
        values = json.loads(path.read_text())
        files = {name: saved_file(file) for name, file in values.pop("files").items()}
        upload = Upload(**{**values, "protected_steps": tuple(values["protected_steps"])})
        if upload.fencing == own_fencing() - 1 and not find_damage_among(path.parent, files):
            left.append((upload, files, path.parent))
    return left


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _node_dir(job: TrainingJob) -> Path:
    """Only of this run: homes may share a node's disk."""
    work_dir = Path(job.work_dir)
    if not job.resources.node_dir:
        return work_dir / "node"
    home = hashlib.sha256(str(work_dir).encode()).hexdigest()[:8]
    return Path(job.resources.node_dir) / f"{work_dir.name}-{home}"


def _step_dir(job: TrainingJob, rank: int, step: int) -> Path:
    return _node_dir(job) / f"rank-{rank}" / checkpoint_dir_of(Path(), step).name


def _part(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank}"


def _as_json(files: dict[str, SavedFile] | str) -> dict[str, Any]:
    assert not isinstance(files, str), files
    return {name: as_json(file) for name, file in files.items()}


def _raise_failures(step: int, by_rank: list[str]) -> None:
    for rank, why in enumerate(by_rank):
        if why:
            raise OSError(
                f"checkpoint of step {step}: rank {rank} could not write it ({why}); the one before it is kept"
            )
