"""Evaluation against a naive oracle: every token's log-probability from one plain forward pass."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.files.stored_files import given_file
from infra.home import Home
from infra.step import Progress
from infra.storage.open_store import open_store
from model.formats.hf_checkpoint import ROUTER_BIAS, load_model
from model.generation.sampling import Sampling
from tasks.data.records.documents import REPOSITORY, document_id
from tasks.evaluation import held_out_documents as held_out_module
from tasks.evaluation.engine import document_token_ids, load_engine, load_tokenizer
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.evaluation.held_out_documents import CHARS_PER_TOKEN, held_out_documents
from tasks.evaluation.items import (
    ARITHMETIC,
    CHAT_PROBLEM,
    CHOICE,
    DOCUMENT,
    FAR,
    SAFETY,
    TASK,
    accuracy,
    bits_per_byte,
    read_items,
)
from tasks.evaluation.select_evaluation_items import _choose_documents
from tasks.evaluation.suite import Question, read_suite
from tests.support.data_inputs import RESOURCES
from tests.support.evaluation_fakes import (
    BENCHMARK,
    DOCUMENTS,
    EVALUATION_RESOURCES,
    RECIPE,
    checkpoint,
    commit,
    evaluation_suite,
    split_documents_rows,
    toy_tokenizer,
)
from tests.support.toy_steps import local_output


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("evaluation"))
    return open_store(None, home)


def evaluation_of(store, name, batch_sequences=4, recipe=RECIPE, num_tasks=0):
    resources = EVALUATION_RESOURCES.model_copy(update={"batch_sequences": batch_sequences})
    return commit(
        store,
        evaluate_checkpoint,
        checkpoint=checkpoint(store, name),
        suite=evaluation_suite(store, recipe, num_tasks),
        recipe=recipe,
        resources=resources,
    )


def test_suite_takes_documents_of_the_test_side_only_and_their_leading_characters(store):
    suite = evaluation_suite(store)
    record = suite.record
    assert (record.num_documents, record.num_problems, record.num_chat_problems, record.num_choice_items) == (
        24,
        24,
        20,
        4,
    )
    asked = {question.item_id: question.text for question in read_suite(suite.path("suite.parquet"))}
    assert not {"document/train", "document/validation"} & set(asked)
    assert asked["document/web-3"] == (DOCUMENTS["web"] * 4)[21:321]


def held_out_rows(path, sizes):
    """Documents of side `test`: (records, pieces of each, characters of a piece) by domain."""
    rows = [
        {
            "id": document_id(domain, record, piece),
            "source": domain,
            "offset": record,
            "domain": domain,
            "split": "test",
            "text": (f"{domain} {record} {piece} " * length)[:length],
        }
        for domain, (records, pieces, length) in sizes.items()
        for record in range(records)
        for piece in range(pieces)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return rows


def test_every_domain_gets_twenty_records_within_the_same_budget(store, tmp_path):
    """One domain fills the corpus, one has long documents, one few records in many pieces: each gives twenty records,
    or all that it has, and the budget is used up by what comes first in the order of hashes."""
    sizes = {"web": (400, 1, 400), "code": (30, 1, 4000), "math": (5, 40, 400)}
    rows = held_out_rows(tmp_path / "documents.parquet", sizes)
    toy_tokenizer().save(str(tmp_path / "tokenizer.json"))
    recipe = RECIPE.model_copy(update={"max_document_tokens": 24_000, "max_document_chars": 2000})
    held_out = held_out_documents([given_file(tmp_path / "documents.parquet")], recipe, RESOURCES)
    assert {row["id"] for row in held_out} == {row["id"] for row in rows}
    chosen, num_tokens = _choose_documents(held_out, tmp_path / "tokenizer.json", recipe)
    assert 20_000 < num_tokens <= 24_000
    units = {domain: {question.unit for question in chosen if question.domain == domain} for domain in sizes}
    assert len(units["math"]) == 5 and min(len(units["code"]), len(units["web"])) >= 20
    whole = {f"document/{row['id']}": row["text"] for row in rows}
    cut = [question for question in chosen if len(question.text) < min(2000, len(whole[question.item_id]))]
    assert {question.domain for question in cut} == {"code"} and all(
        whole[q.item_id].startswith(q.text) for q in chosen
    )
    more, _ = _choose_documents(
        held_out, tmp_path / "tokenizer.json", recipe.model_copy(update={"max_document_tokens": 48_000})
    )
    assert {question.item_id for question in chosen} < {question.item_id for question in more}


def test_of_a_large_corpus_the_documents_of_lowest_hash_are_read(tmp_path, monkeypatch):
    """As many as the budget may need, and enough of a small domain; a larger budget reads these and more."""
    held_out_rows(tmp_path / "documents.parquet", {"web": (900, 1, 400), "math": (30, 1, 400)})
    files = [given_file(tmp_path / "documents.parquet")]
    every = held_out_documents(files, RECIPE, RESOURCES)
    monkeypatch.setattr(held_out_module, "MIN_DOCUMENTS", 15)
    chosen = {}
    for budget in (2_000, 4_000):
        recipe = RECIPE.model_copy(update={"max_document_tokens": budget})
        rows = held_out_documents(files, recipe, RESOURCES)
        chosen[budget] = [row["id"] for row in rows]
        for domain in ("web", "math"):
            own = [row for row in rows if row["domain"] == domain]
            assert own == [row for row in every if row["domain"] == domain][: len(own)]
        assert 0.5 * budget * CHARS_PER_TOKEN < sum(len(row["text"]) for row in rows) < 2 * budget * CHARS_PER_TOKEN
        assert sum(row["domain"] == "math" for row in rows) >= 8
    assert set(chosen[2_000]) < set(chosen[4_000]) < {row["id"] for row in every}


def test_the_documents_of_one_repository_hang_together_as_the_pieces_of_a_record_do(tmp_path):
    held_out_rows(tmp_path / "documents.parquet", {"web": (3, 2, 400), REPOSITORY: (3, 1, 400)})
    units = [
        (row["domain"], row["unit"])
        for row in held_out_documents([given_file(tmp_path / "documents.parquet")], RECIPE, RESOURCES)
    ]
    assert sorted(domain for domain, _ in units) == [REPOSITORY] * 3 + ["web"] * 6
    assert sorted(domain for domain, _ in set(units)) == [REPOSITORY] + ["web"] * 3


def test_budget_below_the_first_document_is_refused(store):
    with pytest.raises(ValueError, match=r"max_document_tokens \(3\)"):
        evaluation_suite(store, RECIPE.model_copy(update={"max_document_tokens": 3}))


def test_document_bits_equal_a_plain_forward_pass_over_its_windows(store):
    artifact = evaluation_of(store, "trained")
    items = {item.item_id: item for item in read_items(artifact.path("items.parquet"))}
    model = load_model(checkpoint(store, "trained").directory("hf"))
    tokenizer = toy_tokenizer()
    for question in read_suite(evaluation_suite(store).path("suite.parquet")):
        if question.kind != DOCUMENT:
            continue
        ids = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(question.text).ids]
        total = 0.0
        for start in range(0, len(ids) - 1, RECIPE.sequence_length):
            window = torch.tensor(ids[start : start + RECIPE.sequence_length + 1])
            with torch.inference_mode():
                log_probabilities = model(window[None, :-1]).logits_BTV.log_softmax(-1)[0]
            total += log_probabilities.gather(1, window[1:, None]).sum().item()
        item = items[question.item_id]
        assert item.num_bytes == len(question.text.encode())
        assert item.log_probability == pytest.approx(total, abs=1e-2)
        assert item.score == pytest.approx(-total / math.log(2) / item.num_bytes, abs=1e-4)
    assert artifact.record.bits_per_byte == pytest.approx(bits_per_byte(items.values()), abs=1e-6)


def test_far_text_is_what_comes_after_many_tokens_of_a_long_document(store):
    artifact = evaluation_of(store, "trained")
    items = {item.item_id: item for item in read_items(artifact.path("items.parquet")) if item.kind == FAR}
    questions = read_suite(evaluation_suite(store).path("suite.parquet"))
    far = {question.item_id: question for question in questions if question.kind == FAR}
    texts = {f"far_text/{row['id']}": row["text"] for row in split_documents_rows()}
    long = {name for name, text in texts.items() if len(toy_tokenizer().encode(text).ids) >= 30}
    assert len(items) == evaluation_suite(store).record.num_far_texts == min(20, len(long)) and {*items} <= long
    model = load_model(checkpoint(store, "trained").directory("hf"))
    for name, question in far.items():
        assert texts[name].startswith(question.text + question.answer)
        context, scored = (toy_tokenizer().encode(text).ids for text in (question.text, question.answer))
        # A character of several tokens is not cut.
        assert question.domain == "multilingual" or (len(context), len(scored)) == (20, 10)
        row = torch.tensor([toy_tokenizer().token_to_id("<|endoftext|>"), *context, *scored])
        with torch.inference_mode():
            log_probabilities = model(row[None, :-1]).logits_BTV.log_softmax(-1)[0]
        total = log_probabilities.gather(1, row[1:, None])[len(context) :].sum().item()
        assert items[name].log_probability == pytest.approx(total, abs=1e-3)
        assert items[name].num_bytes == len(question.answer.encode())
    assert artifact.record.far_bits_per_byte == pytest.approx(bits_per_byte(items.values(), FAR), abs=1e-6)
    without = evaluation_of(store, "trained", recipe=RECIPE.model_copy(update={"far_text": None})).record
    assert without.far_bits_per_byte is None and "far_bits_per_byte" not in without.intervals


def test_accepted_drafts_are_those_of_greedy_continuations(store):
    trained, random = (evaluation_of(store, name).record for name in ("trained", "random"))
    engine = load_engine(checkpoint(store, "trained").directory("hf"), weights_version="v", batch_sequences=1)
    accepted = drafted = 0
    for question in read_suite(evaluation_suite(store).path("suite.parquet")):
        if question.kind == DOCUMENT:
            prompt = document_token_ids(toy_tokenizer(), question.text)[:32]
            generation = engine.generate([prompt], Sampling(16, is_speculative=True), "v")
            accepted, drafted = accepted + generation.num_accepted, drafted + generation.num_drafted
    assert trained.draft_acceptance == pytest.approx(accepted / drafted, abs=1e-6)
    lower, upper = trained.intervals["draft_acceptance"]
    assert lower <= trained.draft_acceptance <= upper and random.draft_acceptance is not None


def test_special_tokens_written_out_in_a_document_are_plain_text(tmp_path):
    toy_tokenizer().save(str(tmp_path / "tokenizer.json"))
    token_ids = document_token_ids(load_tokenizer(tmp_path / "tokenizer.json"), "<|endoftext|><|user|>")
    assert token_ids[0] == 320 and max(token_ids[1:]) < 320


def test_answers_are_right_only_if_equal(store):
    artifact = evaluation_of(store, "trained")
    items = [item for item in read_items(artifact.path("items.parquet")) if item.kind == ARITHMETIC]
    answers = {
        question.item_id: question.answer for question in read_suite(evaluation_suite(store).path("suite.parquet"))
    }
    assert [item.score for item in items] == [
        float(item.output.split("\n")[0] == answers[item.item_id]) for item in items
    ]
    assert artifact.record.arithmetic_accuracy == pytest.approx(accuracy(items, ARITHMETIC), abs=1e-6)


def test_training_lowers_bits_and_domains_are_all_there(store):
    trained, untrained = evaluation_of(store, "trained").record, evaluation_of(store, "random").record
    assert trained.suite_digest == untrained.suite_digest
    assert trained.bits_per_byte < untrained.bits_per_byte
    assert set(trained.bits_per_byte_by_domain) == {"web", "code", "multilingual"}


def test_evaluation_repeats_bit_for_bit_and_batch_size_changes_only_rounding(store, tmp_path):
    other = open_store(None, Home(tmp_path))
    first, again, wider = (
        evaluation_of(store, "trained"),
        evaluation_of(other, "trained"),
        evaluation_of(open_store(None, Home(tmp_path / "b")), "trained", 7),
    )
    assert first.digest == again.digest
    assert first.key == wider.key
    pairs = zip(read_items(first.path("items.parquet")), read_items(wider.path("items.parquet")), strict=True)
    assert all(
        ours.item_id == theirs.item_id
        and (ours.kind == CHOICE or ours.output == theirs.output)
        and ours.log_probability == pytest.approx(theirs.log_probability, abs=1e-3)
        for ours, theirs in pairs
    )


def test_in_bfloat16_the_weights_are_rounded_and_the_router_biases_are_not(store):
    whole, half = (
        evaluation_of(store, "trained", recipe=RECIPE.model_copy(update={"dtype": dtype})).record
        for dtype in ("float32", "bfloat16")
    )
    assert half.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=0.02) and half != whole
    engine = load_engine(
        checkpoint(store, "trained").directory("hf"), weights_version="v", batch_sequences=1, dtype="bfloat16"
    )
    dtypes = {name: tensor.dtype for name, tensor in engine.model.state_dict().items()}
    biases = {name for name in dtypes if name.endswith(ROUTER_BIAS)}
    assert biases and {name for name, dtype in dtypes.items() if dtype == torch.float32} == biases


def test_broken_weights_are_evaluated_not_crashed_on(store):
    record = evaluation_of(store, "broken").record
    assert record.bits_per_byte is None and "bits_per_byte" not in record.intervals
    assert record.num_non_finite == record.num_items == 24 + 24 + 25 + 20 + 4 + 24 + 20
    assert record.far_bits_per_byte is None


def test_held_out_tasks_of_the_suite_are_played_and_counted(store):
    assert evaluation_suite(store, num_tasks=2).record.num_tasks == 2
    evaluation = evaluation_of(store, "trained", num_tasks=2)
    played = [item for item in read_items(evaluation.path("items.parquet")) if item.kind == TASK]
    assert [(item.num_samples, math.isfinite(item.log_probability)) for item in played] == [(4, True)] * 2
    right = sum(item.num_right for item in played) / 8
    assert evaluation.record.agentic_success == right and evaluation.record.intervals["agentic_success"][0] <= right
    assert evaluation_of(store, "trained").record.agentic_success is None


def test_progress_is_reported(store, tmp_path):

    seen: list[Progress] = []
    output = local_output(tmp_path, seen.append)
    evaluate_checkpoint(
        checkpoint=checkpoint(store, "trained"),
        suite=evaluation_suite(store),
        recipe=RECIPE,
        resources=EVALUATION_RESOURCES,
        output=output,
    )
    assert {progress.unit for progress in seen} == {"windows", "rows", "problems", "choices", "documents"}


def test_non_finite_scores_survive_the_table(store):
    items = read_items(evaluation_of(store, "broken").path("items.parquet"))
    assert all(math.isnan(item.log_probability) for item in items if item.kind == DOCUMENT)


def test_chat_answers_equal_generation_prompt_by_prompt(store):
    """The template's prompt, the sampled answers and their judgement, against one call per problem."""
    import json

    from model.generation.generation import Sampling
    from model.text.chat_template import answer_of, encode, problem_prompt
    from tasks.evaluation.engine import end_token_ids, load_engine, reproducible_arithmetic

    artifact = checkpoint(store, "trained")
    items = {
        item.item_id: item
        for item in read_items(evaluation_of(store, "trained").path("items.parquet"))
        if item.kind == CHAT_PROBLEM
    }
    asked = [
        question
        for question in read_suite(evaluation_suite(store).path("suite.parquet"))
        if question.kind == CHAT_PROBLEM
    ]
    tokenizer = toy_tokenizer()
    prompts = [encode(tokenizer, problem_prompt(question.text, False))[0] for question in asked for _ in range(4)]
    sampling = Sampling(max_new_tokens=6, temperature=1.0, stop_token_ids=end_token_ids(tokenizer), seed=0)
    with reproducible_arithmetic(1):
        engine = load_engine(artifact.directory("hf"), weights_version="v", batch_sequences=24)
        drawn = engine.generate(prompts, sampling, "v")
    for number, question in enumerate(asked):
        texts = [
            tokenizer.decode(ids, skip_special_tokens=False) for ids in drawn.token_ids[4 * number : 4 * number + 4]
        ]
        item = items[question.item_id]
        assert json.loads(item.output) == [answer_of(text) for text in texts]
        assert item.expected == str(int(question.text.split()[2]) + 1)
        ended = [ids[-1] in end_token_ids(tokenizer) for ids in drawn.token_ids[4 * number : 4 * number + 4]]
        right = sum(answer_of(text) == item.expected for text, is_ended in zip(texts, ended, strict=True) if is_ended)
        assert item.num_right == right == item.score * item.num_samples
        assert item.num_formed == sum(
            is_ended and answer_of(text) != "" for text, is_ended in zip(texts, ended, strict=True)
        )
        assert item.log_probability == pytest.approx(
            sum(map(sum, drawn.log_probabilities[4 * number : 4 * number + 4])), abs=1e-2
        )
    record = evaluation_of(store, "trained").record
    assert record.pass_at_1 == pytest.approx(sum(item.num_right for item in items.values()) / 80, abs=1e-6)
    formed = sum(item.num_formed for item in items.values())
    assert record.formed_answer_share == formed / 80 and 0 < formed < 80


def test_an_answer_that_was_cut_off_is_not_right_whatever_its_beginning():
    from model.generation.generation import Generation
    from tasks.evaluation.engine import end_token_ids
    from tasks.evaluation.generated_answers import answer_chats

    tokenizer = toy_tokenizer()
    cut = tokenizer.encode("12", add_special_tokens=False).ids
    rows = [cut, [*cut, end_token_ids(tokenizer)[0]]]

    class Engine:
        def generate(self, prompts, sampling, weights_version):
            assert len(prompts) == len(rows)
            zeros = [[0.0] * len(row) for row in rows]
            return Generation(rows, zeros, zeros, zeros, weights_version)

    asked = [Question(f"problem/{number}", CHAT_PROBLEM, "math", "", "What is 5 + 7?", "12") for number in range(2)]
    recipe, output = RECIPE.model_copy(update={"samples_per_problem": 1}), SimpleNamespace(report=lambda _: None)
    items = list(answer_chats(Engine(), tokenizer, asked, recipe, "v", output))
    assert [(item.num_right, item.num_formed) for item in items] == [(0, 0), (1, 1)]


def test_a_model_that_never_refuses_is_right_about_harmless_requests_wherever_it_answers(store):
    artifact = evaluation_of(store, "trained")
    items = [item for item in read_items(artifact.path("items.parquet")) if item.kind == SAFETY]
    by_side = {label: [item for item in items if f"/{label}/" in item.item_id] for label in ("harmful", "harmless")}
    assert {label: len(side) for label, side in by_side.items()} == {"harmful": 12, "harmless": 12}
    assert [item.num_right for item in by_side["harmful"]] == [0] * 12
    for item in by_side["harmless"]:  # an answer without a word is formed and tells nothing
        wordless = [text for text in json.loads(item.output) if not any(map(str.isalnum, text))]
        assert 0 <= item.num_formed - item.num_right <= len(wordless), item.output
    answered, record = sum(item.num_right for item in by_side["harmless"]), artifact.record
    assert answered > 0 and record.harmless_answered_share == pytest.approx(answered / 48, abs=1e-6)
    assert record.safe_answer_share == pytest.approx(answered / 96, abs=1e-6)
    assert record.harmful_refused_share == 0 and set(record.intervals) >= {"safe_answer_share"}


def test_choices_equal_a_direct_comparison_of_scores(store):
    """lm-evaluation-harness against our engine asked without it: log-probabilities, acc and acc_norm."""
    import json

    from tasks.evaluation.engine import load_engine, reproducible_arithmetic

    artifact = checkpoint(store, "trained")
    evaluation = evaluation_of(store, "trained")
    items = {item.item_id: item for item in read_items(evaluation.path("items.parquet")) if item.kind == CHOICE}
    tokenizer, num_right, num_right_normalised = toy_tokenizer(), 0, 0
    with reproducible_arithmetic(1):
        engine = load_engine(artifact.directory("hf"), weights_version="v", batch_sequences=1)
        for question in [q for q in read_suite(evaluation_suite(store).path("suite.parquet")) if q.kind == CHOICE]:
            context = document_token_ids(tokenizer, question.text)
            sums = []
            for choice in question.choice_list:
                whole = document_token_ids(tokenizer, f"{question.text} {choice}")
                scores = engine.score([whole[-RECIPE.sequence_length - 1 :]])[0]
                sums.append(sum(scores[len(context) - len(whole) :]))
            item = items[question.item_id]
            assert json.loads(item.output) == pytest.approx(sums, abs=1e-3)
            assert item.log_probability == pytest.approx(sums[int(item.expected)], abs=1e-3)
            num_right += sums.index(max(sums)) == int(item.expected)
            per_character = [value / len(choice) for value, choice in zip(sums, question.choice_list, strict=True)]
            num_right_normalised += per_character.index(max(per_character)) == int(item.expected)
    record = evaluation.record
    assert (record.choice_accuracy, record.choice_accuracy_normalised) == (num_right / 4, num_right_normalised / 4)
    assert len(items) == len(BENCHMARK) - 1
