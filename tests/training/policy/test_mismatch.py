"""How far sampling and training are apart in float32, in process: by the compiled pass and by torch's, in batches of
any size, with drafts and a cache. docs/post-training.md has the figures ("Zero mismatch")."""

from __future__ import annotations

import pytest
import torch

from model.generation.generation import InProcessEngine, Sampling
from model.generation.kernel_decoding import kernel_applies
from tasks.training.policy.answer_rows import lay_out, target_log_probabilities
from tasks.training.policy.rollouts import Rollout
from tests.model.test_adapters import ADAPTERS, adapted_model
from tests.model.test_generation import TorchEngine
from tests.support.model_recipes import GLM46, random_model, with_every_expert
from tests.training.policy.test_policy import CPU, prompt_named, reward_of

pytestmark = pytest.mark.usefixtures("clear_routing")
PROMPTS = [[7 + number] * (1 + number % 5) for number in range(9)]
BOUND = 1e-5
"""Of a token's |log p trainer - log p rollout|: some roundings of logits of order 10."""
MODELS = {
    "whole": lambda: random_model(GLM46, std=0.1),
    **{
        name: lambda name=name: adapted_model(with_every_expert(GLM46), ADAPTERS[name], std=0.1)
        for name in ("lora", "dora", "experts only")
    },
}
BATCHES = [(1, False), (4, False), (9, False), (4, True)]
"""Sequences at once, and whether the MTP layer drafts."""


def rollouts_of(model, engine_type, batch_sequences: int, is_speculative: bool) -> list[Rollout]:
    engine = engine_type(model, weights_version="v", batch_sequences=batch_sequences)
    generation = engine.generate(PROMPTS, Sampling(12, 1.0, seed=3, is_speculative=is_speculative), "v")
    columns = zip(PROMPTS, generation.token_ids, generation.sampled_log_probabilities, strict=True)
    return [Rollout(prompt_named("p"), *column, "", reward_of(0.0)) for column in columns]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine_type", [InProcessEngine, TorchEngine])
def test_the_mismatch_is_rounding_in_every_batch_with_drafts_and_cache(engine_type, name):
    """Adapters are trained beside the frozen matrices; the compiled pass samples with them merged in."""
    model = MODELS[name]()
    assert kernel_applies(model)
    by_batch = [rollouts_of(model, engine_type, *batch) for batch in BATCHES]
    likelihoods = [[rollout.log_probabilities for rollout in rollouts] for rollouts in by_batch]
    assert all([rollout.answer_ids for rollout in each] == [own.answer_ids for own in by_batch[0]] for each in by_batch)
    if engine_type is InProcessEngine:
        assert all(each == likelihoods[0] for each in likelihoods), "the compiled pass sums in one order in any batch"
    distances = []
    for rollouts in by_batch:
        rows = lay_out(rollouts, CPU)
        for num_sequences in (2, 9):
            trainer = target_log_probabilities(model, rows, 1.0, num_sequences)
            distances.append(float((trainer - rows.rollout_log_probabilities_BT)[rows.is_answer_BT].abs().max()))
    assert max(distances) < BOUND
    torch.testing.assert_close(
        target_log_probabilities(model, rows, 1.0, 2), target_log_probabilities(model, rows, 1.0, 9), rtol=0, atol=BOUND
    )
