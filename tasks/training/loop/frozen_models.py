"""The models that a policy phase reads and never changes: its reference, and the reward model that scores answers.

They are divided among the ranks as the policy is, and have no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from model.architecture.transformer import Glm4Moe
from model.formats.hf_checkpoint import CheckpointTensors, read_config
from tasks.training.loop.build_model import divide_model, make_weights
from tasks.training.parallel.deepspeed_config import deepspeed_config
from tasks.training.parallel.pipeline_parallel import PipelineStage
from tasks.training.parallel.ranks import DeepSpeedRanks
from tasks.training.parallel.trainable import DividedModel
from tasks.training.policy.answer_rows import sequence_rows
from tasks.training.policy.critic import token_values
from tasks.training.policy.divided_passes import score_targets
from tasks.training.policy.rank_shares import compute_rows
from tasks.training.state.state import load_frozen

if TYPE_CHECKING:
    from configs.schema import TrainingResources
    from tasks.training.parallel.ranks import Ranks
    from tasks.training.state.job import TrainingJob


def open_frozen(job: TrainingJob, checkpoint_dir: str, ranks: Ranks, is_scored: bool = False) -> DividedModel:
    """A checkpoint's model in the arithmetic of the phase, none of whose weights has a gradient; all ranks call it.
    Raises ValueError where the files hold other tensors than its configuration says."""
    import deepspeed

    resources, dtype = _without_training(job.resources), job.recipe.dtype
    recipe = read_config(Path(checkpoint_dir))
    with torch.device("meta"):
        model = Glm4Moe(recipe, is_scored=is_scored).requires_grad_(False)
    divide_model(model, ranks, resources)
    make_weights(model, dtype, resources, ranks)
    engine, *_ = deepspeed.initialize(
        model=PipelineStage(model, ranks) if ranks.pipeline.size > 1 else model,
        config=deepspeed_config(resources, dtype),
        mpu=DeepSpeedRanks(ranks) if dist.get_world_size() > 1 else None,
    )
    engine.eval()
    frozen = DividedModel(engine, model, ranks)
    load_frozen(frozen, CheckpointTensors(Path(checkpoint_dir), recipe, is_scored), f"the model in {checkpoint_dir}")
    return frozen


def _without_training(resources: TrainingResources) -> TrainingResources:
    """Only ZeRO 3 divides weights; nothing is computed again without a backward pass."""
    zero_stage = 3 if resources.zero_stage == 3 else 0
    changes = {"zero_stage": zero_stage, "offload_optimizer": "none", "compile_layers": False, "recompute": "none"}
    return resources.model_copy(update=changes if zero_stage else {**changes, "offload_parameters": "none"})


def score_answers(
    reward_model: DividedModel, sequences: Sequence[list[int]], num_sequences: int, max_batch_tokens: int = 0
) -> list[float]:
    """The reward model's score of each prompt with its answer: as in its training that of the last token, which is the
    one that ended the answer, or where the answer was cut off its last one. Equal answers are scored once: scores that
    differed by rounding would make their group one to learn from. All ranks call it with the same sequences;
    `num_sequences` and `max_batch_tokens` bound a micro-batch (AnswerRows)."""
    ranks, device = reward_model.ranks, reward_model.device
    distinct = [*dict.fromkeys(map(tuple, sequences))]
    num_parts = ranks.tensor.size * ranks.context.size
    rows = sequence_rows(distinct, device, num_parts, max_batch_tokens * ranks.context.size)
    if reward_model.is_divided:
        values_BT = score_targets(reward_model, rows, 1.0, num_sequences)
    else:
        values_BT = compute_rows(lambda own: token_values(reward_model.model, own, num_sequences), rows, ranks.data)
    last_B = torch.tensor([len(sequence) - 1 for sequence in distinct], device=device)
    scores = values_BT[torch.arange(len(last_B), device=device), last_B].tolist()
    by_sequence = dict(zip(distinct, scores, strict=True))
    return [by_sequence[tuple(sequence)] for sequence in sequences]
