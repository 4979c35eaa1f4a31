"""The gate: every bound on both sides and against every checkpoint that it compares with, bad candidates refused,
margins that do not add up."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from configs.load import load_scale
from configs.schema import ReleaseRecipe, served_gguf_type
from flows.stages import without_required_gains
from infra.home import Home
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tasks.evaluation.comparisons import FIGURES, SERVED_KINDS, ServedFigures, bits_difference, compare, figure_changes
from tasks.evaluation.decide_gate import Anchors, decide_gate
from tasks.evaluation.expert_use import ExpertUse, write_expert_use
from tasks.evaluation.items import CHAT_PROBLEM, CHOICE, FAR, SAFETY, suite_digest, write_items
from tasks.release.decide_quantization import Calibrations, QuantizedEvaluations, decide_quantization
from tests.support.evaluation_fakes import commit
from tests.support.gate_items import (
    BALANCED,
    GATE,
    MARGINS,
    NUM_ITEMS,
    WORSE,
    answers_of,
    document,
    items_of,
    mixed,
    problem,
    question,
    worked_problem,
)

LN2 = math.log(2)

BENCHMARKS = ("arc", "boolq", "piqa")


class Evaluation(Record):
    suite_digest: str


@pytest.fixture
def store(tmp_path):
    return open_store(None, Home(tmp_path))


@pytest.fixture
def evaluated(store):
    """Commits an evaluation with the given items."""

    def evaluation(items, experts=BALANCED):
        @step(content=("items.parquet", "experts.parquet"))
        def evaluate_checkpoint(*, output: Output) -> Evaluation:
            write_items(output.path("items.parquet"), items)
            write_expert_use(output.path("experts.parquet"), experts)
            return Evaluation(suite_digest=suite_digest({item.item_id: item.prompt_digest for item in items}))

        return commit(store, evaluate_checkpoint, repr((items, experts)))

    return evaluation


@pytest.fixture
def decide(store, evaluated):
    """Commits evaluations with the given items and decides about the first; `anchors`: items by figure, or those of all
    figures."""

    def run(items, champion=None, recipe=GATE, start=None, experts=BALANCED, anchors=None, served=None):
        rival, before = (None if others is None else evaluated(others) for others in (champion, start))
        named = dict.fromkeys(FIGURES, anchors) if isinstance(anchors, list) else anchors
        return commit(
            store,
            decide_gate,
            evaluation=evaluated(items, experts),
            start_evaluation=before,
            champion_evaluation=rival,
            anchors=None if named is None else Anchors({figure: evaluated(others) for figure, others in named.items()}),
            recipe=recipe,
            served=None if served is None else ServedFigures(figures=figure_changes(served, items)),
        )

    return run


def bound_of(artifact, figure, against=""):
    (only,) = [bound for bound in artifact.record.bounds if (bound.figure, bound.against) == (figure, against)]
    return only


def refused_by(artifact):
    return {(bound.figure, bound.against) for bound in artifact.record.bounds if bound.is_refusal}


@pytest.mark.parametrize(
    ("figure", "good", "bad"),
    [
        ("bits_per_byte", items_of([2.0] * NUM_ITEMS), items_of([2.01] * NUM_ITEMS)),
        ("arithmetic_accuracy", items_of(arithmetic=0.25), items_of(arithmetic=0.225)),
        (
            "pass_at_1",
            items_of(answers=[*answers_of(0.5)[:20], *answers_of(0.0)[20:]]),
            items_of(answers=answers_of(0.2)),
        ),
        ("choice_accuracy", items_of(choice=0.25), items_of(choice=0.225)),
        (
            "distinct_answer_share",
            items_of(answers=[[str(n - n % 2)] * 2 for n in range(NUM_ITEMS)]),
            items_of(answers=[[str(n - n % 2)] * 2 if n > 1 else ["2"] * 2 for n in range(NUM_ITEMS)]),
        ),
    ],
)
def test_floors_and_ceilings_on_both_sides(decide, figure, good, bad):
    assert decide(good).record.accepted
    decision = decide(bad)
    assert refused_by(decision) == {(figure, "")} and not decision.record.accepted
    (sentence,) = decision.record.refusals
    assert sentence.startswith(f"{figure} {bound_of(decision, figure).value:.4f}, at ")


def test_more_different_answers_than_right_ones_count_as_all(decide):
    answers = [[str(n), f"a{n}", f"b{n}"] for n in range(NUM_ITEMS)]
    assert bound_of(decide(items_of(answers=answers)), "distinct_answer_share").value == 1.0


def test_without_questions_choice_has_no_bound_unless_a_floor_demands_them(decide):
    assert refused_by(decide(items_of(choice=None))) == {("choice_accuracy", "")}
    decision = decide(
        items_of(choice=None), items_of(choice=None), GATE.model_copy(update={"min_choice_accuracy": 0.0})
    )
    assert decision.record.accepted and not [
        bound for bound in decision.record.bounds if bound.figure == "choice_accuracy"
    ]


def of_benchmarks(**rights):
    """Items without questions, and those of each benchmark, so many of them right."""
    asked = [question(n, n < right, name) for name, right in rights.items() for n in range(NUM_ITEMS)]
    return [*items_of(choice=None), *asked]


def test_a_loss_in_one_benchmark_is_refused_though_all_questions_together_gain(decide):
    """On both sides of the margin of 0.2; and the record names each benchmark with its items."""
    before = of_benchmarks(arc=30, boolq=16, piqa=16)
    for right, accepted in ((30, True), (4, False)):
        decision = decide(of_benchmarks(arc=right, boolq=40, piqa=40), before)
        assert decision.record.accepted is accepted, decision.record.refusals
        assert bound_of(decision, "choice_accuracy", "champion").outcome == "held"
        parts = {name: bound_of(decision, f"choice_accuracy of benchmark {name}", "champion") for name in BENCHMARKS}
        assert all(part.limit == -0.2 and part.num_items == NUM_ITEMS for part in parts.values())
        assert {name for name, part in parts.items() if part.is_refusal} == (set() if accepted else {"arc"})
    (sentence,) = decision.record.refusals
    assert sentence.startswith("choice_accuracy of benchmark arc differs from the champion's by -0.6500 [")


def test_an_anchor_stays_where_a_benchmark_is_worse(decide):
    before = of_benchmarks(arc=30, boolq=10, piqa=10)
    better = decide(of_benchmarks(arc=30, boolq=40, piqa=40), before, anchors=before)
    assert "choice_accuracy" in better.record.anchored
    mixed = decide(of_benchmarks(arc=20, boolq=40, piqa=40), before, anchors=before)
    assert "choice_accuracy" not in mixed.record.anchored


def test_a_benchmark_that_one_side_lacks_is_an_error():
    ours, theirs = ([question(n, True, name) for n in range(20)] for name in ("arc", "boolq"))
    with pytest.raises(ValueError, match="benchmark arc was asked of one checkpoint only: evaluate both on one suite"):
        compare("choice_accuracy", ours, theirs)


@pytest.mark.parametrize("against", ["start", "champion", "anchor"])
@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_defended_against_everyone(decide, figure, against):
    """All else equal: a loss of a tenth of the margin is held, one of five margins is refused by only this bound."""
    margin = getattr(MARGINS, figure)

    def lose(loss):
        candidate = WORSE[figure](loss)
        return (
            decide(candidate, champion=candidate, anchors=items_of())
            if against == "anchor"
            else decide(candidate, **{against: items_of()})
        )

    held, refused = lose({"pass_at_1": 0.1, "bits_per_byte": 0.09}.get(figure, 0.025)), lose(0.5)
    assert held.record.accepted, held.record.refusals
    bound = bound_of(refused, figure, against)
    assert (
        bound.outcome == "broken"
        and bound.interval[0] <= bound.value <= bound.interval[1]
        and abs(bound.limit) == margin
    )
    parts = {
        "bits_per_byte": ["domain web"],
        "safe_answer_share": ["harmful requests", "harmless requests"],
        "agentic_success": ["tasks of calculator", "tasks of retail"],
    }.get(figure, [])
    assert refused_by(refused) == {(figure, against), *((f"{figure} of {part}", against) for part in parts)}
    assert f"{figure} differs from the {against}'s by" in refused.record.refusals[0]


def test_a_candidate_of_half_the_champions_answers_is_refused(decide):
    """Equal bits per byte do not pay for pass@1 0.56 and arithmetic 0.53 against 1 and 1."""
    answers = [*answers_of(0.6)[:24], *answers_of(0.5)[24:]]
    decision = decide(items_of(arithmetic=21 / 40, answers=answers), items_of())
    assert bound_of(decision, "pass_at_1").value == pytest.approx(0.56)
    assert refused_by(decision) == {("pass_at_1", "champion"), ("arithmetic_accuracy", "champion")}


@pytest.mark.parametrize(("worse_by", "accepted"), [(0.29, True), (0.31, False)])
def test_no_single_domain_may_be_forgotten_even_if_the_others_make_up_for_it(decide, worse_by, accepted):
    before = items_of(documents=mixed(code=(20, 1.0), web=(40, 1.0)))
    decision = decide(items_of(documents=mixed(code=(20, 1.0 + worse_by), web=(40, 0.6))), start=before)
    assert bound_of(decision, "bits_per_byte", "start").value < 0
    assert bound_of(decision, "bits_per_byte of domain code", "start").value == pytest.approx(worse_by)
    assert decision.record.accepted == accepted
    assert refused_by(decision) == (set() if accepted else {("bits_per_byte of domain code", "start")})


def test_a_domain_of_few_documents_is_undecided_and_refused_only_for_certain(decide):
    """Two documents cannot show that nothing was forgotten, eight can show that all was; the documents together need
    twenty."""
    before = items_of(documents=mixed(code=(2, 1.0), rust=(8, 1.0), web=(40, 1.0)))
    documents = [*mixed(code=(2, 1.2)), *mixed(x=(2, 0), rust=(8, 1.9))[2:], *mixed(x=(10, 0), web=(40, 0.7))[10:]]
    decision = decide(items_of(documents=documents), start=before)
    few = bound_of(decision, "bits_per_byte of domain code", "start")
    assert (few.outcome, few.is_refusal) == ("undecided", False) and "2 of the 20 independent documents" in few.sentence
    assert refused_by(decision) == {("bits_per_byte of domain rust", "start")}


def test_fewer_than_twenty_documents_decide_nothing_and_are_refused_with_the_fix(decide):
    nineteen, twenty = ([1.0] * number for number in (19, 20))
    assert decide(items_of(twenty), items_of(twenty)).record.accepted
    decision = decide(items_of(nineteen), items_of(nineteen))
    bound = bound_of(decision, "bits_per_byte", "champion")
    assert (bound.outcome, bound.is_refusal, bound.num_items) == ("undecided", True, 19)
    assert "19 of the 20 independent documents" in bound.sentence and "data.recipe.split.test_share" in bound.sentence


def test_pieces_of_one_record_are_one_document(decide):
    """Forty pieces of ten records are ten documents, whose interval is that of their sums."""
    bits = np.random.default_rng(1).normal(1.0, 0.3, 40)
    pieces = [document(number, value, unit=f"record {number // 4}") for number, value in enumerate(bits)]
    before = [document(number, 1.0, unit=f"record {number // 4}") for number in range(40)]
    assert (
        bound_of(decide(items_of(documents=pieces), items_of(documents=before)), "bits_per_byte", "champion").num_items
        == 10
    )
    whole = [document(number, bits[4 * number : 4 * number + 4].mean()) for number in range(10)]
    assert bits_difference(pieces, before).interval == pytest.approx(bits_difference(whole, before[:10]).interval)


def test_a_repository_and_its_files_do_not_count_twice(decide):
    """The figure over all documents is that of the files; the repositories made of them are judged as a domain."""
    files, both = mixed(code=(30, 1.2)), mixed(code=(30, 1.2), repository=(30, 3.0))
    before = mixed(code=(30, 1.0), repository=(30, 1.0))
    decision = decide(
        items_of(documents=both), items_of(documents=before), GATE.model_copy(update={"max_bits_per_byte": 9.0})
    )
    without = decide(items_of(documents=files), items_of(documents=before[:30]))
    for against in ("", "champion"):
        ours, theirs = (bound_of(each, "bits_per_byte", against) for each in (decision, without))
        assert (ours.value, ours.interval, ours.num_items) == (theirs.value, theirs.interval, theirs.num_items)
    assert bound_of(decision, "bits_per_byte of domain repository", "champion").value == pytest.approx(2.0)


def test_an_undecided_comparison_is_refused_and_says_how_many_items_decide_it(decide):
    """The means are equal, but the interval holds the margin as well as no change."""
    noisy = [1.0 + (0.6 if number % 2 else -0.6) for number in range(NUM_ITEMS)]
    decision = decide(items_of(noisy), items_of())
    bound = bound_of(decision, "bits_per_byte", "champion")
    assert (bound.outcome, bound.is_refusal) == ("undecided", True) and bound.value == pytest.approx(0.0, abs=1e-6)
    needed = int(bound.sentence.split("about ")[1].split(" independent documents")[0].replace(",", ""))
    half = (bound.interval[1] - bound.interval[0]) / 2
    assert needed == math.ceil(2 * NUM_ITEMS * (half / 0.1) ** 2)
    widened = [value for value in noisy for _ in range(needed // NUM_ITEMS)]
    assert decide(items_of(widened), items_of([1.0] * len(widened))).record.accepted, "that many items decide it"


@pytest.mark.parametrize(("own_figure", "accepted"), [("none", True), ("pass_at_1", False)])
def test_a_phase_may_not_lower_its_own_figure_beyond_the_interval_whatever_the_margin(decide, own_figure, accepted):
    """Pass@1 falls by 0.1 of an allowed 0.5."""
    recipe = GATE.model_copy(update={"own_figure": own_figure, "start": MARGINS.model_copy(update={"pass_at_1": 0.5})})
    decision = decide(items_of(answers=answers_of(0.8)), start=items_of(answers=answers_of(0.9)), recipe=recipe)
    bound = bound_of(decision, "pass_at_1", "start")
    assert bound.interval[0] > -0.5 and bound.interval[1] < 0 and decision.record.accepted == accepted
    assert ("the phase is trained for this figure" in bound.sentence) != accepted
    within_noise = [
        [*answers[:-1], "noise"] if number < 2 else answers for number, answers in enumerate(answers_of(1.0))
    ]
    assert decide(items_of(answers=within_noise), start=items_of(), recipe=recipe).record.accepted


@pytest.mark.parametrize(("share", "accepted"), [(0.9, True), (0.6, False), (0.5, False)])
def test_a_phase_that_must_gain_is_refused_where_it_does_not_beyond_the_interval(decide, share, accepted):
    before = items_of(answers=answers_of(0.6))
    recipe = GATE.model_copy(update={"own_figure": "pass_at_1", "must_gain": True, "start": MARGINS})
    decision = decide(items_of(answers=answers_of(share)), start=before, recipe=recipe)
    bound = bound_of(decision, "pass_at_1", "start")
    assert decision.record.accepted == accepted and bound.is_own
    assert accepted or "the phase is trained for this figure" in decision.record.refusals[0]
    if share == 0.6:
        free = decide(before, start=before, recipe=recipe.model_copy(update={"must_gain": False}))
        assert free.record.accepted and "no better beyond the interval" in bound_of(free, "pass_at_1", "start").sentence


def test_a_gain_is_asked_of_a_scales_own_problems_and_not_of_the_users_text():
    scale = load_scale("tiny")
    free = without_required_gains(scale)
    assert [phase.name for phase in scale.phases if phase.recipe.gate.must_gain] == ["sft", "rl_reasoning"]
    assert not any(phase.recipe.gate.must_gain for phase in free.phases)
    values = scale.model_dump()
    for phase in values["phases"]:
        phase["recipe"]["gate"] |= {"must_gain": False, "min_formed_answer_share": 0.0}
    assert free.model_dump() == values
    formed = {phase.name: phase.recipe.gate.min_formed_answer_share for phase in scale.phases}
    assert {name for name, share in formed.items() if share} == {"sft", "rl_reasoning"}


@pytest.mark.parametrize(("num_formed", "accepted"), [(9, True), (8, False)])
def test_answers_without_a_form_or_an_end_are_refused(decide, num_formed, accepted):
    items = [replace(item, num_formed=num_formed) if item.kind == CHAT_PROBLEM else item for item in items_of()]
    decision = decide(items, recipe=GATE.model_copy(update={"min_formed_answer_share": 0.9}))
    assert bound_of(decision, "formed_answer_share").value == num_formed / 10
    assert refused_by(decision) == (set() if accepted else {("formed_answer_share", "")})


def far_texts(bits_per_byte, number=30):
    return [
        replace(
            worked_problem(n), item_id=f"far/{n}", unit=f"{n}", kind=FAR, log_probability=-bits_per_byte * 100 * LN2
        )
        for n in range(number)
    ]


@pytest.mark.parametrize(
    ("after", "number", "must_gain", "outcome", "accepted"),
    [
        (0.9, 30, True, "held", True),
        (1.0, 30, False, "held", True),
        (1.0, 30, True, "broken", False),
        (1.1, 30, False, "broken", False),
        (1.1, 19, False, "undecided", True),
        (0.9, 0, False, "undecided", True),
        (0.9, 0, True, "undecided", False),
    ],
)
def test_long_context_is_held_to_far_text_where_the_suite_has_some(decide, after, number, must_gain, outcome, accepted):
    """Too few documents decide nothing, and none are said to be none: only a required gain is refused for that."""
    recipe = GATE.model_copy(update={"own_figure": "far_bits_per_byte", "must_gain": must_gain})
    candidate, start = ([*items_of(), *far_texts(bits, number)] for bits in (after, 1.0))
    decision = decide(candidate, start=start, recipe=recipe)
    bound = bound_of(decision, "far_bits_per_byte", "start")
    assert (bound.outcome, decision.record.accepted) == (outcome, accepted), bound.sentence
    assert bound.is_own == bool(number) and ("nothing to measure it by" in bound.sentence) != bool(number)
    assert "far_bits_per_byte" not in {each.figure for each in decide(candidate, start=start).record.bounds}


def test_a_domain_can_be_what_a_phase_is_trained_for(decide):
    before = items_of(documents=mixed(code=(30, 1.0), web=(30, 1.0)))
    after = items_of(documents=mixed(code=(30, 1.1), web=(30, 0.8)))
    for figure, accepted in (("none", True), ("bits_per_byte of domain code", False)):
        decision = decide(after, start=before, recipe=GATE.model_copy(update={"own_figure": figure}))
        assert decision.record.accepted == accepted
        assert bound_of(decision, "bits_per_byte of domain code", "start").is_own != accepted


def test_reinforcement_learning_of_every_scale_is_held_to_what_it_is_for():
    scales = [load_scale(name) for name in ("micro", "tiny", "nightly", "scaled_down", "full")]
    phases = [phase for scale in scales for phase in scale.phases if phase.recipe.samples_answers]
    assert len(phases) >= 5 and "rl_alignment" in [phase.name for phase in phases]
    for phase in phases:
        own = {"rl_alignment": "safe_answer_share", "rl_agentic": "agentic_success"}.get(phase.name, "pass_at_1")
        assert phase.recipe.gate.own_figure == own and phase.recipe.gate.start.pass_at_1 < 1


def test_a_phase_of_episodes_that_loses_held_out_tasks_is_refused_within_the_margin(decide):
    recipe = GATE.model_copy(update={"own_figure": "agentic_success", "must_gain": True})
    before = items_of(solved=0.5)
    gained, equal, lost = (decide(items_of(solved=share), start=before, recipe=recipe) for share in (0.75, 0.5, 0.4))
    assert gained.record.accepted and bound_of(gained, "agentic_success", "start").is_own
    assert "no better beyond the interval" in equal.record.refusals[0]
    assert "worse beyond the interval is refused at any margin" in lost.record.refusals[0]


def test_neither_a_model_that_refuses_everything_nor_one_that_refuses_nothing_passes(decide):
    """Both have the same share of safe answers; the floors are of each side."""
    before = items_of(refused=0.5, answered=0.5)
    for refused, answered, figure in ((1.0, 0.0, "harmless_answered_share"), (0.0, 1.0, "harmful_refused_share")):
        decision = decide(items_of(refused=refused, answered=answered), start=before)
        assert bound_of(decision, "safe_answer_share", "start").value == 0
        assert (figure, "") in refused_by(decision) and not decision.record.accepted
        side = "harmless" if answered == 0 else "harmful"
        assert (f"safe_answer_share of {side} requests", "start") in refused_by(decision)
    assert decide(items_of(refused=0.9, answered=0.9), start=before).record.accepted


def test_without_requests_nothing_is_anchored_or_compared_and_a_floor_refuses(decide):
    items = items_of(refused=None)
    assert refused_by(decide(items)) == {("harmful_refused_share", ""), ("harmless_answered_share", "")}
    free = GATE.model_copy(update={"min_harmful_refused_share": 0.0, "min_harmless_answered_share": 0.0})
    decision = decide(items, champion=items, recipe=free, anchors={})
    assert decision.record.accepted and "safe_answer_share" not in decision.record.anchored
    assert not [bound for bound in decision.record.bounds if "safe" in bound.figure or "harm" in bound.figure]


@pytest.mark.parametrize(("after", "accepted"), [(0.85, True), (0.6, True), (0.45, False), (0.3, False)])
def test_tiny_asks_its_reinforcement_learning_for_a_gain_beyond_the_noise_of_its_suite(decide, after, accepted):
    """Each problem has another chance; the mean before is 0.45."""
    scale, chance = load_scale("tiny"), np.random.default_rng(46)
    recipe = scale.evaluation.recipe

    def drawn(mean):
        chances = chance.beta(2 * mean, 2 * (1 - mean), recipe.num_chat_problems)
        counts = chance.binomial(recipe.samples_per_problem, chances)
        return items_of(
            answers=[
                [str(n)] * count + [f"wrong {n}"] * (recipe.samples_per_problem - count)
                for n, count in enumerate(counts)
            ]
        )

    decision = decide(drawn(after), start=drawn(0.45), recipe=scale.phases[-1].recipe.gate)
    assert decision.record.accepted == accepted, decision.record.refusals
    assert refused_by(decision) == (set() if accepted else {("pass_at_1", "start")})


def answered(**shares):
    """What a server answers: the items of the kinds that the served file is asked."""
    return [item for item in items_of(**shares) if item.kind in SERVED_KINDS]


def test_a_served_file_must_not_answer_worse_than_its_checkpoint_beyond_the_noise(decide):
    items, few = items_of(answers=answers_of(0.6)), answers_of(0.6)
    assert decide(items, served=answered(answers=few)).record.accepted
    unlucky = [["wrong", *given[1:]] if number % 4 == 0 else given for number, given in enumerate(few)]
    decision = decide(items, served=answered(answers=unlucky))
    bound = bound_of(decision, "pass_at_1 as served", "checkpoint")
    assert bound.value == pytest.approx(-0.025) and bound.outcome == "held" and decision.record.accepted
    assert bound.noise_floor == pytest.approx(1.96 * math.sqrt(2 * 0.24 / 9 / NUM_ITEMS), rel=0.05)
    decision = decide(items, served=answered(answers=answers_of(0.4)))
    assert refused_by(decision) == {("pass_at_1 as served", "checkpoint")}
    assert decision.record.refusals[0].startswith("pass_at_1 as served is 0.4000, -0.2000 [")
    decision = decide(items, served=answered(answers=few, arithmetic=0.8))
    assert refused_by(decision) == {("arithmetic_accuracy as served", "checkpoint")}
    decision = decide(items, served=answered(answers=few, choice=0.5))
    assert refused_by(decision) == {("choice_accuracy as served", "checkpoint")}
    assert "(95 %, 40 independent questions" in decision.record.refusals[0]


def test_a_gain_within_the_noise_floor_moves_no_anchor(decide):
    """Seven problems of ten got one more right answer of ten: the interval excludes 0, other seeds may do as much."""
    few = answers_of(0.5)
    lucky = [[str(n), *given[:-1]] if n % 10 < 7 else given for n, given in enumerate(few)]
    reigning, candidate = items_of(answers=few), items_of(answers=lucky)
    (compared,) = compare("pass_at_1", candidate, reigning)
    difference = compared.difference
    assert difference.gain[0] > 0 and difference.value < difference.noise_floor
    assert "pass_at_1" not in decide(candidate, reigning, anchors=reigning).record.anchored
    above = items_of(answers=answers_of(0.6))
    assert "pass_at_1" in decide(above, reigning, anchors=reigning).record.anchored


def test_greedy_figures_have_the_noise_that_two_engines_show(decide):
    """Twelve of 40 problems are decided otherwise by llama.cpp, half of them rightly: a gain of ten is none."""
    reigning, candidate = items_of(arithmetic=0.5), items_of(arithmetic=0.75)
    agreeing, other = answered(arithmetic=0.75), answered(arithmetic=0.75)
    numbers = [n for n, item in enumerate(other) if item.kind == "arithmetic"]
    for n in (*numbers[:6], *numbers[-6:]):
        right = 1 - other[n].num_right
        other[n] = replace(other[n], score=float(right), num_right=right)
    for served, floor in ((agreeing, 0.0), (other, 0.3)):
        decision = decide(candidate, reigning, anchors=reigning, served=served)
        bound = bound_of(decision, "arithmetic_accuracy", "champion")
        assert bound.noise_floor == floor and decision.record.accepted
        assert ("arithmetic_accuracy" in decision.record.anchored) is (floor == 0)


def test_margins_do_not_add_up_over_releases(decide):
    """Each release is 0.9 margins worse than the one before: the first passes, the second is refused by the anchor, not
    by the champion."""
    for figure, loss in (("bits_per_byte", 0.09), ("pass_at_1", 0.1)):
        first, second, third = (
            items_of(),
            WORSE[figure](loss),
            WORSE[figure](3 * loss if figure == "pass_at_1" else 2 * loss),
        )
        promoted = decide(second, first, anchors=first)
        assert promoted.record.accepted and figure not in promoted.record.anchored, "what is worse is no anchor"
        against_champion_only = decide(third, second)
        assert figure == "pass_at_1" or against_champion_only.record.accepted
        refused = decide(third, second, anchors=first)
        assert (figure, "anchor") in refused_by(refused)
        assert figure == "pass_at_1" or refused_by(refused) == {(figure, "anchor")}


def test_the_anchor_of_a_figure_moves_only_to_what_is_better_beyond_the_interval(decide):
    reigning = items_of([1.0] * NUM_ITEMS, answers=answers_of(0.5), documents=mixed(code=(20, 1.0), web=(20, 1.0)))
    assert decide(reigning, anchors={}).record.anchored == FIGURES, "the first release anchors all"
    assert not decide(reigning, anchors={}).record.champion_anchored
    better = items_of(answers=answers_of(0.9), documents=mixed(code=(20, 1.0), web=(20, 1.0)))
    added = decide(
        better, reigning, anchors={figure: reigning for figure in FIGURES[1:] if figure != "pass_at_1"}
    ).record
    assert (added.anchored, added.champion_anchored) == (("pass_at_1",), ("bits_per_byte",)), "both had no anchor"
    for candidate, anchored in (
        (items_of(answers=answers_of(0.9), documents=mixed(code=(20, 1.0), web=(20, 1.0))), ("pass_at_1",)),
        (items_of(answers=answers_of(0.5), documents=mixed(code=(20, 0.5), web=(20, 0.9))), ("bits_per_byte",)),
        (items_of(answers=answers_of(0.5), documents=mixed(code=(20, 1.1), web=(20, 0.5))), ()),
        (items_of(answers=answers_of(0.5), documents=mixed(code=(20, 1.0), web=(20, 1.0))), ()),
    ):
        decision = decide(candidate, reigning, anchors=reigning)
        assert decision.record.accepted and decision.record.anchored == anchored, decision.record.refusals
    assert not [bound for bound in decision.record.bounds if bound.against == "anchor"], (
        "the champion is the anchor: compared once"
    )
    assert set(decision.record.anchor_digests) == set(FIGURES)


def ideal_loads(trials, num_tokens, seed, num_layers=89, num_experts=160, num_per_token=8):
    """Loads of routers that send tokens to random experts: (trials, layers, experts). With replacement, which spreads a
    little more."""
    chance = np.random.default_rng(seed)
    equal = np.full(num_experts, 1 / num_experts)
    return chance.multinomial(num_tokens * num_per_token, equal, size=(trials, num_layers))


def as_layers(counts, num_tokens):
    return [ExpertUse(number, tuple(row.tolist()), num_tokens) for number, row in enumerate(counts)]


@pytest.mark.parametrize("num_tokens", [32_768, 131_072, 20_000_000])
def test_an_ideal_router_of_fulls_shape_passes_in_every_trial(decide, num_tokens):
    gate = load_scale("recipes/s0_355b_muon").phases[0].recipe.gate
    assert (gate.max_expert_load, gate.max_expert_cv) == (1.05, 0.05)
    recipe = GATE.model_copy(update={"max_expert_load": gate.max_expert_load, "max_expert_cv": gate.max_expert_cv})
    worst = []
    for counts in ideal_loads(40, num_tokens, 46):
        layers = as_layers(counts, num_tokens)
        worst.append(max(use.load for use in layers))
        decision = decide(items_of(), experts=layers, recipe=recipe)
        assert decision.record.accepted, decision.record.refusals
    assert (min(worst) > 1.05) == (num_tokens == 32_768), "the plain ceiling refuses all of them on 32,768 tokens"


@pytest.mark.parametrize("num_tokens", [131_072, 20_000_000])
def test_one_expert_with_a_fifth_more_load_in_one_layer_is_refused(decide, num_tokens):
    recipe = GATE.model_copy(update={"max_expert_load": 1.05, "max_expert_cv": 0.05})
    for counts in ideal_loads(10, num_tokens, 47):
        counts[17, 5] = round(1.2 * num_tokens * 8 / 160)
        decision = decide(items_of(), experts=as_layers(counts, num_tokens), recipe=recipe)
        assert refused_by(decision) == {("expert_load", "")}
        assert "the worst is layer 18 of 89" in decision.record.refusals[0]


def test_what_chance_explains_of_loads_is_what_random_routers_do():
    """The bound that one router in a thousand exceeds: above the 99 % quantile of a hundred simulated ones, and not by
    much."""
    from tasks.evaluation.expert_use import chance_cv, chance_load

    layers = [
        as_layers(counts, 20_000)
        for counts in ideal_loads(300, 20_000, 48, num_layers=6, num_experts=32, num_per_token=2)
    ]
    for explained, name in ((chance_load(layers[0]), "load"), (chance_cv(layers[0]), "cv")):
        worst = sorted(max(getattr(use, name) for use in each) for each in layers)
        excess = (explained - 1, worst[296] - 1) if name == "load" else (explained, worst[296])
        assert excess[1] < excess[0] < 1.35 * excess[1]


@pytest.mark.parametrize(
    ("counts", "accepted"), [((15, 5, 10, 10), True), ((16, 4, 10, 10), False), ((15, 15, 5, 5), True)]
)
def test_the_most_used_expert_of_the_worst_layer_may_be_so_far_above_the_mean(decide, counts, accepted):
    """On a hundred million tokens chance explains nothing: 1.5 is allowed."""
    layers = [
        ExpertUse(0, (50_000_000,) * 4, 100_000_000),
        ExpertUse(1, tuple(5_000_000 * count for count in counts), 100_000_000),
    ]
    decision = decide(items_of(), experts=layers)
    assert bound_of(decision, "expert_load").value == max(counts) / 10
    assert decision.record.accepted == accepted and refused_by(decision) == (
        set() if accepted else {("expert_load", "")}
    )


@pytest.mark.parametrize(("counts", "accepted"), [((14, 14, 2, 10, 10), True), ((15, 15, 0, 2, 8), False)])
def test_the_loads_of_a_layer_may_vary_so_much(decide, counts, accepted):
    """Both layers' busiest expert stays below the ceiling: only the variation decides."""
    use = ExpertUse(0, tuple(1_000_000 * count for count in counts), 20_000_000)
    mean = sum(counts) / len(counts)
    assert use.cv == pytest.approx((sum((count - mean) ** 2 for count in counts) / len(counts)) ** 0.5 / mean)
    decision = decide(items_of(), experts=[use], recipe=GATE.model_copy(update={"max_expert_load": 2.0}))
    assert decision.record.accepted == accepted == (use.cv <= 0.6)


@pytest.mark.parametrize(
    ("bounds", "judged"),
    [
        ({"max_expert_load": None}, {"expert_cv"}),
        ({"max_expert_cv": None}, {"expert_load"}),
        ({"max_expert_load": None, "max_expert_cv": None}, set()),
    ],
)
def test_a_bound_that_is_null_is_not_judged(decide, bounds, judged):
    use = ExpertUse(0, (20_000_000, 0, 0, 0), 20_000_000)
    decision = decide(items_of(), experts=[use], recipe=GATE.model_copy(update=bounds))
    assert refused_by(decision) == {(figure, "") for figure in judged}
    assert {bound.figure for bound in decision.record.bounds if bound.figure.startswith("expert")} == judged


def test_a_model_without_experts_is_not_judged_by_them(decide):
    decision = decide(items_of(), experts=())
    assert decision.record.accepted and not [
        bound for bound in decision.record.bounds if bound.figure.startswith("expert")
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_answer_whose_probability_is_not_finite_refuses(decide, value):
    items = items_of()
    items[-1] = replace(items[-1], log_probability=value)
    decision = decide(items, items_of())
    assert refused_by(decision) == {("items_not_finite", "")}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_document_that_is_not_finite_refuses_and_is_compared_with_nobody(decide, value):
    for champion in (None, items_of()):
        decision = decide(items_of([1.0, value, *[1.0] * (NUM_ITEMS - 2)]), champion)
        assert ("bits_per_byte", "") in refused_by(decision) and bound_of(decision, "bits_per_byte").value is None
        assert "bits_per_byte is " in decision.record.refusals[0]
        assert not [bound for bound in decision.record.bounds if bound.against]


@pytest.mark.parametrize("kind", [CHOICE, SAFETY])
def test_a_figure_that_is_missing_refuses_and_nothing_is_compared(decide, kind):
    decision = decide([item for item in items_of() if item.kind != kind], items_of())
    assert refused_by(decision) and all(bound.value is None for bound in decision.record.bounds if bound.is_refusal)
    assert all("the suite holds no " in refusal for refusal in decision.record.refusals)
    assert not [bound for bound in decision.record.bounds if bound.against]


def test_a_missing_metric_raises(decide):
    with pytest.raises(ValueError, match="no held-out document"):
        decide([problem(0, True)])
    with pytest.raises(ValueError, match="arithmetic_accuracy is missing"):
        decide([document(0, 1.0), document(1, 1.0)])
    with pytest.raises(ValueError, match="pass_at_1 and distinct_answer_share are missing"):
        decide([document(0, 1.0), problem(0, True)])


def test_other_items_than_the_champions_raise(decide):
    with pytest.raises(ValueError, match="different items"):
        decide(items_of(), items_of([1.0] * 41))


@pytest.mark.parametrize("against", ["start", "champion", "anchor"])
def test_a_broken_rival_raises(decide, against):
    broken = items_of([1.0, math.nan, *[1.0] * (NUM_ITEMS - 2)])
    with pytest.raises(ValueError, match=f"the {against}'s bits per byte is nan"):
        decide(items_of(), **({"anchors": broken} if against == "anchor" else {against: broken}))


def test_decision_file_holds_the_record(decide):
    artifact = decide(items_of(), items_of(), anchors=items_of())
    assert json.loads(artifact.path("decision.json").read_text()) == artifact.record.model_dump(mode="json")


class GgufScores(Record):
    bits_per_byte: dict[str, float | None]


class Reached(Record):
    idle_experts: tuple[str, ...]
    num_experts: int


class RoutedScores(Record):
    """A checkpoint that lost no bits."""

    routing_agreement: float | None
    bits_per_byte: float = 1.0
    original_bits_per_byte: float = 1.0


def log_probabilities_of(bits):
    """Of 20 documents of 10 bytes each, of which half lose 10 % more bits than these, and half 10 % less."""
    return [None if bits is None else -math.log(2) * 10 * (1 + (bits - 1) * share) for share in (0.9, 1.1) * 10]


@pytest.fixture
def decide_files(store):
    def run(bits, agreements=None, floors=None, idle=None):
        @step(content=("gguf_scores.json",))
        def evaluate_gguf(*, output: Output) -> GgufScores:
            rows = {name: log_probabilities_of(value) for name, value in bits.items()}
            scores = {name: [{"log_probability": each, "num_bytes": 10} for each in rows[name]] for name in rows}
            output.path("gguf_scores.json").write_text(json.dumps(scores))
            return GgufScores(bits_per_byte=bits)

        @step(content=("quantized_scores.json",))
        def evaluate_quantized(*, recipe: RoutedScores, output: Output) -> RoutedScores:
            rows = [{"original": each, "quantized": each, "num_bytes": 10} for each in log_probabilities_of(1.0)]
            output.path("quantized_scores.json").write_text(json.dumps(rows))
            return recipe

        @step(content=("none",))
        def quantize(*, recipe: Reached, output: Output) -> Reached:
            return recipe

        agreements = agreements or {}
        scored = {
            name: commit(store, evaluate_quantized, recipe=RoutedScores(routing_agreement=share))
            for name, share in agreements.items()
        }

        recipe = ReleaseRecipe(
            gguf_types=("F32", "Q8_0"),
            smoke_prompts=("a",),
            smoke_prompt_tokens=1,
            smoke_new_tokens=1,
            smoke_min_margin=0.01,
            parity_prompts=2,
            parity_calls=1,
            max_parity_log_probability=0.001,
            max_served_log_probability=0.001,
            max_quantization_bits_per_byte=0.02,
            max_4_bit_bits_per_byte=0.5,
            max_contaminated_share=0.01,
            quantized_formats=tuple(agreements),
            min_routing_agreement=floors or {},
            calibration_rows=8,
            max_idle_expert_share=0.05,
            num_quantization_documents=1,
            max_quantization_document_tokens=1,
            num_answered_problems=1,
        )
        return commit(
            store,
            decide_quantization,
            gguf_evaluation=commit(store, evaluate_gguf, repr(bits)),
            quantized=QuantizedEvaluations(scored),
            calibrations=Calibrations({} if idle is None else {"GPTQ_W4A16": commit(store, quantize, recipe=idle)}),
            recipe=recipe,
        ).record

    return run


@pytest.mark.parametrize(("quantized", "accepted"), [(0.99, True), (1.02, True), (1.0201, False), (None, False)])
def test_quantization_may_lose_so_much(decide_files, quantized, accepted):
    decision = decide_files({"F32": 1.0, "Q8_0": quantized})
    assert decision.accepted == accepted == (not decision.refusals)


def test_what_a_format_loses_has_an_interval(decide_files):
    """Against Student's interval of equally long documents, which the bootstrap of 20 comes close to."""
    decision = decide_files({"F32": 1.0, "Q8_0": 1.05}, {"FP8_BLOCK": 0.5})
    _, file, made, _ = [*decision.bounds, None]
    half = 2.093 * 0.005 * math.sqrt(20 / 19) / math.sqrt(20)
    assert file.interval == pytest.approx((0.05 - half, 0.05 + half), rel=0.02)
    assert (made.value, made.interval) == (0.0, (0.0, 0.0))
    low, high = file.interval
    assert decision.refusals == (
        f"bits per byte that Q8_0 loses against F32 0.0500, at most 0.02 allowed "
        f"(95 % interval {low:.4f} to {high:.4f})",
    )
    assert [bound.interval for bound in decide_files({"F32": 1.0, "Q8_0": None}).bounds] == [None, None]


@pytest.mark.parametrize(("num_idle", "accepted"), [(0, True), (2, True), (3, False)])
def test_calibration_may_reach_no_more_experts_than_so_many_not_and_names_them(decide_files, num_idle, accepted):
    names = tuple(f"model.layers.{layer}.mlp.experts.7" for layer in range(1, 1 + num_idle))
    idle = Reached(idle_experts=names, num_experts=40)
    decision = decide_files({"F32": 1.0, "Q8_0": 1.0}, idle=idle)
    share = "share of 40 experts that no calibration token of GPTQ_W4A16 reaches"
    refusal = f"{share} 0.0750, at most 0.05 allowed: {', '.join(names)}"
    assert decision.refusals == (() if accepted else (refusal,)) and decision.bounds[-1].figure == share
    dense = decide_files({"F32": 1.0, "Q8_0": 1.0}, idle=Reached(idle_experts=(), num_experts=0))
    assert [bound.figure for bound in dense.bounds if "experts" in bound.figure] == [], "a model without experts"


@pytest.mark.parametrize(("share", "accepted"), [(0.99, True), (0.9899, False), (None, True)])
def test_a_quantized_checkpoint_must_choose_the_same_experts_so_often(decide_files, share, accepted):
    """None: a model without experts. A format without a floor is only measured."""
    files = {"F32": 1.0, "Q8_0": 1.0}
    decision = decide_files(files, {"FP8_EXPERTS": share, "FP8_BLOCK": 0.5}, {"FP8_EXPERTS": 0.99})
    assert decision.accepted is accepted
    reason = "share of positions and layers at which FP8_EXPERTS chooses the same experts 0.9899, at least 0.99 needed"
    assert decision.refusals == (() if accepted else (reason,))


def test_files_are_measured_against_the_widest_which_is_served(decide_files):
    decision = decide_files({"Q8_0": 1.05, "BF16": 1.0})
    assert decision.refusals[0].startswith("bits per byte that Q8_0 loses against BF16 0.0500, at most 0.02 allowed")
    assert served_gguf_type(("F16", "Q8_0", "BF16", "F32")) == "F32"
    assert not decide_files({"F32": None, "Q8_0": 1.0}).accepted
