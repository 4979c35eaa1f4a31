"""Routes of a pass: recorded by both ways to decode, and replayed with the outputs and gradients of the model that
chose them."""

from __future__ import annotations

import pytest
import torch

from model.architecture.routes import FREE, recorded_routes, route_differences
from model.generation.generation import InProcessEngine, Sampling
from tests.model.test_generation import PROMPTS, TorchEngine
from tests.support.model_recipes import GLM46, random_model

pytestmark = pytest.mark.usefixtures("clear_routing")
NUM_LAYERS, K = GLM46.num_hidden_layers - GLM46.first_k_dense_replace, GLM46.num_experts_per_tok


def routes_of(model, token_ids_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), recorded_routes(model.trunk_layers) as recorded:
        model.hidden_states(token_ids_BT)
    return torch.stack(recorded).view(NUM_LAYERS, *token_ids_BT.shape, K)


@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("engine_type", [InProcessEngine, TorchEngine])
def test_routes_of_a_generation_are_those_of_one_pass_over_what_was_read(engine_type, is_speculative):
    model = random_model(GLM46)
    engine = engine_type(model, weights_version="v", batch_sequences=3)
    sampling = Sampling(6, 1.0, seed=5, keeps_routes=True, is_speculative=is_speculative)
    generation = engine.generate(PROMPTS, sampling, "v")
    for prompt, answer, kept in zip(PROMPTS, generation.token_ids, generation.routes, strict=True):
        read = torch.tensor([[*prompt, *answer[:-1]]])
        assert kept.shape == (NUM_LAYERS, read.shape[1], K)
        num_different, num_kept = route_differences(routes_of(model, read), kept[:, None])
        is_free = kept == FREE
        assert num_different == 0 and num_kept == kept.numel() - is_free.sum()
        assert not is_free[:-1].any() and not is_free[:, len(prompt) - 1 :].any(), "only the last layer skips a prompt"
    assert engine.generate(PROMPTS, Sampling(6, 1.0, seed=5), "v").routes is None


def test_replayed_routes_give_the_outputs_and_gradients_of_the_model_that_chose_them():
    """The selection bias changes which experts are chosen and nothing else."""
    biased, model = random_model(GLM46), random_model(GLM46)
    draw = torch.Generator().manual_seed(2)
    for layer in biased.trunk_layers[GLM46.first_k_dense_replace :]:
        layer.mlp.gate.e_score_correction_bias.normal_(0.0, 0.3, generator=draw)
    token_ids = torch.randint(GLM46.vocab_size, (2, 9), generator=draw)
    targets = torch.randint(GLM46.vocab_size, (2, 9), generator=draw)
    chosen = routes_of(biased, token_ids)
    num_different, num_routes = route_differences(routes_of(model, token_ids), chosen)
    assert 0.2 < num_different / num_routes < 0.9
    biased.runs_mtp = model.runs_mtp = False
    expected = biased(token_ids, target_ids_BT=targets)
    expected.losses.lm.backward()
    ours = model(token_ids, target_ids_BT=targets, routes_LBTK=chosen.to(torch.int16))
    ours.losses.lm.backward()
    assert torch.equal(ours.losses.lm, expected.losses.lm)
    assert torch.equal(ours.expert_counts_LE, expected.expert_counts_LE)
    others = dict(biased.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, others[name].grad), name
    again = model(token_ids, target_ids_BT=targets)
    assert not torch.equal(again.losses.lm, ours.losses.lm), "given routes serve one pass"
    free = torch.full_like(chosen, FREE)
    assert torch.equal(model(token_ids, target_ids_BT=targets, routes_LBTK=free).losses.lm, again.losses.lm)
