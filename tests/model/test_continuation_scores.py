"""Scores with shared beginnings, against one pass per pair over the model's own logits."""

from __future__ import annotations

import pytest
import torch

from model.generation.continuation_scores import MIN_SHARED_TOKENS, score_continuations
from model.generation.generation import InProcessEngine
from tests.support.evaluation_fakes import VOCAB_SIZE, toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model("trained").eval()


def rows(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("batch_sequences", [1, 3, 64])
def test_scores_equal_one_pass_per_pair(model, batch_sequences):
    shots, other = rows(1, MIN_SHARED_TOKENS + 9, MIN_SHARED_TOKENS + 4)
    contexts = [shots + rest for rest in rows(2, 1, 5, 12, 3)] + [other + rest for rest in rows(3, 2, 7)]
    contexts += [*rows(4, 1, 2, 30), shots]
    pairs = [(context, end) for number, context in enumerate(contexts) for end in rows(10 + number, 1, 4, 2)]
    greedy = InProcessEngine(model, weights_version="v", batch_sequences=1)
    for context in contexts:
        with torch.inference_mode():
            best = int(model(torch.tensor([context])).logits_BTV[0, -1].argmax())
        pairs.append((context, [best]))
    found = score_continuations(model, pairs, batch_sequences)
    for (context, continuation), score in zip(pairs, found, strict=True):
        (expected,) = greedy.score([[*context, *continuation]])
        assert score.log_probability == pytest.approx(sum(expected[-len(continuation) :]), abs=1e-4)
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*context, *continuation[:-1]]])).logits_BTV[0, len(context) - 1 :]
        assert score.is_greedy == (logits_TV.argmax(-1).tolist() == continuation)
    assert sum(score.is_greedy for score in found) >= len(contexts)


def test_a_pair_beyond_the_positions_is_refused_with_both_numbers(model):
    limit = model.recipe.max_position_embeddings
    score_continuations(model, [(rows(1, limit)[0], [3])], 1)
    with pytest.raises(ValueError, match=rf"a context of {limit} and a continuation of 2 tokens exceed .*\({limit}\)"):
        score_continuations(model, [(rows(1, limit)[0], [3, 4])], 1)
