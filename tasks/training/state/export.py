"""Exports the end of a phase: final/ with the weights as a Hugging Face directory and the hand-over state.

Both come from the last checkpoint, whose tensors are whole whatever the topology: no rank needs the whole model for
it. An adapter's phase exports the weights with the adapter merged in, the adapter itself in PEFT's format (adapter/),
and a hand-over state without masters: the next phase reads hf/.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from model.architecture.adapters import scaling_of
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from model.formats.hf_checkpoint import config_dict, write_checkpoint
from tasks.training.state.adapter_export import MergedTensors, write_adapter
from tasks.training.state.checkpoints import CHECKSUMS, find_checkpoint
from tasks.training.state.job import TrainingJob
from tasks.training.state.state import STATE_FILE
from tasks.training.state.tensor_sources import StateFiles, open_weights

MAX_SHARD_BYTES = 4 << 30


def export_checkpoint(job: TrainingJob) -> None:
    """Write work_dir/final/ (hf/ in the phase's dtype, handover/ linked from the last checkpoint) by one rename."""
    work_dir = Path(job.work_dir)
    checkpoint_dir, problems = find_checkpoint(work_dir)
    assert checkpoint_dir is not None and not problems, problems
    temporary = work_dir / ".final"
    shutil.rmtree(temporary, ignore_errors=True)
    export_weights(job, checkpoint_dir, temporary / "hf", temporary / "adapter")
    (temporary / "handover").mkdir()
    for path in sorted(checkpoint_dir.iterdir()):
        if path.name == STATE_FILE or (path.name != CHECKSUMS and job.recipe.adapter.kind == "none"):
            os.link(path, temporary / "handover" / path.name)
    shutil.rmtree(work_dir / "final", ignore_errors=True)
    temporary.rename(work_dir / "final")


def export_weights(job: TrainingJob, checkpoint_dir: Path, hf_dir: Path, adapter_dir: Path) -> None:
    """Write a checkpoint's weights as a Hugging Face directory, in the phase's dtype, and its adapter if it has one."""
    recipe, dtype = job.recipe, getattr(torch, job.recipe.dtype)
    model = recipe.model.model_copy(update={"rope_theta": recipe.rope_theta})
    config = config_dict(
        model, dtype=dtype, eos_token_ids=job.eos_token_ids, pad_token_id=job.pad_token_id, is_scored=recipe.is_scored
    )
    with torch.device("meta"):
        shapes = dict(sorted(checkpoint_shapes(Glm4Moe(recipe.model, is_scored=recipe.is_scored)).items()))
    trained = StateFiles(checkpoint_dir, "master")
    if recipe.adapter.kind == "none":
        read = trained.tensor
    else:
        weights = open_weights(Path(job.start_dir), Path(job.start_weights_dir), recipe.model)
        read = MergedTensors(weights, shapes, trained, scaling_of(recipe.adapter)).tensor
        write_adapter(trained, recipe.adapter, adapter_dir)
    write_checkpoint(read, shapes, config, hf_dir, dtype=dtype, max_shard_bytes=MAX_SHARD_BYTES)
