"""The gate: every bound on both sides, the interval against a plain bootstrap, bad candidates refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from configs.schema import GateRecipe, ReleaseRecipe
from infra.home import Home
from infra.step import Output, Record, step
from infra.store import open_store
from tasks.evaluation.decide_gate import decide_gate, paired_bits_per_byte
from tasks.evaluation.expert_use import ExpertUse, write_expert_use
from tasks.evaluation.items import ARITHMETIC, CHAT_PROBLEM, VALIDATION, Item, suite_digest, write_items
from tasks.release.decide_release import decide_release
from tests.evaluation_fakes import commit

GATE = GateRecipe(
    max_bits_per_byte=2.0, min_arithmetic_accuracy=0.5, min_pass_at_1=0.25, min_distinct_answer_share=0.5,
    noninferiority_bits_per_byte=0.05, start_bits_per_byte=0.2, start_pass_at_1=0.2, max_forgetting_bits_per_byte=0.3, max_expert_load=1.5,
    max_expert_cv=0.6,
)  # fmt: skip


class Evaluation(Record):
    suite_digest: str


def document(number, bits_per_byte, num_bytes=1000, domain="web"):
    log_probability = -bits_per_byte * num_bytes * math.log(2)
    return Item(f"validation/{number:03d}", VALIDATION, domain, f"d{number}", "", "", bits_per_byte, log_probability, num_bytes, 0, 0)


def problem(number, right):
    return Item(f"arithmetic/{number:03d}", ARITHMETIC, "synthetic", f"p{number}", "4", "4", float(right), -1.0, 1, 1, int(right))


def chat(number, answers):
    """A problem whose right answer is its number."""
    right = sum(answer == str(number) for answer in answers)
    share = right / len(answers)
    return Item(
        f"chat_problem/{number:03d}", CHAT_PROBLEM, "synthetic", f"c{number}", str(number), json.dumps(answers), share, -1.0, 4,
        len(answers), right,
    )  # fmt: skip


BALANCED = (ExpertUse(0, (5, 5, 5, 5)),)
RIGHT = tuple((str(number), str(number)) for number in range(4))


def items_of(bits, num_right=3, num_problems=4, answers=RIGHT):
    documents = [document(number, value) for number, value in enumerate(bits)]
    return [*documents, *(problem(n, n < num_right) for n in range(num_problems)), *(chat(n, given) for n, given in enumerate(answers))]


@pytest.fixture
def store(tmp_path):
    return open_store(None, Home(tmp_path))


@pytest.fixture
def decide(store):
    """Commits evaluations with the given items and decides about the first."""

    def evaluation(items, experts):
        @step(content=("items.parquet", "experts.parquet"))
        def evaluate_checkpoint(*, output: Output) -> Evaluation:
            write_items(output.path("items.parquet"), items)
            write_expert_use(output.path("experts.parquet"), experts)
            return Evaluation(suite_digest=suite_digest({item.item_id: item.prompt_digest for item in items}))

        return commit(store, evaluate_checkpoint, repr((items, experts)))

    def run(items, champion=None, recipe=GATE, start=None, experts=BALANCED):
        rival, before = (None if others is None else evaluation(others, experts) for others in (champion, start))
        return commit(
            store, decide_gate, evaluation=evaluation(items, experts), start_evaluation=before, champion_evaluation=rival, recipe=recipe
        )

    return run


@pytest.mark.parametrize(("bits", "accepted"), [(2.0, True), (2.01, False)])
def test_ceiling_on_bits_per_byte(decide, bits, accepted):
    decision = decide(items_of([bits] * 3)).record
    assert decision.accepted == accepted
    assert any(reason.startswith("refused: bits_per_byte 2.01") for reason in decision.reasons) != accepted


@pytest.mark.parametrize(("num_right", "accepted"), [(2, True), (1, False)])
def test_floor_on_accuracy(decide, num_right, accepted):
    decision = decide(items_of([1.0] * 3, num_right)).record
    assert decision.accepted == accepted
    assert decision.figures["arithmetic_accuracy"] == num_right / 4


@pytest.mark.parametrize(("num_right", "accepted"), [(2, True), (1, False)])
def test_floor_on_pass_at_1(decide, num_right, accepted):
    """One or two of eight sampled answers right, a quarter is needed."""
    answers = [[str(n) if n < num_right else "wrong", f"other {n}"] for n in range(4)]
    decision = decide(items_of([1.0] * 3, answers=answers)).record
    assert decision.figures["pass_at_1"] == num_right / 8
    assert decision.accepted == accepted


@pytest.mark.parametrize(("answers", "share", "accepted"), [(["0"] * 4, 0.25, False), (["0", "1", "0", "1"], 0.5, True)])
def test_a_policy_that_says_the_same_to_every_problem_is_refused(decide, answers, share, accepted):
    decision = decide(items_of([1.0] * 3, answers=[[answer, answer] for answer in answers])).record
    assert decision.figures["distinct_answer_share"] == share
    assert decision.accepted == accepted
    assert any(reason.startswith("refused: distinct_answer_share") for reason in decision.reasons) != accepted


def test_more_different_answers_than_right_ones_count_as_all(decide):
    answers = [[str(n), f"a{n}", f"b{n}"] for n in range(4)]
    assert decide(items_of([1.0] * 3, answers=answers)).record.figures["distinct_answer_share"] == 1.0


@pytest.mark.parametrize(("worse_by", "accepted"), [(0.19, True), (0.21, False)])
def test_so_much_may_be_forgotten_of_the_start(decide, worse_by, accepted):
    start = [1.0, 1.2, 1.4, 0.9]
    decision = decide(items_of([value + worse_by for value in start]), start=items_of(start)).record
    assert decision.accepted == accepted
    assert decision.start_digest and not decision.champion_digest
    assert any("differs from the start's" in reason and reason.startswith("refused") for reason in decision.reasons) != accepted


@pytest.mark.parametrize(("worse_by", "accepted"), [(0.29, True), (0.31, False)])
def test_no_single_domain_may_be_forgotten_even_if_the_others_make_up_for_it(decide, worse_by, accepted):
    def candidate(code, web):
        documents = [document(number, code, domain="code") for number in range(3)]
        documents += [document(number, web) for number in range(3, 9)]
        return [*documents, *(item for item in items_of([1.0]) if item.kind != VALIDATION)]

    decision = decide(candidate(1.0 + worse_by, 0.6), start=candidate(1.0, 1.0)).record
    assert decision.accepted == accepted
    assert decision.figures["forgetting_code"] == pytest.approx(worse_by) and decision.figures["forgetting_web"] == pytest.approx(-0.4)
    assert decision.figures["bits_per_byte_against_start"] < 0
    assert any(reason.startswith("refused: bits_per_byte of domain code") for reason in decision.reasons) != accepted


def test_a_domain_of_one_document_is_named_and_not_judged(decide):
    documents = [document(0, 1.0, domain="code"), document(1, 1.0), document(2, 1.0)]
    items = [*documents, *(item for item in items_of([1.0]) if item.kind != VALIDATION)]
    decision = decide(items, start=items).record
    assert decision.accepted and any(reason.startswith("domain code is not judged alone: 1 document") for reason in decision.reasons)


@pytest.mark.parametrize(
    ("counts", "load", "accepted"), [((15, 5, 10, 10), 1.5, True), ((16, 4, 10, 10), 1.6, False), ((15, 15, 5, 5), 1.5, True)]
)
def test_the_most_used_expert_of_the_worst_layer_may_be_so_far_above_the_mean(decide, counts, load, accepted):
    layers = [ExpertUse(0, (10, 10, 10, 10)), ExpertUse(1, counts)]
    decision = decide(items_of([1.0] * 3), experts=layers).record
    assert decision.figures["expert_load"] == pytest.approx(load) and decision.accepted == accepted
    assert any(reason.startswith("refused: expert_load") for reason in decision.reasons) != accepted


@pytest.mark.parametrize(("counts", "accepted"), [((14, 14, 2, 10, 10), True), ((15, 15, 0, 2, 8), False)])
def test_the_loads_of_a_layer_may_vary_so_much(decide, counts, accepted):
    """Both layers' busiest expert stays below the ceiling: the variation alone decides."""
    use = ExpertUse(0, counts)
    recipe = GATE.model_copy(update={"max_expert_load": 2.0})
    decision = decide(items_of([1.0] * 3), experts=[use], recipe=recipe).record
    mean = sum(counts) / len(counts)
    assert use.cv == pytest.approx((sum((count - mean) ** 2 for count in counts) / len(counts)) ** 0.5 / mean)
    assert decision.accepted == accepted == (use.cv <= 0.6)
    assert decision.figures["num_dead_experts"] == counts.count(0)


def test_a_model_without_experts_is_not_judged_by_them(decide):
    decision = decide(items_of([1.0] * 3), experts=()).record
    assert decision.accepted and "expert_load" not in decision.figures


@pytest.mark.parametrize(("num_wrong", "accepted"), [(3, True), (5, False)])
def test_pass_at_1_may_fall_so_far_below_the_start(decide, num_wrong, accepted):
    """Of ten answers to each of four problems so many turn wrong: 0.075 and 0.125 in every problem's share, 0.1 is allowed."""
    problems = [[str(number)] * 40 for number in range(4)]
    worse = [[*given[num_wrong:], *["wrong"] * num_wrong] for given in problems]
    recipe = GATE.model_copy(update={"start_pass_at_1": 0.1})
    decision = decide(items_of([1.0] * 3, answers=worse), start=items_of([1.0] * 3, answers=problems), recipe=recipe).record
    assert decision.figures["pass_at_1_against_start"] == pytest.approx(-num_wrong / 40)
    assert decision.accepted == accepted


def test_one_problem_that_collapses_widens_the_interval_beyond_the_margin(decide):
    """The mean falls by 0.1 of the allowed 0.2, but three of thirty problems lost all: the interval's lower end decides."""
    problems = [[str(number)] for number in range(30)]
    worse = [["wrong"] if number < 3 else given for number, given in enumerate(problems)]
    decision = decide(items_of([1.0] * 3, answers=worse), start=items_of([1.0] * 3, answers=problems)).record
    assert decision.figures["pass_at_1_against_start"] == pytest.approx(-0.1)
    assert not decision.accepted and "the lower end must stay above -0.2" in decision.reasons[-1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_answer_whose_probability_is_not_finite_refuses(decide, value):
    items = items_of([1.0] * 3)
    items[-1] = replace(items[-1], log_probability=value)
    assert decide(items_of([1.0] * 3)).record.accepted
    decision = decide(items).record
    assert not decision.accepted and decision.reasons[-1].startswith("refused: 1 of 11 items")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_document_that_is_not_finite_refuses(decide, value):
    for champion in (None, items_of([1.0] * 3)):
        decision = decide(items_of([1.0, value, 1.0]), champion).record
        assert not decision.accepted
        assert any(reason.startswith("refused: bits_per_byte is") for reason in decision.reasons)
        assert "bits_per_byte" not in decision.figures


def test_a_missing_metric_raises(decide):
    with pytest.raises(ValueError, match="no validation document"):
        decide([problem(0, True)])
    with pytest.raises(ValueError, match="arithmetic_accuracy is missing"):
        decide([document(0, 1.0), document(1, 1.0)])
    with pytest.raises(ValueError, match="pass_at_1 and distinct_answer_share are missing"):
        decide([document(0, 1.0), problem(0, True)])


def test_other_items_than_the_champions_raise(decide):
    with pytest.raises(ValueError, match="different items"):
        decide(items_of([1.0] * 3), items_of([1.0] * 4))


def test_broken_champion_raises(decide):
    with pytest.raises(ValueError, match="the champion's bits per byte is nan"):
        decide(items_of([1.0] * 3), items_of([1.0, math.nan, 1.0]))


@pytest.mark.parametrize(("worse_by", "accepted"), [(-0.1, True), (0.0, True), (0.04, True), (0.06, False), (0.5, False)])
def test_constant_difference_against_the_margin(decide, worse_by, accepted):
    champion = [1.0, 1.2, 1.4, 0.9]
    decision = decide(items_of([value + worse_by for value in champion]), items_of(champion)).record
    assert decision.accepted == accepted
    assert decision.figures["bits_per_byte_against_champion"] == pytest.approx(worse_by, abs=1e-6)


def test_wide_interval_refuses_what_the_mean_alone_would_pass(decide):
    noisy = [1.0 + (0.6 if number % 2 else -0.6) for number in range(6)]
    decision = decide(items_of(noisy), items_of([1.0] * 6)).record
    assert decision.figures["bits_per_byte_against_champion"] == pytest.approx(0.0, abs=1e-6)
    assert not decision.accepted
    assert "the upper end must stay below" in decision.reasons[-1]


def test_one_document_is_no_comparison(decide):
    decision = decide(items_of([1.0]), items_of([1.0])).record
    assert not decision.accepted
    assert "at least 2 needed" in decision.reasons[-1]


def test_decision_file_holds_the_record(decide):
    artifact = decide(items_of([1.0] * 3))
    assert json.loads(artifact.path("decision.json").read_text()) == artifact.record.model_dump(mode="json")


def test_interval_equals_a_plain_bootstrap_weighted_by_bytes():
    chance = random.Random(46)
    sizes = [chance.randrange(200, 5000) for _ in range(40)]
    ours = [document(number, chance.gauss(1.1, 0.2), size) for number, size in enumerate(sizes)]
    theirs = [document(number, chance.gauss(1.0, 0.2), size) for number, size in enumerate(sizes)]
    resampled = []
    for _ in range(4000):
        drawn = [chance.randrange(40) for _ in range(40)]
        resampled.append(sum(ours[n].bits - theirs[n].bits for n in drawn) / sum(sizes[n] for n in drawn))
    resampled.sort()
    difference, lower, upper = paired_bits_per_byte(ours, theirs)
    assert difference == pytest.approx(sum(a.bits - b.bits for a, b in zip(ours, theirs, strict=True)) / sum(sizes))
    assert (lower, upper) == pytest.approx((resampled[100], resampled[3899]), abs=0.01)
    assert paired_bits_per_byte(ours, theirs) == (difference, lower, upper)


class GgufScores(Record):
    bits_per_byte: dict[str, float | None]


@pytest.fixture
def decide_files(store):
    def run(bits):
        @step(content=("none",))
        def evaluate_gguf(*, output: Output) -> GgufScores:
            return GgufScores(bits_per_byte=bits)

        recipe = ReleaseRecipe(
            gguf_types=("F32", "Q8_0"), smoke_prompts=("a",), smoke_new_tokens=1, smoke_min_margin=0.01,
            max_quantization_bits_per_byte=0.02, num_quantization_documents=1, max_quantization_document_tokens=1,
        )  # fmt: skip
        return commit(store, decide_release, gguf_evaluation=commit(store, evaluate_gguf, repr(bits)), recipe=recipe).record

    return run


@pytest.mark.parametrize(("quantized", "accepted"), [(0.99, True), (1.02, True), (1.0201, False), (None, False)])
def test_quantization_may_lose_so_much(decide_files, quantized, accepted):
    decision = decide_files({"F32": 1.0, "Q8_0": quantized})
    assert decision.accepted == accepted
    assert any(reason.startswith("refused") for reason in decision.reasons) != accepted


def test_quantized_files_without_their_reference_raise(decide_files):
    with pytest.raises(ValueError, match="F32 must be among them"):
        decide_files({"Q8_0": 1.0})
    assert not decide_files({"F32": None, "Q8_0": 1.0}).accepted
