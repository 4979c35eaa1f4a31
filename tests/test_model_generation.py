"""Cached, batched generation and scoring against plain recomputation."""

import pytest
import torch

from model.generation import InProcessEngine, Sampling, choose_tokens
from model.kv_cache import KVCache
from tests.model_recipes import AIR, GLM46, random_model

PROMPTS = [[5, 9, 200], [17], [300, 2, 4, 8, 16, 32, 64], [1, 2]]


@pytest.fixture(scope="module")
def engine() -> InProcessEngine:
    return InProcessEngine(random_model(GLM46), weights_version="v1", batch_sequences=3)


def continue_by_recomputation(engine: InProcessEngine, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    tokens, margins = list(prompt), []
    for _ in range(num_tokens):
        logits = engine.model(torch.tensor([tokens])).logits_BTV[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margins


def test_batched_cached_generation_equals_recomputation(engine: InProcessEngine) -> None:
    generation = engine.generate(PROMPTS, Sampling(max_new_tokens=12), "v1")
    for prompt, token_ids, margins in zip(PROMPTS, generation.token_ids, generation.top2_margins, strict=True):
        expected, expected_margins = continue_by_recomputation(engine, prompt, 12)
        assert token_ids == expected
        assert margins == pytest.approx(expected_margins, abs=1e-3)


@pytest.mark.parametrize("recipe", [GLM46, AIR], ids=["glm46", "air"])
def test_prefill_in_chunks_equals_one_pass(recipe) -> None:
    model = random_model(recipe)
    tokens = torch.randint(0, recipe.vocab_size, (2, 20), generator=torch.Generator().manual_seed(3))
    cache = KVCache(recipe, 2, 20, layers=range(recipe.num_hidden_layers), dtype=torch.float32, device=torch.device("cpu"))
    pieces = [model(tokens[:, start:end], cache=cache).logits_BTV for start, end in ((0, 7), (7, 8), (8, 20))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens).logits_BTV, rtol=1e-4, atol=1e-4)


def test_generation_log_probabilities_equal_scores(engine: InProcessEngine) -> None:
    generation = engine.generate(PROMPTS, Sampling(max_new_tokens=6, temperature=1.5, top_p=0.9, seed=3), "v1")
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, generation.token_ids, strict=True)]
    for scores, log_probabilities in zip(engine.score(sequences), generation.log_probabilities, strict=True):
        assert scores[-6:] == pytest.approx(log_probabilities, abs=1e-3)


def test_scores_equal_log_softmax_of_each_sequence_alone(engine: InProcessEngine) -> None:
    sequences = [*PROMPTS, []]
    for sequence, scores in zip(sequences, engine.score(sequences), strict=True):
        if len(sequence) < 2:
            assert scores == []
            continue
        logits = engine.model(torch.tensor([sequence])).logits_BTV[0].log_softmax(-1)
        expected = [float(logits[position, token]) for position, token in enumerate(sequence[1:])]
        assert scores == pytest.approx(expected, abs=1e-3)


def test_a_stop_token_ends_its_own_sequence_only(engine: InProcessEngine) -> None:
    free = engine.generate(PROMPTS, Sampling(max_new_tokens=12), "v1").token_ids
    stop = free[0][2]
    for before, after in zip(
        free, engine.generate(PROMPTS, Sampling(max_new_tokens=12, stop_token_ids=(stop,)), "v1").token_ids, strict=True
    ):
        assert after == (before[: before.index(stop) + 1] if stop in before else before)


def test_sampling_repeats_with_its_seed_and_only_then(engine: InProcessEngine) -> None:
    first, second, third = (engine.generate(PROMPTS, Sampling(16, temperature=5.0, seed=seed), "v1").token_ids for seed in (1, 1, 2))
    assert first == second != third


def test_draws_fall_on_tokens_as_often_as_these_are_probable() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2, 0.0])
    draws = torch.linspace(0, 1, 10_001)[:-1]
    chosen = choose_tokens(probabilities.log().expand(len(draws), 6), Sampling(1, temperature=1.0), draws)
    torch.testing.assert_close(chosen.bincount(minlength=6) / len(draws), probabilities, rtol=0.0, atol=2e-4)


def test_the_size_of_a_batch_samples_nothing_else(engine: InProcessEngine) -> None:
    sampling = Sampling(16, temperature=5.0, seed=1)
    one_by_one = InProcessEngine(engine.model, weights_version="v1", batch_sequences=1)
    assert one_by_one.generate(PROMPTS, sampling, "v1").token_ids == engine.generate(PROMPTS, sampling, "v1").token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
def test_sampled_log_probabilities_are_those_of_the_tempered_distribution(temperature: float, engine: InProcessEngine) -> None:
    generation = engine.generate([PROMPTS[0]], Sampling(5, temperature=temperature, seed=3), "v1")
    sequence = torch.tensor([PROMPTS[0] + generation.token_ids[0]])
    logits = engine.model(sequence[:, :-1]).logits_BTV[0, -5:].float() / (temperature or 1.0)
    expected = logits.log_softmax(-1).gather(1, sequence[0, -5:, None])[:, 0]
    assert generation.sampled_log_probabilities[0] == pytest.approx(expected.tolist(), abs=1e-3)


def test_broken_weights_sample_nothing() -> None:
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        choose_tokens(torch.full((1, 4), torch.nan), Sampling(1, temperature=1.0), torch.zeros(1))


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(500, 4)
    draws = torch.rand(500, generator=torch.Generator().manual_seed(0))
    kept = {p: set(choose_tokens(logits, Sampling(1, temperature=1.0, top_p=p), draws).tolist()) for p in (0.4, 0.79, 0.9, 1.0)}
    assert kept == {0.4: {0}, 0.79: {0, 1}, 0.9: {0, 1, 2}, 1.0: {0, 1, 2, 3}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.generate([[1]], Sampling(4), "v2"), "weights version 'v2' was asked for, this engine holds 'v1'"),
        (lambda engine: engine.generate([[1], []], Sampling(4), "v1"), "prompt 1 is empty"),
        (lambda engine: engine.generate([[1] * 500], Sampling(20), "v1"), r"520 positions .* exceed max_position_embeddings \(512\)"),
        (lambda engine: engine.score([[1] * 513]), r"513 tokens exceeds max_position_embeddings \(512\)"),
        (lambda engine: Sampling(4, temperature=-1.0), "temperature must be 0"),
        (lambda engine: Sampling(4, top_p=0.0), "top_p must lie"),
        (lambda engine: Sampling(0), "max_new_tokens must be at least 1"),
    ],
    ids=["version", "empty", "long_prompt", "long_score", "temperature", "top_p", "max_new_tokens"],
)
def test_what_cannot_be_generated_is_refused(call, message: str, engine: InProcessEngine) -> None:
    with pytest.raises(ValueError, match=message):
        call(engine)
