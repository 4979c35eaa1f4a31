"""Makes one optimizer step: accumulates gradients, checks loss and gradient norm, clips, steps, moves router biases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import PolicyObjective, TrainingRecipe
from model.architecture.moe import update_router_bias
from model.architecture.transformer import Losses, ModelOutput
from model.optimizer.optimizer import set_learning_rate
from tasks.training.parallel.gradients import clip_gradients, gradient_norm, reduce_partial
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.pipeline_parallel import accumulate_in_stages, next_token_loss_in_stages, router_rows
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.trainable import Trainable
from tasks.training.schedule.schedules import StepPlan, learning_rate_at, value_at
from tasks.training.state.position import StepLosses
from tasks.training.state.spikes import SpikeError, TakenStep, find_spike


@dataclass(frozen=True)
class ExpertUse:
    """How evenly a step's tokens used the experts, per MoE layer, the MTP layer's last. Empty where no step was
    taken."""

    load: tuple[float, ...]
    """Most used expert over the mean; 1.0 is perfect balance."""
    variation: tuple[float, ...]
    """Coefficient of variation of the loads."""
    num_dead: tuple[int, ...]
    """Experts without a token."""


def expert_use(counts_LE: Tensor) -> ExpertUse:
    """From the routed copies per layer and expert. A layer without any did not run: the MTP layer where its loss weighs
    nothing."""
    counts_LE = counts_LE[counts_LE.sum(-1) > 0].double()
    mean_L = counts_LE.mean(-1)
    load_L, variation_L = counts_LE.amax(-1) / mean_L, counts_LE.std(-1, correction=0) / mean_L
    return ExpertUse(tuple(load_L.tolist()), tuple(variation_L.tolist()), tuple((counts_LE == 0).sum(-1).tolist()))


@dataclass(frozen=True)
class StepResult:
    losses: StepLosses
    total_loss: float
    grad_norm: float
    """Of all gradients together, after the mean over ranks and before clipping and the optimizer."""
    learning_rate: float
    mtp_weight: float
    router_bias_rate: float
    expert_use: ExpertUse
    optimizer_seconds: float
    num_positions: int
    """Positions that held a document's token, over all ranks: gaps of packed rows are left out."""
    squared_lengths: int
    """Of the documents, or rows, inside which attention stays: its products grow with this number."""

    def after(self, before: StepResult) -> StepResult:
        """This update's result, with the work of the updates of the same step before it."""
        return replace(
            self,
            optimizer_seconds=before.optimizer_seconds + self.optimizer_seconds,
            num_positions=before.num_positions + self.num_positions,
            squared_lengths=before.squared_lengths + self.squared_lengths,
        )


def pass_over(recipe: TrainingRecipe, plan: StepPlan, losses: StepLosses) -> StepResult:
    """The result of a step that is not taken, with these losses: weights and moments stay, its tokens count as
    consumed."""
    learning_rate = learning_rate_at(recipe.course, recipe.course_num_tokens, plan.end_tokens)
    return StepResult(losses, 0.0, 0.0, learning_rate, 0.0, 0.0, ExpertUse((), (), ()), 0.0, 0, 0)


NO_LOSSES = StepLosses(lm=0.0, mtp=0.0, balance=0.0)


def take_step(
    trainable: Trainable,
    recipe: TrainingRecipe,
    plan: StepPlan,
    micro_batches: list[MicroBatch],
    step: int,
    recent: tuple[TakenStep, ...] = (),
    observed: AbstractContextManager[object] | None = None,
) -> StepResult:
    """Every mean is over the whole step: a micro-batch weighs as much as its targets, so accumulation and ranks change
    only rounding.

    `observed` is entered around the forward and backward passes, for a profiler. Raises SpikeError, on all ranks and
    before the optimizer, where loss or gradient norm exceed the medians of the `recent` steps too far."""
    engine, ranks = trainable.engine, trainable.ranks
    mtp_weight = value_at(recipe.course.mtp_loss_weight, recipe.course_num_tokens, plan.start_tokens)
    balance_weight = recipe.course.balance_loss_weight
    terms = torch.stack([batch.terms for batch in micro_batches])
    attended = torch.stack([batch.attended for batch in micro_batches]).sum(0)
    totals = _sum_over(torch.cat([terms.sum(0), attended]), ranks.replicas)
    shares = list(terms / totals[:3].clamp(min=1))
    is_divided = ranks.pipeline.size > 1
    run_passes = accumulate_in_stages if is_divided else accumulate_gradients
    with observed or nullcontext():
        sums, counts_LE = run_passes(trainable, micro_batches, shares, (mtp_weight, balance_weight))
    sums, counts_LE = sum_over_ranks(sums, counts_LE, ranks)
    reduce_partial(engine, trainable.model, ranks)
    grad_norm = gradient_norm(engine, trainable.model, ranks)
    # Context ranks hold parts of the same rows, and each counted whole rows.
    figures = read_figures(sums, grad_norm, totals[3:] // ranks.context.size, counts_LE)
    losses, grad_norm = figures.losses, figures.grad_norm
    total_loss = losses.lm + mtp_weight * losses.mtp + balance_weight * losses.balance
    _refuse_spike(recipe, recent, step, total_loss, grad_norm)
    clip_gradients(engine, trainable.model, ranks, grad_norm, recipe.optimizer.max_grad_norm)
    learning_rate = learning_rate_at(recipe.course, recipe.course_num_tokens, plan.end_tokens)
    set_learning_rate(trainable.optimizer, learning_rate, trains_mtp=mtp_weight > 0)
    started = time.perf_counter()
    engine.step()
    optimizer_seconds = time.perf_counter() - started
    bias_rate = value_at(recipe.course.router_bias_rate, recipe.course_num_tokens, plan.start_tokens)
    own_counts_LE = counts_LE[router_rows(trainable.model)] if is_divided else counts_LE
    update_router_bias(trainable.model, own_counts_LE, bias_rate, recipe.course.router_bias_rule)
    return StepResult(
        losses,
        total_loss,
        grad_norm,
        learning_rate,
        mtp_weight,
        bias_rate,
        expert_use(figures.counts_LE),
        optimizer_seconds,
        figures.num_positions,
        figures.squared_lengths,
    )


def sum_over_ranks(sums: Tensor, counts_LE: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The three losses and the routed copies of a step from every rank's part of them, in place: once per step.

    Tensor ranks hold slices of the same positions, so each has the whole loss of the targets (lm, MTP), but the balance
    loss and the copies of its slice. Of a pipeline every stage has its own layers'."""
    _sum_over(sums[2:], ranks.tensor)
    for axis in (ranks.replicas, ranks.pipeline):
        _sum_over(sums, axis)
    for axis in (ranks.stage, ranks.pipeline):
        _sum_over(counts_LE, axis)
    return sums, counts_LE


class Figures(NamedTuple):
    """What the host knows of a step's passes."""

    losses: StepLosses
    grad_norm: float
    num_positions: int
    squared_lengths: int
    counts_LE: Tensor


def read_figures(sums: Tensor, grad_norm: Tensor, attended: Tensor, counts_LE: Tensor) -> Figures:
    """The only place where the host waits for the accelerator in a step. All ranks get rank 0's values: their sums may
    differ in rounding, and they decide alike. Counts are exact in float64."""
    every = torch.cat([each.flatten().double() for each in (sums, grad_norm, attended, counts_LE)])
    if dist.get_world_size() > 1:
        dist.broadcast(every, src=0)
    every = every.cpu()
    lm, mtp, balance, norm, num_positions, squared_lengths = every[:6].tolist()
    losses = StepLosses.model_construct(lm=lm, mtp=mtp, balance=balance)
    counts = every[6:].to(torch.int64).view(counts_LE.shape)
    return Figures(losses, norm, int(num_positions), int(squared_lengths), counts)


def accumulate_gradients(
    trainable: Trainable, micro_batches: list[MicroBatch], shares: list[Tensor], loss_weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Forward and backward passes of a step: this rank's part of the three losses (float64) and of the routed copies
    per layer and expert.

    `shares` are what each micro-batch's means weigh in those of the whole step, `loss_weights` those of MTP and balance
    loss."""
    engine, device = trainable.engine, trainable.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    counts_LE: Tensor | None = None
    for number, (batch, share) in enumerate(zip(micro_batches, shares, strict=True)):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
        if trainable.model.begin_rows is not None:
            assert batch.row_numbers_B is not None, "an adapter with dropout trains on numbered rows"
            trainable.model.begin_rows(batch.row_numbers_B, batch.token_ids_BT.shape[1])
        output = _forward(trainable, batch)
        lm, mtp, balance = (loss * part for loss, part in zip(_losses(output), share, strict=True))
        loss = lm + loss_weights[0] * mtp + loss_weights[1] * balance
        # DeepSpeed averages gradients over replicas; the shares already divide by the whole step.
        engine.backward(loss * trainable.ranks.replicas.size)
        sums += torch.stack([lm, mtp, balance]).detach().double()
        counted_LE = torch.zeros_like(output.expert_counts_LE) if batch.is_filler else output.expert_counts_LE
        counts_LE = counted_LE if counts_LE is None else counts_LE + counted_LE
    assert counts_LE is not None
    return sums, counts_LE


@torch.no_grad()
def sum_losses(trainable: Trainable, groups: Sequence[Sequence[MicroBatch]]) -> list[float]:
    """Per group of micro-batches the summed cross-entropy of its targets in nats, or the summed loss of its pairs, over
    all ranks; every rank gives the same number of batches, fillers among them, which weigh nothing. A pair counts on
    each rank that holds a part of its positions."""
    is_divided, model = trainable.ranks.pipeline.size > 1, trainable.model
    # ZeRO 3 gathers parameters in the order of the last pass, and stages wait for each other's tensors: every pass is
    # alike.
    ran_mtp, model.runs_mtp = (
        model.runs_mtp,
        model.runs_mtp and (is_divided or trainable.engine.zero_optimization_stage() == 3),
    )
    sums = torch.zeros(len(groups), dtype=torch.float64, device=trainable.device)
    trainable.engine.eval()
    for number, batches in enumerate(groups):
        for batch in batches:
            loss = next_token_loss_in_stages(trainable, batch) if is_divided else _losses(_forward(trainable, batch)).lm
            sums[number] += loss.double() * batch.num_lm_targets * (not batch.is_filler)
    trainable.engine.train()
    model.runs_mtp = ran_mtp
    for axis in (trainable.ranks.replicas, trainable.ranks.pipeline):
        sums = _sum_over(sums, axis)
    return sums.tolist()


def _forward(trainable: Trainable, batch: MicroBatch) -> ModelOutput:
    return trainable.engine(batch.token_ids_BT, **batch.model_arguments)


def _losses(output: ModelOutput) -> Losses:
    assert output.losses is not None, "a micro-batch has targets"
    return output.losses


def _sum_over(values: Tensor, axis: Axis) -> Tensor:
    if axis.group is not None:
        dist.all_reduce(values, group=axis.group)
    return values


def _refuse_spike(
    recipe: TrainingRecipe, recent: tuple[TakenStep, ...], step: int, total_loss: float, grad_norm: float
) -> None:
    """Raises SpikeError, on all ranks or on none: they judge the same numbers."""
    spike = find_spike(
        recipe.spikes,
        recent,
        step,
        total_loss,
        grad_norm,
        loss_is_a_measure=not isinstance(recipe.objective, PolicyObjective),
    )
    if spike is not None:
        raise SpikeError(spike)
