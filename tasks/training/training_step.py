"""One optimizer step: accumulate gradients over micro-batches, look at loss and gradient norm, step, move the router biases."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import TrainingRecipe
from model.moe import update_router_bias
from model.optimizer import set_learning_rate
from model.transformer import Glm4Moe
from tasks.training.batches import MicroBatch
from tasks.training.gradients import gradient_norm, reduce_partial
from tasks.training.ranks import Ranks
from tasks.training.schedules import StepPlan, learning_rate_at, value_at
from tasks.training.state import StepLosses

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam


class NonFiniteLossError(RuntimeError):
    """Loss or gradient norm is not a number or infinite; raised before the optimizer changed anything."""


@dataclass(frozen=True)
class Trainable:
    """Model and optimizer as they were built, and the engine around them."""

    engine: DeepSpeedEngine
    model: Glm4Moe
    optimizer: MuonWithAuxAdam
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device


@dataclass(frozen=True)
class StepResult:
    losses: StepLosses
    total_loss: float
    grad_norm: float
    """Of all gradients together, after the mean over ranks and before the optimizer."""
    learning_rate: float
    expert_load: list[float]
    """Most used expert over the mean, per MoE layer, the MTP layer's last; 1.0 is perfect balance. Empty where no step was taken."""
    optimizer_seconds: float
    num_positions: int
    """Positions that went through the model, over all ranks."""


def pass_over(recipe: TrainingRecipe, plan: StepPlan) -> StepResult:
    """The result of a step with nothing to learn from: weights and moments stay, all losses are 0."""
    learning_rate = learning_rate_at(recipe.course, recipe.course_num_tokens, plan.end_tokens)
    return StepResult(StepLosses(lm=0.0, mtp=0.0, balance=0.0), 0.0, 0.0, learning_rate, [], 0.0, 0)


def take_step(trainable: Trainable, recipe: TrainingRecipe, plan: StepPlan, micro_batches: list[MicroBatch], step: int) -> StepResult:
    """Every mean is over the whole step: a micro-batch weighs as much as its targets, so accumulation and ranks change only rounding."""
    mtp_weight = value_at(recipe.course.mtp_loss_weight, recipe.course_num_tokens, plan.start_tokens)
    engine, device = trainable.engine, trainable.device
    totals = _sum_over_ranks(
        torch.tensor([[*_num_terms(batch), batch.token_ids_BT.numel()] for batch in micro_batches], device=device).sum(0)
    )
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    counts_LE: Tensor | None = None
    for number, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
        output = engine(
            batch.token_ids_BT, target_ids_BT=batch.target_ids_BT, target_weights_BT=batch.weights_BT, temperature=batch.temperature,
            **{"segment_ids_BT" if batch.is_segmented else "mtp_segment_ids_BT": batch.segment_ids_BT},
        )  # fmt: skip
        shares = torch.tensor(_num_terms(batch), device=device) / totals[:3].clamp(min=1)
        lm, mtp, balance = (loss * share for loss, share in zip(output.losses, shares, strict=True))
        loss = lm + mtp_weight * mtp + recipe.course.balance_loss_weight * balance
        # DeepSpeed averages gradients over ranks; the shares already divide by the whole step.
        engine.backward(loss * dist.get_world_size())
        sums += torch.stack([lm, mtp, balance]).detach().double()
        counts_LE = output.expert_counts_LE if counts_LE is None else counts_LE + output.expert_counts_LE
    assert counts_LE is not None
    losses = StepLosses.model_construct(**dict(zip(("lm", "mtp", "balance"), _sum_over_ranks(sums).tolist(), strict=True)))
    total_loss = losses.lm + mtp_weight * losses.mtp + recipe.course.balance_loss_weight * losses.balance
    reduce_partial(trainable.model, trainable.ranks)
    grad_norm = gradient_norm(engine, trainable.model, trainable.ranks)
    _refuse_non_finite(total_loss, grad_norm, plan, step)
    learning_rate = learning_rate_at(recipe.course, recipe.course_num_tokens, plan.end_tokens)
    set_learning_rate(trainable.optimizer, learning_rate)
    started = time.perf_counter()
    engine.step()
    optimizer_seconds = time.perf_counter() - started
    counts_LE = _sum_over_ranks(counts_LE)
    update_router_bias(trainable.model, counts_LE, value_at(recipe.course.router_bias_rate, recipe.course_num_tokens, plan.start_tokens))
    expert_load = (counts_LE.amax(-1) / counts_LE.double().mean(-1)).tolist()
    return StepResult(losses, total_loss, grad_norm, learning_rate, expert_load, optimizer_seconds, int(totals[3]))


def _num_terms(batch: MicroBatch) -> tuple[int, int, int]:
    """Terms of the three means: next-token targets, MTP targets, sequences."""
    return batch.num_lm_targets, batch.num_mtp_targets, batch.num_rows


def _sum_over_ranks(values: Tensor) -> Tensor:
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def _refuse_non_finite(total_loss: float, grad_norm: float, plan: StepPlan, step: int) -> None:
    if math.isfinite(total_loss) and math.isfinite(grad_norm):
        return
    raise NonFiniteLossError(
        f"step {step}: loss {total_loss}, gradient norm {grad_norm}; rows {plan.first_row} to {plan.first_row + plan.num_rows - 1} of the "
        f"phase, course position {plan.start_tokens} tokens. The optimizer step was not taken: look at these rows or lower the "
        "learning rate"
    )
