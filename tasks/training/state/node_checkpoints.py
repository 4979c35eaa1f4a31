"""Checkpoints go to the node's own disk first and to the work directory behind the training.

A save writes files to the node (one in memory at a time) and returns; a thread then uploads them, and that of rank 0
verifies and commits the whole (checkpoints.py). One checkpoint is on its way at a time. After a kill the next start
finishes an upload whose files are all on nodes that are there, before it looks for the newest checkpoint.

Files on a node: NODE_DIR/KEY-xxxxxxxx/rank-R/step-NNNNNNNNN/, with upload.json written last. Where node_dir is empty
they are in the work directory, and uploading makes a second name of the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from configs.files.atomic_files import link_or_copy, replace_durably, sync_file
from tasks.training.parallel.control import gathered, on_first_rank, wait_for_all
from tasks.training.state.checkpoints import (
    checkpoint_dir_of,
    find_damage_among,
    finish_checkpoint,
    latest_step,
    own_fencing,
    remove_unfinished,
    start_checkpoint,
    unfinished_dir_of,
    write_files,
)
from tasks.training.state.job import TrainingJob
from tasks.training.state.position import Position
from tasks.training.state.state import dump_state

if TYPE_CHECKING:
    from tasks.training.parallel.trainable import Trainable

UPLOAD_FILE = "upload.json"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Upload:
    """upload.json: what a rank has of a checkpoint on its node, and what the whole is."""

    step: int
    rank: int
    writers: tuple[int, ...]
    """Ranks that have files of it: the first of each pipeline stage."""
    own_checksums: dict[str, str]
    checksums: dict[str, str]
    """Of the files of all writers."""
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

    def save(self, trainable: Trainable, position: Position, protected_steps: Collection[int] = ()) -> None:
        """Write a checkpoint to the nodes and begin to upload it. The checkpoints of the protected steps are kept.
        Raises OSError, on all ranks, where one could not write it or the one before."""
        self.finish()
        directory = _step_dir(self.job, dist.get_rank(), position.step)
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        except OSError as error:
            raise OSError(f"{error}: set node_dir to a directory on a disk of each node, or to ''") from error
        try:
            written: dict[str, str] | str = write_files(directory, dump_state(trainable, position))
        except OSError as error:
            written = str(error)
        by_rank = gathered(written)
        _raise_failures(position.step, by_rank)
        checksums = {name: checksum for files in by_rank if isinstance(files, dict) for name, checksum in files.items()}
        writers = tuple(rank for rank, files in enumerate(by_rank) if files)
        assert isinstance(written, dict)
        self._upload = Upload(
            position.step, dist.get_rank(), writers, written, checksums, tuple(protected_steps), own_fencing()
        )
        on_first_rank(lambda: start_checkpoint(self.work_dir, position.step))
        if dist.get_rank() in writers:
            replace_durably(directory / UPLOAD_FILE, json.dumps(asdict(self._upload)).encode())
            self._thread = threading.Thread(target=self._run, args=(self._upload, directory), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the last save is committed. Raises as `save`."""
        if self._upload is None:
            return
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        upload, self._upload, self._thread = self._upload, None, None
        _raise_failures(upload.step, gathered("" if self._error is None else str(self._error)))
        shutil.rmtree(_step_dir(self.job, upload.rank, upload.step), ignore_errors=True)

    def _run(self, upload: Upload, directory: Path) -> None:
        try:
            upload_files(self.work_dir, upload, directory)
            if upload.rank == 0:
                _commit(self.job, upload)
        except Exception as error:
            self._error = error


def upload_files(work_dir: Path, upload: Upload, directory: Path) -> None:
    """Bring a rank's files into the checkpoint that is being written, and tell rank 0. The commit verifies them."""
    temporary = unfinished_dir_of(work_dir, upload.step)
    why = ""
    try:
        for name in upload.own_checksums:
            link_or_copy(directory / name, temporary / name)
            sync_file(temporary / name)
    except OSError as error:
        why = str(error)
    replace_durably(_part(temporary, upload.rank), why.encode())
    if why:
        raise OSError(why)


def _commit(job: TrainingJob, upload: Upload) -> None:
    """Wait for the files of all ranks, and make the checkpoint the newest one."""
    work_dir = Path(job.work_dir)
    temporary = unfinished_dir_of(work_dir, upload.step)
    parts = [_part(temporary, rank) for rank in upload.writers]
    while not all(part.exists() for part in parts):
        time.sleep(POLL_SECONDS)
    if any(part.read_text() for part in parts):
        return  # that rank raises its reason
    for part in parts:
        part.unlink()
    finish_checkpoint(
        work_dir, upload.step, upload.checksums, job.resources.num_kept_checkpoints, upload.protected_steps
    )


def finish_uploads(job: TrainingJob) -> None:
    """After a kill: commit the newest checkpoint that is whole on the nodes, where the work directory has only older
    ones, and remove the rest there. All ranks call it before they look for a checkpoint."""
    work_dir = Path(job.work_dir)
    on_first_rank(lambda: remove_unfinished(work_dir))
    latest = on_first_rank(lambda: latest_step(work_dir))
    own = {(upload.step, upload.rank): (upload, path) for upload, path in _left_on_node(job)}
    by_rank = gathered({key: upload for key, (upload, _) in own.items()})
    holders: dict[tuple[int, int], int] = {}
    uploads: dict[int, Upload] = {}
    for rank, held in enumerate(by_rank):
        for key, upload in held.items():
            holders.setdefault(key, rank)
            uploads[key[0]] = upload
    whole = [
        step
        for step, upload in uploads.items()
        if step > latest and all((step, writer) in holders for writer in upload.writers)
    ]
    if whole:
        step = max(whole)
        on_first_rank(lambda: start_checkpoint(work_dir, step))
        for key, (upload, path) in own.items():
            if key[0] == step and holders[key] == dist.get_rank():
                upload_files(work_dir, upload, path)
        wait_for_all()
        on_first_rank(lambda: _commit(job, uploads[step]))
        if dist.get_rank() == 0:
            print(f"checkpoint of step {step} was whole on the nodes: uploaded", flush=True)
    if _is_first_of_node():
        shutil.rmtree(_node_dir(job), ignore_errors=True)
    wait_for_all()


def _left_on_node(job: TrainingJob) -> list[tuple[Upload, Path]]:
    """What the start before this one left, undamaged."""
    if not _is_first_of_node():
        return []
    left = []
    for path in sorted(_node_dir(job).glob(f"rank-*/step-*/{UPLOAD_FILE}")):
        values = json.loads(path.read_text())
        upload = Upload(**{**values, "writers": tuple(values["writers"])})
        if upload.fencing == own_fencing() - 1 and not find_damage_among(path.parent, upload.own_checksums):
            left.append((upload, path.parent))
    return left


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _node_dir(job: TrainingJob) -> Path:
    """Of this run alone: homes may share a node's disk."""
    work_dir = Path(job.work_dir)
    if not job.resources.node_dir:
        return work_dir / "node"
    home = hashlib.sha256(str(work_dir).encode()).hexdigest()[:8]
    return Path(job.resources.node_dir) / f"{work_dir.name}-{home}"


def _step_dir(job: TrainingJob, rank: int, step: int) -> Path:
    return _node_dir(job) / f"rank-{rank}" / checkpoint_dir_of(Path(), step).name


def _part(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank}"


def _raise_failures(step: int, by_rank: list[dict[str, str] | str] | list[str]) -> None:
    for rank, why in enumerate(by_rank):
        if why and isinstance(why, str):
            raise OSError(
                f"checkpoint of step {step}: rank {rank} could not write it ({why}); the one before it is kept"
            )
