"""Cached, batched generation and scoring against plain recomputation, by torch and by the compiled pass."""

import copy

import pytest
import torch

from model.architecture.kv_cache import KVCache
from model.architecture.transformer import Glm4Moe
from model.generation import kernel_decoding
from model.generation.decoding import Decoding, TorchDecoding
from model.generation.generation import Generation, InProcessEngine, NonFiniteLogitsError, Sampling, choose_tokens
from model.generation.kernel_decoding import KernelDecoding, KernelWeights, kernel_applies
from model.kernels import decoding_kernel, native_library
from tests.support.model_recipes import AIR, GLM46, random_model, with_every_expert
from tests.support.tolerances import CLOSE_FLOAT32

pytestmark = pytest.mark.usefixtures("clear_routing")

PROMPTS = [[5, 9, 200], [17], [300, 2, 4, 8, 16, 32, 64], [1, 2]]


class TorchEngine(InProcessEngine):
    """By the model's own forward pass, where the compiled one would be chosen."""

    def _start(self, num_sequences: int, max_tokens: int, keeps_routes: bool = False) -> Decoding:
        return TorchDecoding(self.model, num_sequences, max_tokens, keeps_routes=keeps_routes)


@pytest.fixture(scope="module", params=[InProcessEngine, TorchEngine], ids=["compiled", "torch"])
def engine(request: pytest.FixtureRequest) -> InProcessEngine:
    return request.param(random_model(GLM46), weights_version="v1", batch_sequences=3)


def continue_by_recomputation(
    engine: InProcessEngine, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
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
    cache = KVCache(
        recipe, 2, 20, layers=range(recipe.num_hidden_layers), dtype=torch.float32, device=torch.device("cpu")
    )
    pieces = [model(tokens[:, start:end], cache=cache).logits_BTV for start, end in ((0, 7), (7, 8), (8, 20))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens).logits_BTV, **CLOSE_FLOAT32)


def test_generation_log_probabilities_equal_scores(engine: InProcessEngine) -> None:
    generation = engine.generate(PROMPTS, Sampling(max_new_tokens=6, temperature=1.5, top_p=0.9, seed=3), "v1")
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, generation.token_ids, strict=True)]
    for scores, log_probabilities in zip(engine.score(sequences), generation.log_probabilities, strict=True):
        assert scores[-6:] == pytest.approx(log_probabilities, abs=1e-3)


def test_scores_equal_log_softmax_of_each_sequence_by_itself(engine: InProcessEngine) -> None:
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
    first, second, third = (
        engine.generate(PROMPTS, Sampling(16, temperature=5.0, seed=seed), "v1").token_ids for seed in (1, 1, 2)
    )
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
def test_sampled_log_probabilities_are_those_of_the_tempered_distribution(
    temperature: float, engine: InProcessEngine
) -> None:
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
    kept = {
        p: set(choose_tokens(logits, Sampling(1, temperature=1.0, top_p=p), draws).tolist())
        for p in (0.4, 0.79, 0.9, 1.0)
    }
    assert kept == {0.4: {0}, 0.79: {0, 1}, 0.9: {0, 1, 2}, 1.0: {0, 1, 2, 3}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda engine: engine.generate([[1]], Sampling(4), "v2"),
            "weights version 'v2' was asked for, this engine holds 'v1'",
        ),
        (lambda engine: engine.generate([[1], []], Sampling(4), "v1"), "prompt 1 is empty"),
        (
            lambda engine: engine.generate([[1] * 500], Sampling(20), "v1"),
            r"520 positions .* exceed max_position_embeddings \(512\)",
        ),
        (lambda engine: engine.score([[1] * 513]), r"513 tokens exceeds max_position_embeddings \(512\)"),
        (lambda engine: Sampling(4, temperature=-1.0), "temperature must be 0"),
        (lambda engine: Sampling(4, top_p=0.0), "top_p must be in"),
        (lambda engine: Sampling(0), "max_new_tokens must be at least 1"),
    ],
    ids=["version", "empty", "long_prompt", "long_score", "temperature", "top_p", "max_new_tokens"],
)
def test_what_cannot_be_generated_is_refused(call, message: str, engine: InProcessEngine) -> None:
    with pytest.raises(ValueError, match=message):
        call(engine)


def test_the_compiled_pass_is_chosen_for_whole_float32_weights_on_a_cpu() -> None:
    model = random_model(GLM46)
    assert isinstance(InProcessEngine(model, weights_version="v", batch_sequences=1)._start(1, 4), KernelDecoding)
    half = copy.deepcopy(model).bfloat16()
    assert isinstance(InProcessEngine(half, weights_version="v", batch_sequences=1)._start(1, 4), TorchDecoding)
    model.lm_head.weight.shard = "a part"  # pyright: ignore[reportAttributeAccessIssue]
    assert not kernel_applies(model)


ODD = AIR.model_copy(
    update={
        "vocab_size": 331,
        "hidden_size": 72,
        "intermediate_size": 84,
        "moe_intermediate_size": 20,
        "head_dim": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "n_shared_experts": 0,
        "norm_topk_prob": False,
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "attention_bias": False,
    }
)
"""Nothing is a multiple of the kernel's panels, and every option of a layer is the other one."""


@pytest.mark.parametrize(("recipe", "seed"), [(GLM46, 41), (AIR, 19), (ODD, 10)], ids=["glm46", "air", "odd"])
def test_the_compiled_pass_equals_the_models_own(recipe, seed: int) -> None:
    model = random_model(recipe, seed, std=0.1)
    prompts = torch.randint(0, recipe.vocab_size, (9, 30), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [prompt[: 30 - 3 * index] for index, prompt in enumerate(prompts)]
    for sampling in (Sampling(10), Sampling(10, temperature=1.3, seed=2)):
        by_torch, compiled = (
            each(model, weights_version="v", batch_sequences=9).generate(prompts, sampling, "v")
            for each in (TorchEngine, InProcessEngine)
        )
        assert compiled.token_ids == by_torch.token_ids
        for column in ("log_probabilities", "sampled_log_probabilities", "top2_margins"):
            for own, reference in zip(getattr(compiled, column), getattr(by_torch, column), strict=True):
                assert own == pytest.approx(reference, abs=1e-3), column


def test_neither_chunks_nor_threads_nor_batches_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = random_model(GLM46), Sampling(12, temperature=2.0, seed=4)
    expected = InProcessEngine(model, weights_version="v", batch_sequences=8).generate(PROMPTS, sampling, "v")
    assert InProcessEngine(model, weights_version="v", batch_sequences=1).generate(PROMPTS, sampling, "v") == expected
    monkeypatch.setattr(kernel_decoding, "TOKENS_PER_PASS", 2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert (
            InProcessEngine(model, weights_version="v", batch_sequences=3).generate(PROMPTS, sampling, "v") == expected
        )
    finally:
        torch.set_num_threads(threads)


def test_bfloat16_values_are_packed_in_bfloat16_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(GLM46).bfloat16().float()
    packed = KernelWeights(model)
    assert packed.structure.is_half and not KernelWeights(random_model(GLM46)).structure.is_half
    # 40 rows: the panels of the head are widened once for all of them, those of most experts for each row block.
    prompts = [[number] for number in range(40)]
    half = InProcessEngine(model, weights_version="v", batch_sequences=40).generate(prompts, Sampling(4), "v")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self + 1)
    wide = InProcessEngine(model, weights_version="v", batch_sequences=40)
    assert wide.generate(prompts, Sampling(4), "v") == half
    assert wide._packed is not None and not wide._packed.structure.is_half


def test_changed_weights_are_packed_again() -> None:
    engine = InProcessEngine(random_model(GLM46), weights_version="v", batch_sequences=4)
    engine.generate(PROMPTS, Sampling(6), "v")
    with torch.no_grad():
        engine.model.lm_head.weight.neg_()
    renewed = engine.generate(PROMPTS, Sampling(6), "v")
    assert renewed == InProcessEngine(engine.model, weights_version="v", batch_sequences=4).generate(
        PROMPTS, Sampling(6), "v"
    )


def test_generation_reaches_the_last_position(engine: InProcessEngine) -> None:
    model = random_model(GLM46.model_copy(update={"max_position_embeddings": 64}), seed=9)
    short = type(engine)(model, weights_version="v1", batch_sequences=3)
    prompt = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    assert (
        short.generate([prompt, [1]], Sampling(4), "v1").token_ids[0] == continue_by_recomputation(short, prompt, 4)[0]
    )


def test_torch_prefill_in_chunks_of_uneven_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(random_model(GLM46), weights_version="v", batch_sequences=4)
    expected = engine.generate(PROMPTS, Sampling(5, is_speculative=True), "v")
    monkeypatch.setattr("model.generation.decoding.POSITIONS_PER_PASS", 3)
    assert engine.generate(PROMPTS, Sampling(5, is_speculative=True), "v").token_ids == expected.token_ids


def test_broken_weights_generate_nothing(engine: InProcessEngine) -> None:
    broken = copy.deepcopy(engine.model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        type(engine)(broken, weights_version="v", batch_sequences=4).generate(
            PROMPTS, Sampling(4, temperature=1.0), "v"
        )


def predictable_model(recipe) -> Glm4Moe:
    """Trained for a few steps on rows in which a token is most often followed by its successor: drafts hit at times, at
    times not."""
    model = Glm4Moe(recipe)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        steps = torch.where(
            torch.rand(8, 33, generator=generator) < 0.8, 1, torch.randint(0, 32, (8, 33), generator=generator)
        )
        rows = steps.cumsum(1) % 32
        losses = model(rows[:, :-1], target_ids_BT=rows[:, 1:]).losses
        assert losses is not None
        optimizer.zero_grad()
        (losses.lm + losses.mtp).backward()
        optimizer.step()
    return model.requires_grad_(False)


def drafts_by_recomputation(model: Glm4Moe, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """How many tokens are drafted and accepted on the way to this answer, by one pass of the MTP layer over all of
    it."""
    token_ids = torch.tensor([prompt + answer])
    embedded, hidden = model.model.embed_tokens(token_ids), model.hidden_states(token_ids)
    expected = model.lm_head(model.run_mtp(embedded, hidden, None).hidden_BTD)[0].argmax(-1).tolist()
    num_known, num_drafted, num_accepted = 1, 0, 0
    while num_known + 2 <= len(answer):
        is_hit = expected[len(prompt) + num_known - 2] == answer[num_known]
        num_drafted, num_accepted, num_known = num_drafted + 1, num_accepted + is_hit, num_known + 1 + is_hit
    return num_drafted, num_accepted


@pytest.mark.parametrize("recipe", [GLM46, AIR], ids=["glm46", "air"])
def test_drafts_change_no_token(recipe) -> None:
    model = predictable_model(with_every_expert(recipe))
    for kind in (InProcessEngine, TorchEngine):
        engine = kind(model, weights_version="v", batch_sequences=3)
        for temperature in (0.0, 1.0):
            plain, drafted = (
                engine.generate(PROMPTS, Sampling(24, temperature, seed=5, is_speculative=drafts), "v")
                for drafts in (False, True)
            )
            assert drafted.token_ids == plain.token_ids
            for own, reference in zip(drafted.log_probabilities, plain.log_probabilities, strict=True):
                assert own == pytest.approx(reference, abs=1e-4)
            counts = [
                drafts_by_recomputation(model, prompt, answer)
                for prompt, answer in zip(PROMPTS, plain.token_ids, strict=True)
            ]
            assert [*zip(drafted.drafted, drafted.accepted, strict=True)] == counts
            assert drafted.acceptance_rate == drafted.num_accepted / drafted.num_drafted
            # At temperature 1 some are refused, and not as many in each row.
            assert drafted.num_accepted > 0 and (temperature == 0 or len(set(counts)) > 1)


def test_drafts_of_a_random_model_and_stop_tokens_change_nothing(engine: InProcessEngine) -> None:
    free = engine.generate(PROMPTS, Sampling(20), "v1")
    for stops in ((), (free.token_ids[0][3], free.token_ids[2][6])):
        plain, drafted = (
            engine.generate(PROMPTS, Sampling(20, stop_token_ids=stops, is_speculative=each), "v1")
            for each in (False, True)
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.num_drafted > 0 and plain.num_drafted == 0


def test_drafts_need_an_mtp_layer() -> None:
    model = random_model(GLM46.model_copy(update={"num_nextn_predict_layers": 0}))
    engine = InProcessEngine(model, weights_version="v", batch_sequences=1)
    assert isinstance(engine.generate([[1]], Sampling(2), "v"), Generation)
    with pytest.raises(ValueError, match="speculative generation needs an MTP layer"):
        engine.generate([[1]], Sampling(2, is_speculative=True), "v")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"no C\+\+ compiler no-such-compiler on PATH for decoding_kernel\.cpp"):
        native_library.load_library.__wrapped__(decoding_kernel.SOURCE)


def test_rows_that_fit_by_themselves_fit_together():
    """In a tool episode a long row has few tokens left to choose, and a short one many."""
    model = random_model(GLM46.model_copy(update={"max_position_embeddings": 64}))
    rows, draws = ([1] * 60, [1] * 10), ([0.5] * 4, [0.5] * 20)
    sampling = Sampling(20, 1.0)
    for batch in (1, 2):
        engine = InProcessEngine(model, weights_version="", batch_sequences=batch)
        answers = engine.generate(rows, sampling, "", draws).token_ids
        assert [len(answer) for answer in answers] == [4, 20]
