"""The weights in training as a Hugging Face directory that a rollout server reads, from any topology.

They take the way of a checkpoint: each rank writes the elements that it holds, and each makes its share of the files of
what all wrote. So no rank holds the model, and an adapter is merged in as at the phase's end.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from model.formats.hf_checkpoint import Writer
from tasks.training.parallel.control import gathered, on_first_rank
from tasks.training.state.export import export_weights
from tasks.training.state.job import TrainingJob
from tasks.training.state.node_checkpoints import write_snapshot
from tasks.training.state.saved_state import SavedState
from tasks.training.state.state import take_weights

if TYPE_CHECKING:
    from tasks.training.parallel.trainable import Trainable


def write_rollout_weights(job: TrainingJob, trainable: Trainable) -> Path:
    """Returns the directory, in the work directory and in the phase's dtype; all ranks call it, and it is whole when it
    returns. It replaces that of the step before. Raises OSError, on all of them, where one could not write or read its
    part."""
    hf_dir, parts_dir = Path(job.work_dir) / "rollout_weights", Path(job.work_dir) / "rollout_parts"

    def begin() -> None:
        for directory in (hf_dir, parts_dir):
            shutil.rmtree(directory, ignore_errors=True)
        parts_dir.mkdir(parents=True)

    on_first_rank(begin)
    rank, why = dist.get_rank(), ""
    try:
        files = write_snapshot(parts_dir, rank, take_weights(trainable))
    except OSError as error:
        files, why = {}, str(error)
    by_rank = gathered((files, why))
    _refuse_failures([why for _, why in by_rank])
    saved = SavedState(parts_dir, {name: file for own, _ in by_rank for name, file in own.items()})
    try:
        export_weights(job, saved, hf_dir, parts_dir / "adapter", Writer(rank, dist.get_world_size()))
        why = saved.damage
    except OSError as error:
        why = str(error)
    _refuse_failures(gathered(why))
    on_first_rank(lambda: shutil.rmtree(parts_dir))
    return hf_dir


def _refuse_failures(by_rank: list[str]) -> None:
    for rank, why in enumerate(by_rank):
        if why:
            raise OSError(
                f"rank {rank} could not write its part of the weights for the rollout server ({why}): run again"
            )
