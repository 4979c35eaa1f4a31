"""What the harness may ask of our engine beside multiple choice, against the engine asked without it."""

from __future__ import annotations

import pytest
from lm_eval.api.instance import Instance

from model.generation.generation import Generation, InProcessEngine, Sampling
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.evaluation.engine import document_token_ids, end_token_ids
from tasks.evaluation.harness import EngineModel
from tests.support.evaluation_fakes import DOCUMENTS, toy_model, toy_tokenizer

LENGTH = 24


@pytest.fixture(scope="module")
def model():
    engine = InProcessEngine(toy_model("trained"), weights_version="v", batch_sequences=2)
    return EngineModel(
        engine, toy_tokenizer(), LENGTH, "v", lambda progress: None, starts_documents=True, enable_thinking=False
    )


def asked(*arguments):
    return [Instance("loglikelihood_rolling", {}, each, index) for index, each in enumerate(arguments)]


def test_a_whole_text_is_scored_token_by_token_in_windows_that_end_with_a_full_one(model):
    texts = ["", "The fox.", *DOCUMENTS.values()]
    found = model.loglikelihood_rolling(asked(*((text,) for text in texts)))
    for text, total in zip(texts, found, strict=True):
        row, expected = document_token_ids(toy_tokenizer(), text), 0.0
        for index in range(1, len(row)):
            end = min(-(-index // LENGTH) * LENGTH, len(row) - 1)
            expected += model.engine.score([row[max(0, end - LENGTH) : index + 1]])[0][-1]
        assert total == pytest.approx(expected, abs=1e-3), text
    assert found[0] == 0 and len(row) > 2 * LENGTH, "none of no tokens, and one of more than two windows"


def test_a_text_as_long_as_the_model_has_positions_is_scored():
    engine = InProcessEngine(toy_model("trained"), weights_version="v", batch_sequences=2)
    limit = engine.model.recipe.max_position_embeddings
    model = EngineModel(
        engine, toy_tokenizer(), limit, "v", lambda progress: None, starts_documents=True, enable_thinking=False
    )
    text = DOCUMENTS["web"] * 40
    assert len(model.tok_encode(text)) > limit
    assert model.loglikelihood_rolling(asked((text,)))[0] < 0


def test_generation_ends_where_a_stop_text_is_complete_and_not_before(model, monkeypatch):
    """A text over several tokens too; of two prompts in a batch each ends by itself."""
    contexts, drawn = ["The quick brown fox", "add(first"], []
    generate = model.engine.generate

    def recorded(*given):
        drawn[:] = generate(*given).token_ids
        return Generation(drawn, [], [], [], "v")

    monkeypatch.setattr(model.engine, "generate", recorded)
    whole = model.generate_until(asked(*((context, {"max_gen_toks": 12}) for context in contexts)))
    tokens = [list(each) for each in drawn]
    stop = whole[0][5:9]
    assert stop and stop not in whole[1]
    cut = model.generate_until(asked(*((context, {"max_gen_toks": 12, "until": [stop]}) for context in contexts)))
    assert cut == [whole[0].split(stop)[0], whole[1]] and drawn[1] == tokens[1]
    assert len(drawn[0]) < len(tokens[0]) and drawn[0] == tokens[0][: len(drawn[0])]
    texts = [model.bpe.decode(part, skip_special_tokens=True) for part in (drawn[0], drawn[0][:-1])]
    assert stop in texts[0] and stop not in texts[1]


def test_a_continuation_is_the_engines_up_to_the_first_stop_string(model):
    tokenizer, wanted = model.bpe, {"max_gen_toks": 12}
    contexts = ["The quick brown fox", DOCUMENTS["web"]]
    answers = model.generate_until(asked(*((context, wanted) for context in contexts)))
    for context, answer in zip(contexts, answers, strict=True):
        prompt = document_token_ids(tokenizer, context)[-(LENGTH - 12) :]
        drawn = model.engine.generate([prompt], Sampling(12, stop_token_ids=end_token_ids(tokenizer)), "v")
        assert answer == tokenizer.decode(drawn.token_ids[0], skip_special_tokens=True) and len(answer) > 4
    stop = answers[0][3:5]
    (cut,) = model.generate_until(asked((contexts[0], wanted | {"until": [stop, END_OF_TEXT]})))
    assert cut == answers[0].split(stop)[0] != answers[0]
    sampled = {"do_sample": True, "temperature": 5.0}
    (drawn,) = model.generate_until(asked((contexts[0], wanted | sampled)))
    assert drawn != answers[0]
    with pytest.raises(ValueError, match=r"max_gen_toks \(24\) must be below 24: lower it"):
        model.generate_until(asked((contexts[0], {"max_gen_toks": LENGTH})))


def test_a_choice_that_is_longer_than_a_row_is_refused(model):
    fitting, longer = list(range(3, 3 + LENGTH)), list(range(3, 4 + LENGTH))
    context = [5, 6, 7]
    ((found, _),) = model._loglikelihood_tokens([("", context, fitting)])
    score = model.engine.score_continuations([(context[-1:], fitting)])[0]
    assert found == pytest.approx(score.log_probability, abs=1e-5)
    with pytest.raises(ValueError, match=rf"a choice has {LENGTH + 1} tokens, a row of evaluation {LENGTH}: raise"):
        model._loglikelihood_tokens([("", context, longer)])
