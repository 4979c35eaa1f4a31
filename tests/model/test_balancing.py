"""Loss-free balancing against three failures of public trainers: counts in bfloat16 (Megatron-LM #7081), counts doubled
where activations are computed again (torchtitan #1593), a bias that moves with every micro-batch (torchtitan #1304)."""

import pytest
import torch
from torch import Tensor

from configs.schema import RouterBiasRule
from model.architecture.moe import Router, update_router_bias
from model.architecture.transformer import Glm4Moe
from tasks.training.parallel.recompute import recompute_activations
from tests.support.model_recipes import GLM46, random_model

RATE = 0.001


def routers_of(model: Glm4Moe) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def biases_of(model: Glm4Moe) -> Tensor:
    return torch.stack([router.e_score_correction_bias for router in routers_of(model)]).clone()


def count_selections(model: Glm4Moe) -> Tensor:
    """Filled with what every router selects in its first pass over each batch, (L, E)."""
    routers = routers_of(model)
    counted_LE = torch.zeros(len(routers), GLM46.n_routed_experts, dtype=torch.int64)

    def hook_of(layer: int):
        def count(_router: Router, _inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
            if not torch._C._current_graph_task_id() >= 0:  # not inside a backward pass
                counted_LE[layer] += torch.bincount(output[0].flatten(), minlength=GLM46.n_routed_experts)

        return count

    for layer, router in enumerate(routers):
        router.register_forward_hook(hook_of(layer))
    return counted_LE


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_moves_once_per_step_by_exact_counts_of_all_micro_batches(dtype: torch.dtype, recompute: str) -> None:
    model = random_model(GLM46).to(dtype)
    recompute_activations(model, recompute, 2)
    selected_LE = count_selections(model)
    before = biases_of(model)
    tokens = torch.randint(0, GLM46.vocab_size, (3, 301), generator=torch.Generator().manual_seed(1))
    counts_LE = torch.zeros_like(selected_LE)
    for row in tokens.split(1):
        output = model(row[:, :-1], target_ids_BT=row[:, 1:])
        assert output.losses is not None
        sum(output.losses).backward()
        counts_LE += output.expert_counts_LE
        assert torch.equal(biases_of(model), before), "a micro-batch moved the bias"
    assert torch.equal(counts_LE, selected_LE)
    assert counts_LE.max() > 256, "more than bfloat16 counts"
    update_router_bias(model, counts_LE, RATE)
    direction = (selected_LE.double().mean(-1, keepdim=True) - selected_LE).sign().float()
    assert torch.equal(biases_of(model), before + RATE * direction)


def test_by_the_other_rule_a_bias_moves_by_the_imbalance_and_stays_within_its_bound() -> None:
    """S1: bias -= rate * (count / mean - 1), within 5 in both directions."""
    model = Glm4Moe(GLM46)
    counts_LE = torch.randint(0, 100, (3, 8), generator=torch.Generator().manual_seed(2))
    counts_LE[2] = 0  # no token: an MTP layer that did not run
    expected_LE = [[0.0] * 8 for _ in range(3)]
    for rate in (0.5, 0.5, 12.0):
        update_router_bias(model, counts_LE, rate, RouterBiasRule(kind="ratio", max_bias=5.0))
        for layer, counts in enumerate(counts_LE.tolist()):
            mean = sum(counts) / 8
            for expert, count in enumerate(counts):
                moved = expected_LE[layer][expert] - (rate * (count / mean - 1) if mean else 0.0)
                expected_LE[layer][expert] = min(max(moved, -5.0), 5.0)
        torch.testing.assert_close(biases_of(model), torch.tensor(expected_LE))
    assert biases_of(model).abs().max() == 5.0 and not biases_of(model)[2].any()


def test_counts_that_bfloat16_would_round_over_the_mean_move_the_right_way() -> None:
    # Of two ranks; bfloat16 holds 20,420 as 20,480, so it would see expert 0 above the mean of 20,448, not below.
    of_ranks = [torch.full((3, 8), 20_452, dtype=torch.int64) for _ in range(2)]
    for counts_LE in of_ranks:
        counts_LE[:, 0] = 20_420
    rounded = torch.stack([counts_LE.bfloat16() for counts_LE in of_ranks]).sum(0)
    assert (rounded[0, 0] - rounded[0].float().mean()).sign() >= 0
    model = Glm4Moe(GLM46)
    update_router_bias(model, of_ranks[0] + of_ranks[1], RATE)
    torch.testing.assert_close(biases_of(model)[0], torch.tensor([RATE] + [-RATE] * 7))
    with pytest.raises(AssertionError):
        update_router_bias(model, rounded, RATE)
