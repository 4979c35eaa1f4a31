"""A suite as the input of a gate: bounds on each benchmark, the comparison with the champion, and what cannot be
compared."""

from __future__ import annotations

import json
import math

import pytest

from configs.load import load_scale, load_suite
from configs.schema import BenchmarkBound, ReleaseSuite, RetrievalBenchmark, SuiteGateRecipe, SuiteRecipe
from flows import assess_suite
from flows.assess_suite import find_suite_files
from flows.running.run import Run
from flows.running.stage_log import StageLog
from infra.home import Home
from infra.registry.experiment_tracking import KEY_TAG
from infra.registry.model_registry import DIGEST_TAG, SUITE_TAG, RegisteredVersion
from infra.registry.promotion import Rivals
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tasks.data.sources.list_sources import SourceListing, list_named
from tasks.evaluation.benchmarks.decide_suite import decide_suite
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE, SuiteEvaluation, evaluate_suite
from tasks.evaluation.comparisons import FigureChange, ServedFigures
from tasks.evaluation.decide_gate import Anchors
from tasks.report.report_suite import QUOTED, suite_table
from tests.evaluation.benchmarks.planned_suites import right_answers, write_planned
from tests.evaluation.benchmarks.toy_suite import NEEDLE, write_suite
from tests.support.data_inputs import write_jsonl
from tests.support.evaluation_fakes import DOCUMENTS, EVALUATION_RESOURCES, checkpoint, commit

BOUNDS = {name: BenchmarkBound(worst=0.5, margin=0.2) for name in ("gsm8k", "bfcl")}
GOOD = {"gsm8k": right_answers(0.8), "bfcl": right_answers(0.9)}


@pytest.fixture
def store(tmp_path):
    return open_store(None, Home(tmp_path))


@pytest.fixture
def decide(store):
    def planned(scores, figure, answered):
        @step(content=(SUITE_FILE, "suite.items.jsonl"))
        def evaluate_suite(*, output: Output) -> SuiteEvaluation:
            return write_planned(output.path(SUITE_FILE), scores, figure, **answered)

        return commit(store, evaluate_suite, repr((scores, figure, answered)))

    def run(scores, champion=None, bounds=BOUNDS, figure="accuracy", anchors=None, served=None, **answered):
        decision = commit(
            store,
            decide_suite,
            evaluation=planned(scores, figure, answered),
            champion_evaluation=None if champion is None else planned(champion, figure, answered),
            anchors=Anchors({name: planned(each, figure, answered) for name, each in (anchors or {}).items()}),
            recipe=SuiteGateRecipe(bounds=bounds),
            served=served,
        )
        assert json.loads(decision.path("decision.json").read_text()) == decision.record.model_dump(mode="json")
        return decision.record

    return run


def test_an_equal_candidate_is_accepted_and_the_record_names_bound_value_interval(decide):
    decision = decide(GOOD, GOOD)
    assert decision.accepted and decision.champion_digest == decision.candidate_digest
    assert [(bound.figure, bound.against, bound.value, bound.limit) for bound in decision.bounds] == [
        ("accuracy of benchmark gsm8k", "", 0.8, 0.5),
        ("accuracy of benchmark bfcl", "", 0.9, 0.5),
        ("accuracy of benchmark gsm8k", "champion", 0.0, -0.2),
        ("accuracy of benchmark bfcl", "champion", 0.0, -0.2),
    ]
    assert all(bound.interval is not None and bound.num_items == 40 for bound in decision.bounds[2:])


def test_a_benchmark_below_its_bound_is_refused_also_without_a_champion(decide):
    assert decide({**GOOD, "bfcl": right_answers(0.5)}).accepted
    refused = decide({**GOOD, "bfcl": right_answers(0.45)})
    assert refused.refusals == ("accuracy of benchmark bfcl 0.4500, at least 0.5 needed",)


def test_a_candidate_that_is_worse_than_the_champion_in_one_benchmark_is_refused_with_the_reason(decide):
    refused = decide({**GOOD, "gsm8k": right_answers(0.5)}, GOOD)
    (reason,) = refused.refusals
    assert reason.startswith("accuracy of benchmark gsm8k differs from the champion's by -0.3000 [")
    assert decide(GOOD, {**GOOD, "gsm8k": right_answers(0.5)}).accepted, "the other way round it is better"


def test_margins_against_champions_do_not_add_up(decide):
    candidate, champion = {**GOOD, "gsm8k": right_answers(0.6)}, {**GOOD, "gsm8k": right_answers(0.75)}
    bounds = {**BOUNDS, "gsm8k": BenchmarkBound(worst=0.1, margin=0.35)}
    assert decide(candidate, champion, bounds).accepted
    best = {"benchmark_gsm8k": {**GOOD, "gsm8k": right_answers(1.0)}}
    (reason,) = decide(candidate, champion, bounds, anchors=best).refusals
    assert reason.startswith("accuracy of benchmark gsm8k differs from the anchor's by -0.4000 [")


def test_an_anchor_moves_only_to_a_candidate_that_is_better_beyond_the_interval(decide):
    better, anchors = {**GOOD, "gsm8k": right_answers(1.0)}, {"benchmark_gsm8k": GOOD, "benchmark_bfcl": GOOD}
    first = decide(GOOD)
    assert first.anchored == ("benchmark_gsm8k", "benchmark_bfcl") and not first.anchor_digests
    assert decide(better, GOOD, anchors=anchors).anchored == ("benchmark_gsm8k",)
    again = decide(GOOD, anchors=anchors)
    assert again.anchored == () and [bound.against for bound in again.bounds] == ["", ""], "not compared with itself"
    added = decide(better, GOOD, anchors={})
    assert (added.anchored, added.champion_anchored) == (("benchmark_gsm8k",), ("benchmark_bfcl",)), "the best of both"
    assert not decide(better, GOOD, anchors=anchors).champion_anchored and not first.champion_anchored
    with pytest.raises(ValueError, match=r"benchmark gsm8k: .* has 20 items and .* 40, which are not the same"):
        decide(GOOD, anchors={"benchmark_gsm8k": {**GOOD, "gsm8k": right_answers(0.8, 20)}})
    with pytest.raises(ValueError, match="hold different benchmarks: evaluate both with the same --suite"):
        decide(GOOD, anchors={"benchmark_bfcl": {"gsm8k": GOOD["gsm8k"]}})


ONE = {"gsm8k": BenchmarkBound(worst=0.0, margin=0.2)}


@pytest.mark.parametrize(("num_moved", "is_better"), [(20, False), (40, True)])
def test_a_sampled_benchmark_counts_only_beyond_what_other_seeds_do(decide, num_moved, is_better):
    """Eight answers to each of 40 items. One more right answer to 20 of them is beyond the interval, and less than two
    runs with other seeds differ by, about 0.08."""
    before = {"gsm8k": [0.5] * 40}
    after = {"gsm8k": [0.625 if number < num_moved else 0.5 for number in range(40)]}
    decision = decide(after, before, ONE, anchors={"benchmark_gsm8k": before}, num_samples=8)
    bound = decision.bounds[-1]
    assert bound.interval is not None and bound.interval[0] > 0 and bound.value == num_moved / 320
    variances = [share * (1 - share) / 7 for side in (before, after) for share in side["gsm8k"]]
    assert bound.noise_floor == pytest.approx(1.96 * math.sqrt(sum(variances)) / 40, abs=1e-5)
    assert ", noise floor 0.08" in bound.sentence
    assert decision.anchored == (("benchmark_gsm8k",) if is_better else ())


@pytest.mark.parametrize(("output", "figure"), [("a", "arithmetic_accuracy"), (None, "choice_accuracy")])
def test_a_greedy_benchmark_counts_only_beyond_what_the_other_engine_decides_otherwise(decide, output, figure):
    before, after = {"gsm8k": right_answers(0.5)}, {"gsm8k": right_answers(0.75)}
    other = {"arithmetic_accuracy": "choice_accuracy", "choice_accuracy": "arithmetic_accuracy"}[figure]
    for disagreement, anchored in (({}, True), ({figure: 0.2, other: 0.3}, True), ({figure: 0.3, other: 0.2}, False)):
        served = ServedFigures(figures={name: change(share) for name, share in disagreement.items()})
        decision = decide(after, before, ONE, anchors={"benchmark_gsm8k": before}, served=served, output=output)
        assert decision.bounds[-1].noise_floor == disagreement.get(figure, 0.0)
        assert bool(decision.anchored) is anchored and decision.accepted


def change(disagreement):
    """A greedy figure that is the same on both sides but for these shares."""
    values = {"value": 0.5, "interval": None, "before": 0.5, "change": 0.0, "change_interval": None, "noise_floor": 0.0}
    return FigureChange(disagreement=disagreement, num_items=40, num_answers=40, is_worse=False, **values)


def test_too_few_items_decide_nothing_and_refuse(decide):
    few = {"gsm8k": right_answers(0.8, 19), "bfcl": right_answers(0.9)}
    (reason,) = decide(few, few).refusals
    assert "undecided, 19 of the 20 independent items that a comparison needs: raise evaluation.suite.limit" in reason


def test_more_bits_per_byte_are_worse(decide):
    bounds = {"wiki": BenchmarkBound(worst=2.0, margin=0.1)}
    low, high = {"wiki": [1.0 + n % 3 / 100 for n in range(40)]}, {"wiki": [1.2 + n % 3 / 100 for n in range(40)]}
    assert decide(low, high, bounds, "bits_per_byte").accepted
    (reason,) = decide(high, low, bounds, "bits_per_byte").refusals
    assert reason.startswith("bits_per_byte of benchmark wiki differs from the champion's by +0.2000")
    above = {"wiki": [2.1] * 40}
    assert decide(above, None, bounds, "bits_per_byte").refusals == (
        "bits_per_byte of benchmark wiki 2.1000, at most 2 allowed",
    )


def test_a_missing_figure_and_other_items_are_errors(decide):
    with pytest.raises(ValueError, match=r"benchmark bfcl has a bound .* was not asked it"):
        decide({"gsm8k": right_answers(1.0)})
    with pytest.raises(ValueError, match=r"benchmark gsm8k has a bound .* but no accuracy or bits_per_byte"):
        decide(GOOD, figure="well_formed")
    with pytest.raises(ValueError, match=r"benchmark gsm8k: .* has 20 items and .* 40, which are not the same"):
        decide(GOOD, {**GOOD, "gsm8k": right_answers(0.8, 20)})


def test_a_worse_checkpoint_is_refused_through_the_real_step(store, tmp_path):
    """The toy before its training, against itself after it: it knows no text, and both find no needle."""
    texts = [{"text": text[start : start + 40]} for text in DOCUMENTS.values() for start in range(0, 40, 5)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    (tmp_path / "glm46-data.yaml").write_text('version: 1\nentries:\n  - {files: "*.jsonl", role: evaluation}\n')
    (tmp_path / "toy").mkdir()
    toy = load_suite(str(write_suite(tmp_path / "toy")[0]))
    asked = [benchmark for benchmark in toy.benchmarks if benchmark.name == "texts"]
    asked.append(RetrievalBenchmark(**NEEDLE | {"document_chars": [100], "items_per_depth": 12}))  # pyright: ignore
    recipe = SuiteRecipe(
        suite=toy.model_copy(update={"benchmarks": asked}), limit=None, num_threads=1, rollouts="in_process"
    )
    files = list_named(str(tmp_path), {"texts.jsonl": "texts"})
    made = {
        name: commit(
            store,
            evaluate_suite,
            checkpoint=checkpoint(store, name),
            files=files,
            recipe=recipe,
            resources=EVALUATION_RESOURCES,
        )
        for name in ("random", "trained")
    }
    assert made["trained"].record.num_items == {"texts": len({each["text"] for each in texts}), "needle": 24}
    bounds = {"texts": BenchmarkBound(worst=20.0, margin=0.1), "needle": BenchmarkBound(worst=0.0, margin=0.2)}
    decision = commit(
        store,
        decide_suite,
        evaluation=made["random"],
        champion_evaluation=made["trained"],
        anchors=Anchors({}),
        recipe=SuiteGateRecipe(bounds=bounds),
    ).record
    (reason,) = decision.refusals
    assert reason.startswith("bits_per_byte of benchmark texts differs from the champion's by +")
    shown = suite_table(made["trained"])
    assert QUOTED not in shown, "nobody states a figure of these"
    for expected in (
        "bits_per_byte",
        "100 characters",
        f"{made['trained'].record.figures['texts']['bits_per_byte']:.4f}",
    ):
        assert expected in shown


@pytest.mark.parametrize(
    ("suite", "bounds", "message"),
    [
        ("likelihood", {"mmlu"}, "must have a bound for each benchmark of suite likelihood and no other"),
        ("agents", {"bfcl", "swebench_lite", "swebench_verified", "x"}, r"no other .*: correct x"),
        (
            "agents",
            {"bfcl", "swebench_lite", "swebench_verified"},
            r"benchmark bfcl of suite agents .* reads agent/bfcl\.jsonl\.gz, which the run's data",
        ),
        ("nothing", {"x"}, "no suite 'nothing'"),
    ],
)
def test_a_suite_that_the_run_cannot_ask_is_refused_before_anything_runs(suite, bounds, message):
    scale = load_scale("micro")
    wanted = ReleaseSuite(name=suite, limit=None, bounds={name: BenchmarkBound(worst=0, margin=1) for name in bounds})
    evaluation = scale.evaluation.model_copy(update={"suite": wanted})
    with pytest.raises(ValueError, match=message):
        find_suite_files(scale.model_copy(update={"evaluation": evaluation}), SourceListing(()))


@pytest.fixture
def judge(store, monkeypatch):
    """flows.assess_suite without Prefect: the answers to the suite are planned by the checkpoint's name."""

    @step(content=(SUITE_FILE, "suite.items.jsonl"))
    def planned(*, checkpoint, files, recipe, resources, output: Output) -> SuiteEvaluation:
        return write_planned(output.path(SUITE_FILE), {"needle": right_answers(float(checkpoint.record.name))})

    def run_step(run, asked, *, stage, job=None, **given):
        stages.append(stage)
        return commit(store, planned if asked is evaluate_suite else asked, **given)

    stages: list[str] = []
    monkeypatch.setattr(assess_suite, "run_step", run_step)
    monkeypatch.setattr(assess_suite, "TrainedCheckpoint", Weights)
    monkeypatch.setattr(assess_suite, "load_suite", lambda name: load_suite("smoke"))
    wanted = ReleaseSuite(name="smoke", limit=None, bounds={"needle": BenchmarkBound(worst=0.3, margin=0.2)})
    scale = load_scale("micro")
    scale = scale.model_copy(update={"evaluation": scale.evaluation.model_copy(update={"suite": wanted})})
    run = Run(scale, Home(store.root), store, "", "", StageLog(), SourceListing(()))

    def judged(share, champion=None, tags=None, anchor=None):
        stages.clear()
        reigning = None if champion is None else version(champion, tags or {})
        anchors = {} if anchor is None else {"benchmark_needle": version(anchor, {}), "pass_at_1": version(0.1, {})}
        candidate = weights(share)
        answered = assess_suite.answer_suite(run, candidate)
        rivals = Rivals(reigning, anchors)
        suite = assess_suite.judge_suite(run, candidate, answered, rivals, ServedFigures(figures={}))
        assert suite is not None
        return suite.decision, list(stages)

    def version(share, tags):
        made = weights(share)
        return RegisteredVersion("1", {DIGEST_TAG: made.digest, KEY_TAG: made.key, **tags})

    def weights(share):
        @step(content=())
        def train_phase(*, output: Output) -> Weights:
            return Weights(name=str(share))

        return commit(store, train_phase, str(share))

    return judged


class Weights(Record):
    name: str


def test_the_flow_asks_candidate_champion_and_anchor_and_keeps_the_champions_own_decision(judge):
    first, stages = judge(0.8)
    assert first.record.accepted and stages == ["evaluate suite", "gate suite"]
    worse, stages = judge(0.5, champion=0.8)
    assert stages == ["evaluate suite", "evaluate suite of champion", "gate suite"]
    assert worse.record.refusals[0].startswith("accuracy of benchmark needle differs from the champion's by -0.3000")
    again, stages = judge(0.8, champion=0.8, tags={SUITE_TAG: first.key})
    assert again.digest == first.digest and stages == ["evaluate suite"]
    other, stages = judge(0.8, champion=0.8, tags={SUITE_TAG: worse.key})
    assert other.record.accepted and stages == ["evaluate suite", "gate suite"], "that decision is on other answers"
    below, stages = judge(0.75, champion=0.8, anchor=1.0)
    assert stages[1:] == ["evaluate suite of champion", "evaluate suite of anchor_benchmark_needle", "gate suite"]
    assert below.record.refusals[0].startswith("accuracy of benchmark needle differs from the anchor's by -0.2500")
    unjudged, stages = judge(0.2, champion=0.2)
    assert unjudged.record.refusals == ("accuracy of benchmark needle 0.2000, at least 0.3 needed",)
    assert stages == ["evaluate suite", "gate suite"]
