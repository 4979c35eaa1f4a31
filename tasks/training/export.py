"""The end of a phase: final/ with the weights as a Hugging Face directory and the hand-over state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from model.hf_checkpoint import save_checkpoint
from model.transformer import Glm4Moe
from tasks.training.checkpoints import CHECKSUMS, find_checkpoint
from tasks.training.job import TrainingJob

MAX_SHARD_BYTES = 4 << 30


def export_checkpoint(job: TrainingJob, model: Glm4Moe) -> None:
    """Write work_dir/final/ (hf/ in the phase's dtype, handover/ linked from the last checkpoint) by one rename."""
    work_dir = Path(job.work_dir)
    checkpoint_dir, problems = find_checkpoint(work_dir)
    assert checkpoint_dir is not None and not problems, problems
    temporary = work_dir / ".final"
    shutil.rmtree(temporary, ignore_errors=True)
    save_checkpoint(
        model, temporary / "hf", eos_token_ids=job.eos_token_ids, pad_token_id=job.pad_token_id,
        dtype=getattr(torch, job.recipe.dtype), max_shard_bytes=MAX_SHARD_BYTES,
    )  # fmt: skip
    (temporary / "handover").mkdir()
    for path in sorted(checkpoint_dir.iterdir()):
        if path.name != CHECKSUMS:
            os.link(path, temporary / "handover" / path.name)
    shutil.rmtree(work_dir / "final", ignore_errors=True)
    temporary.rename(work_dir / "final")
