"""Tensor parallelism against one process: losses, expert counts and every gradient, gathered over the ranks."""

import torch

from configs.load import load_scale
from tasks.training.expert_parallel import divide_experts
from tasks.training.ranks import connect_ranks
from tasks.training.shards import gather_whole, shard_of
from tasks.training.tensor_parallel import divide_matrices
from tests.model_recipes import AIR, GLM46, random_model
from tests.parallel_steps import compare, micro_batches, resources_of
from tests.rank_processes import on_ranks

FAMILIES = {"glm46": GLM46, "air": AIR}
ROWS, POSITIONS = 2, 12


def rows(is_segmented: bool) -> dict[str, torch.Tensor]:
    """Two rows of three documents; some targets carry no loss."""
    tokens = torch.randint(GLM46.vocab_size, (ROWS, POSITIONS + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[:, 3::5] = -100
    segments = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [3] * 2 + [4] * 9 + [5]])
    return {
        "token_ids_BT": tokens[:, :-1],
        "target_ids_BT": targets,
        "target_weights_BT": torch.linspace(0.5, 1.5, ROWS * POSITIONS).view(ROWS, POSITIONS),
        "segment_ids_BT" if is_segmented else "mtp_segment_ids_BT": segments,
    }


def losses_and_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    output = model(**batch)
    (output.losses.lm + 0.3 * output.losses.mtp + 0.1 * output.losses.balance).backward()
    return {**{name: loss.detach() for name, loss in output.losses._asdict().items()}, "counts": output.expert_counts_LE}


def compute_divided(rank, num_ranks, cases):
    ranks = connect_ranks(load_scale("micro").phases[0].resources.model_copy(update={"tensor_parallel": num_ranks}))
    found = {}
    for family, is_segmented in cases:
        model = random_model(FAMILIES[family])
        divide_matrices(model, ranks)
        results = losses_and_gradients(model, rows(is_segmented))
        for name, parameter in model.named_parameters():
            if getattr(parameter, "is_partial_over_tensor", False):
                torch.distributed.all_reduce(parameter.grad)
            results[f"{name} gradient"] = gather_whole(parameter.grad, shard_of(parameter), ranks)
            results[f"{name} size"] = parameter.numel()
        found |= {f"{family} {is_segmented} {name}": value for name, value in results.items()}
    return found


def test_losses_counts_and_gradients_are_those_of_one_process(tmp_path):
    num_ranks = 2
    cases = [("glm46", True), ("air", False)]
    by_rank = on_ranks(compute_divided, num_ranks, tmp_path, cases)
    for family, is_segmented in cases:
        model = random_model(FAMILIES[family])
        expected = losses_and_gradients(model, rows(is_segmented))
        divided = 0
        for found in by_rank:
            prefix = f"{family} {is_segmented}"
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[f"{prefix} {name}"], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )
            for name, parameter in model.named_parameters():
                gradient = found[f"{prefix} {name} gradient"]
                scale = float(parameter.grad.abs().max())
                assert float((gradient - parameter.grad).abs().max()) <= 1e-5 * max(scale, 1.0), (family, name, scale)
                divided += found[f"{prefix} {name} size"] * num_ranks == parameter.numel()
        # Attention (four matrices, three biases) and MLP (three) of every layer, eh_proj, embedding, unembedding.
        assert divided == num_ranks * (4 * 10 + 3)


def own_rows(batch, ranks):
    return batch


def compare_steps(rank, num_ranks, cases):
    """Each case: [changes to the resources, optimizer, steps]."""
    for changes, optimizer, num_steps in cases:
        resources = resources_of(num_ranks=num_ranks, **changes)

        def divide(model, ranks, resources=resources):
            divide_matrices(model, ranks)
            divide_experts(model, ranks, is_overlapped=resources.overlap_shared_expert)

        compare(
            connect_ranks(resources), resources, micro_batches(4, 24, is_segmented=True), own_rows, divide, optimizer=optimizer,
            num_steps=num_steps,
        )  # fmt: skip
        print("passed", changes, optimizer, flush=True)
    return {}


def test_steps_beside_other_axes_are_those_of_one_process(tmp_path):
    on_ranks(compare_steps, 4, tmp_path, [
        [{"tensor_parallel": 2}, "sgd", 1],
        [{"tensor_parallel": 2}, "muon", 3],
        [{"tensor_parallel": 2, "zero_stage": 1}, "sgd", 1],
        [{"tensor_parallel": 2, "zero_stage": 1}, "muon", 3],
        [{"tensor_parallel": 2, "zero_stage": 2}, "muon", 3],
        [{"tensor_parallel": 2, "expert_parallel": 2}, "sgd", 1],
        [{"tensor_parallel": 2, "expert_parallel": 4}, "sgd", 1],
    ])  # fmt: skip
