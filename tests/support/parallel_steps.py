"""A few optimizer steps of a small model on ranks through DeepSpeed, and the same steps by one plain process: for tests
of parallel axes.

Muon and AdamW do not see a gradient's scale, so each comparison is made twice: with SGD, whose weights show the
gradients themselves at every ZeRO stage, and with Muon.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from configs.load import load_scale
from configs.schema import ModelRecipe, TrainingResources
from model.architecture.losses import IGNORED
from model.architecture.moe import Router
from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import Muon, build_optimizer, set_learning_rate
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.loop.training_step import sum_over_ranks
from tasks.training.parallel.deepspeed_config import deepspeed_config
from tasks.training.parallel.gradients import reduce_partial
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.partitions import pieces_of
from tasks.training.parallel.ranks import DeepSpeedRanks, Ranks
from tasks.training.parallel.shards import gather_whole, shard_of
from tasks.training.parallel.whole_matrices import WholeMatrices
from tests.support.model_recipes import GLM46, random_model
from tests.support.router_margins import clear_routing

MTP_WEIGHT, BALANCE_WEIGHT = 0.3, 0.1
Divide = Callable[[Glm4Moe, Ranks], None]
Own = Callable[[MicroBatch, Ranks], MicroBatch]


def resources_of(**changes: object) -> TrainingResources:
    """Small buckets: DeepSpeed allocates them whole, two gigabytes per rank at the full scale's size."""
    return load_scale("micro").phases[0].resources.model_copy(update={"bucket_elements": 100_000} | changes)


def micro_batches(
    num_rows: int, num_positions: int, *, is_segmented: bool, seed: int = 0, num_gaps: int = 0
) -> list[MicroBatch]:
    """Random tokens in documents of random lengths, some of them not trained, and gaps at the end; one row each."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_rows):
        tokens = torch.randint(GLM46.vocab_size, (1, num_positions + 1), generator=generator)
        segments = (torch.rand(1, num_positions, generator=generator) < 0.15).cumsum(1)
        is_left_out = torch.rand(1, num_positions, generator=generator) < 0.2
        if num_gaps:
            segments[:, -num_gaps:] = NO_SEGMENT
            is_left_out[:, -num_gaps - 1 :] = True
        targets = tokens[:, 1:].masked_fill(is_left_out, IGNORED)
        batches.append(MicroBatch(tokens[:, :-1], targets, segments, is_segmented, has_gaps=num_gaps > 0))
    return batches


def build_model(starved: slice | None = None, recipe: ModelRecipe = GLM46) -> Glm4Moe:
    """Nobody chooses the starved experts of the first layer that has experts."""
    model = random_model(recipe, std=0.1)
    if starved is not None:
        next(module for module in model.modules() if isinstance(module, Router)).e_score_correction_bias[
            starved
        ] = -100.0
    return model


def build_any_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """The groups of the real one in every case, those of divided experts among them."""
    # As large as a gradient is: with 1e-8 AdamW makes a whole step of an element that is nothing but rounding.
    recipe = (
        load_scale("micro").phases[0].recipe.optimizer.model_copy(update={"adam_eps": 1e-3, "router_rate_ratio": 1.0})
    )
    optimizer = build_optimizer(model, recipe)
    if kind == "muon":
        set_learning_rate(optimizer, 0.01)
        return optimizer
    marks = [{key: group[key] for key in ("params", "moe", "name") if key in group} for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.use_muon = False
    # One step is enough and shows the gradient, where the rate is so high that a weight does not round the change away.
    return torch.optim.SGD(marks, lr=10.0)


def step_alone(model: Glm4Moe, optimizer: torch.optim.Optimizer, batches: list[MicroBatch]) -> dict[str, Tensor]:
    """One step over all rows in one process, without DeepSpeed; rounding chooses no expert in it."""
    optimizer.zero_grad()
    with clear_routing():
        sums = _accumulate(model, batches, _terms(batches), lambda loss: loss.backward())
    optimizer.step()
    return sums


def step_on_ranks(engine, model: Glm4Moe, ranks: Ranks, batches: list[MicroBatch]) -> dict[str, Tensor]:
    """The same step, from this rank's share of the rows; losses and counts are those of all ranks."""
    totals = _terms(batches)
    if ranks.replicas.group is not None:
        torch.distributed.all_reduce(totals, group=ranks.replicas.group)
    numbers = iter(range(1, len(batches) + 1))

    def backward(loss: Tensor) -> None:
        engine.set_gradient_accumulation_boundary(next(numbers) == len(batches))
        engine.backward(loss * ranks.replicas.size)

    sums = _accumulate(engine, batches, totals, backward)
    reduce_partial(engine, engine.module, ranks)
    engine.step()
    losses, counts = sum_over_ranks(sums["losses"], sums["counts"], ranks)
    return {"losses": losses, "counts": counts}


def _terms(batches: list[MicroBatch]) -> Tensor:
    return torch.tensor([[batch.num_lm_targets, batch.num_mtp_targets, batch.num_rows] for batch in batches]).sum(0)


def _accumulate(
    model: Callable, batches: list[MicroBatch], totals: Tensor, backward: Callable[[Tensor], None]
) -> dict[str, Tensor]:
    losses, counts = torch.zeros(3), 0
    for batch in batches:
        output = model(batch.token_ids_BT, **batch.model_arguments)
        shares = _terms([batch]) / totals
        lm, mtp, balance = (loss * share for loss, share in zip(output.losses, shares, strict=True))
        backward(lm + MTP_WEIGHT * mtp + BALANCE_WEIGHT * balance)
        losses += torch.stack([lm, mtp, balance]).detach()
        counts = counts + output.expert_counts_LE
    return {"losses": losses, "counts": torch.as_tensor(counts)}


def initialize(model: Glm4Moe, optimizer: torch.optim.Optimizer, ranks: Ranks, resources: TrainingResources):
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(resources, "float32"), mpu=DeepSpeedRanks(ranks)
    )
    if isinstance(optimizer, Muon):
        optimizer.orthogonalize = WholeMatrices(optimizer, pieces_of(engine, model, ranks), ranks, engine.device)
    return engine


def whole_weights(model: Glm4Moe, ranks: Ranks) -> dict[str, Tensor]:
    """Every parameter as one process would hold it; all ranks call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in model.named_parameters():
        value = safe_get_full_fp32_param(parameter) if hasattr(parameter, "ds_id") else parameter.detach()
        assert value is not None, name
        weights[name] = gather_whole(value, shard_of(parameter), ranks)
    return weights


def compare(
    ranks: Ranks,
    resources: TrainingResources,
    batches: list[MicroBatch],
    own: Own,
    divide: Divide,
    *,
    optimizer: str,
    num_steps: int,
    starved: slice | None = None,
) -> None:
    """Losses, counts and weights of `num_steps` steps against one process; `divide` and `own` make this rank's model
    and rows."""
    reference, model = build_model(starved), build_model(starved)
    initial = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    divide(model, ranks)
    alone = build_any_optimizer(reference, optimizer)
    engine = initialize(model, build_any_optimizer(model, optimizer), ranks, resources)
    rows = batches[ranks.data.rank :: ranks.data.size]
    for _ in range(num_steps):
        expected = step_alone(reference, alone, batches)
        actual = step_on_ranks(engine, model, ranks, [own(batch, ranks) for batch in rows])
        torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-5, atol=1e-5)
        assert torch.equal(actual["counts"], expected["counts"]), (actual["counts"], expected["counts"])
        assert actual["counts"].dtype == torch.int64
    weights = whole_weights(model, ranks)
    for name, parameter in reference.named_parameters():
        # The change, not the weight: a wrong gradient is small beside a weight.
        change, actual_change = parameter.detach() - initial[name], weights[name] - initial[name]
        scale = float(change.abs().max())
        assert scale > 0, name
        worst = float((actual_change - change).abs().max()) / scale
        assert worst < (1e-3 if optimizer == "muon" else 1e-4), f"{name}: {worst:.1e} of the largest change"
