"""What a phase trains on, step by step: packed rows, or answers that it samples itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from configs.schema import PolicyObjective
from tasks.data.packed_rows import PackedRows
from tasks.training.batches import MicroBatch, Rows, read_micro_batches
from tasks.training.job import TrainingJob
from tasks.training.policy import policy_batches
from tasks.training.rollouts import PromptOrder, describe_groups, policy_model, sample_answers
from tasks.training.schedules import StepPlan

if TYPE_CHECKING:
    from model.transformer import Glm4Moe

LOGGED_GROUPS = 2
"""Groups of each step that rollouts.jsonl keeps."""


@dataclass(frozen=True)
class StepData:
    micro_batches: list[MicroBatch]
    """None where a step has nothing to learn: no optimizer step is taken then."""
    metrics: dict[str, float] = field(default_factory=dict)
    rollouts: list[dict[str, object]] = field(default_factory=list)
    """Lines of rollouts.jsonl."""


class PhaseData(Protocol):
    """The data of a step depend on its position and, for a policy, on the weights: never on what was read before."""

    def read(self, plan: StepPlan, step: int) -> StepData: ...


class PackedData:
    """This rank's part of the packed rows."""

    def __init__(self, rows: Rows, num_sequences: int, device: torch.device) -> None:
        self.rows, self.num_sequences, self.device = rows, num_sequences, device

    def read(self, plan: StepPlan, step: int) -> StepData:
        return StepData(read_micro_batches(self.rows, plan, dist.get_rank(), dist.get_world_size(), self.num_sequences, self.device))


class PolicyData:
    """Answers of the model as it stands to the prompts of the step; one rank."""

    def __init__(self, job: TrainingJob, model: Glm4Moe) -> None:
        from tokenizers import Tokenizer

        assert isinstance(job.recipe.objective, PolicyObjective), job.recipe.objective
        self.job, self.model, self.objective = job, model, job.recipe.objective
        self.tokenizer = Tokenizer.from_file(job.tokenizer_path)
        self.prompts = PromptOrder(Path(job.prompts_path), job.recipe.seed)

    def read(self, plan: StepPlan, step: int) -> StepData:
        size = self.objective.samples_per_prompt
        prompts = self.prompts.groups(plan.first_row // size, (plan.first_row + plan.num_rows) // size)
        model = policy_model(self.model, self.job.recipe.dtype)
        started = time.perf_counter()
        rollouts = sample_answers(model, self.tokenizer, prompts, self.job.recipe, self.job.eos_token_ids, step)
        seconds = time.perf_counter() - started
        num_sequences = self.job.resources.micro_batch_sequences
        batches, metrics = policy_batches(model, rollouts, self.objective, num_sequences, self.model.lm_head.weight.device)
        return StepData(batches, {**metrics, "rollout_seconds": seconds}, describe_groups(rollouts, size, LOGGED_GROUPS, step))


def open_phase_data(job: TrainingJob, model: Glm4Moe) -> PhaseData:
    """Raises ValueError where the packed rows hold less than the budget."""
    if isinstance(job.recipe.objective, PolicyObjective):
        return PolicyData(job, model)
    rows = PackedRows(Path(job.packed_dir), tuple(map(Path, job.shards_dirs)))
    if len(rows) * job.recipe.sequence_length < job.recipe.num_tokens:
        raise ValueError(
            f"phase {job.recipe.phase} wants {job.recipe.num_tokens} tokens, {job.packed_dir} holds {len(rows)} rows of "
            f"{job.recipe.sequence_length}: pack the phase with the same budget"
        )
    return PackedData(rows, job.resources.micro_batch_sequences, model.lm_head.weight.device)
