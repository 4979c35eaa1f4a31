"""Layers divided into stages against one process that holds them all: losses, counts, gradients and weights after
steps."""

import torch

from configs.load import load_scale
from tasks.training.loop.training_step import sum_over_ranks
from tasks.training.parallel.expert_parallel import divide_experts
from tasks.training.parallel.gradients import reduce_partial
from tasks.training.parallel.pipeline_parallel import (
    PipelineStage,
    accumulate_in_stages,
    divide_stages,
    next_token_loss_in_stages,
    router_rows,
)
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.recompute import recompute_activations
from tasks.training.parallel.sequence_parallel import own_positions, spread_sequence
from tasks.training.parallel.tensor_parallel import divide_matrices
from tasks.training.parallel.trainable import Trainable
from tasks.training.plan.pipeline_stages import describe_stages, stage_layers
from tests.support.parallel_steps import (
    BALANCE_WEIGHT,
    MTP_WEIGHT,
    build_any_optimizer,
    build_model,
    initialize,
    micro_batches,
    resources_of,
    step_alone,
    whole_weights,
)
from tests.support.rank_processes import on_ranks
from tests.support.router_margins import clear_routing

SEED = 40
"""Of the first step's rows: no expert is chosen by rounding in any step (tests/support/router_margins.py)."""


def compare_stages(rank, num_ranks, cases):
    """Each case: [resources, optimizer, steps]. Rows differ in number of targets; there are more of them than
    stages."""
    names = []
    for changes, optimizer, num_steps in cases:
        resources = resources_of(num_ranks=num_ranks, **changes)
        ranks = connect_ranks(resources)
        reference, model = build_model(), build_model()
        initial = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
        spread_sequence(model, ranks)
        divide_matrices(model, ranks)
        divide_experts(model, ranks, is_overlapped=False)
        divide_stages(model, ranks)
        recompute_activations(model, resources.recompute, resources.recompute_every_layers)
        own_optimizer, alone = build_any_optimizer(model, optimizer), build_any_optimizer(reference, optimizer)
        engine = initialize(PipelineStage(model, ranks), own_optimizer, ranks, resources)
        trainable = Trainable(engine, model, ranks, own_optimizer)
        for step in range(num_steps):
            batches = micro_batches(6, 24, is_segmented=step % 2 == 0, seed=SEED + step, num_gaps=5)
            expected = step_alone(reference, alone, batches)
            rows = [own_positions(batch, ranks) for batch in batches[ranks.data.rank :: ranks.data.size]]
            terms = torch.tensor([[batch.num_lm_targets, batch.num_mtp_targets, batch.num_rows] for batch in rows])
            shares = list(terms / summed(terms.sum(0), ranks.replicas))
            sums, counts = accumulate_in_stages(trainable, rows, shares, (MTP_WEIGHT, BALANCE_WEIGHT))
            reduce_partial(engine, model, ranks)
            engine.step()
            sums, counts = sum_over_ranks(sums, counts, ranks)
            torch.testing.assert_close(sums.float(), expected["losses"], rtol=1e-5, atol=1e-5)
            assert torch.equal(counts, expected["counts"]), (changes, counts, expected["counts"])
            assert len(router_rows(model)) == sum(name.endswith("correction_bias") for name, _ in model.named_buffers())
        batch = batches[0]
        with torch.no_grad(), clear_routing():
            expected_loss = reference(batch.token_ids_BT, **batch.model_arguments).losses.lm * batch.num_lm_targets
        part = own_positions(batch, ranks)
        actual_loss = summed(next_token_loss_in_stages(trainable, part) * part.num_lm_targets, ranks.context)
        torch.testing.assert_close(summed(actual_loss, ranks.pipeline), expected_loss, rtol=1e-4, atol=1e-4)
        weights = whole_weights(model, ranks)
        for name, actual in weights.items():
            change = reference.get_parameter(name).detach() - initial[name]
            worst = float((actual - initial[name] - change).abs().max() / change.abs().max())
            assert worst < (1e-3 if optimizer == "muon" else 1e-4), (
                f"{changes} {name}: {worst:.1e} of the largest change"
            )
        names.append("|".join(weights))
        print("passed", changes, optimizer, flush=True)
    return {"names": names}


def summed(values, axis):
    if axis.group is not None:
        torch.distributed.all_reduce(values, group=axis.group)
    return values


def assert_every_parameter_is_on_one_stage(by_rank, num_stages):
    every = sorted(name for name, _ in build_model().named_parameters())
    per_stage = len(by_rank) // num_stages
    for case in range(len(by_rank[0]["names"])):
        stages = [by_rank[stage * per_stage]["names"][case].split("|") for stage in range(num_stages)]
        assert sorted(name for names in stages for name in names) == every


def test_three_stages_of_one_layer_each(tmp_path):
    stages = {"pipeline_parallel": 3}
    by_rank = on_ranks(
        compare_stages,
        3,
        tmp_path,
        [
            [stages | {"zero_stage": 0}, "sgd", 1],
            [stages | {"zero_stage": 0, "recompute": "full"}, "muon", 3],
            [stages | {"zero_stage": 1}, "muon", 3],
        ],
    )
    assert_every_parameter_is_on_one_stage(by_rank, 3)


def test_two_stages_beside_other_axes(tmp_path):
    stages = {"pipeline_parallel": 2}
    by_rank = on_ranks(
        compare_stages,
        4,
        tmp_path,
        [
            [stages | {"zero_stage": 0}, "sgd", 1],
            [stages | {"zero_stage": 1}, "sgd", 1],
            [stages | {"zero_stage": 1}, "muon", 3],
            [stages | {"zero_stage": 1, "recompute": "selective"}, "muon", 3],
        ],
    )
    assert_every_parameter_is_on_one_stage(by_rank, 2)


def test_two_stages_whose_ranks_divide_layers(tmp_path):
    stages = {"pipeline_parallel": 2}
    by_rank = on_ranks(
        compare_stages,
        4,
        tmp_path,
        [
            [stages | {"tensor_parallel": 2, "zero_stage": 0}, "sgd", 1],
            [stages | {"tensor_parallel": 2, "zero_stage": 1}, "muon", 2],
            [stages | {"context_parallel": 2, "zero_stage": 0}, "sgd", 1],
            [stages | {"context_parallel": 2, "zero_stage": 1}, "muon", 2],
            [stages | {"expert_parallel": 2, "zero_stage": 0}, "sgd", 1],
            [stages | {"expert_parallel": 2, "zero_stage": 1}, "muon", 2],
        ],
    )
    assert_every_parameter_is_on_one_stage(by_rank, 2)


def test_stages_are_as_equal_as_whole_layers_allow():
    recipe = load_scale("full").model.recipe
    for num_layers, num_stages in ((92, 8), (92, 16), (46, 4), (46, 5), (7, 7), (5, 2)):
        recipe = recipe.model_copy(update={"num_hidden_layers": num_layers})
        stages = stage_layers(recipe, num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        sums = [len(stage) for stage in stages]
        sums[0] += 1
        sums[-1] += 1 + 2 * recipe.num_nextn_predict_layers
        # No layer could move to another stage and make the fullest one less full.
        assert max(sums) - min(sums) <= 1 or any(
            len(stage) == 1 and total == max(sums) for stage, total in zip(stages, sums, strict=True)
        )
    assert describe_stages(recipe.model_copy(update={"num_hidden_layers": 92}), 8) == "11 + 6 x 12 + 9"
