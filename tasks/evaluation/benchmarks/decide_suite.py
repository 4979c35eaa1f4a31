"""Step: accepts or refuses a release by its figures on a suite: a bound on each, then the paired comparison with the
champion and with the anchor of each benchmark on the same items.

In: suite.json with its items of the candidate and, where there are any, of the champion and of the anchors; figures of
the file that is served. Out: decision.json. A refusal is a result with reasons; a figure that is missing, and results
of other items, raise.

A difference counts only beyond interval and noise floor (comparisons.Difference): of sampled answers that of the seeds;
of others what the served file's engine decides otherwise than ours in the evaluation's own questions by likelihood, or
in its greedy answers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.evaluation.benchmarks.benchmark_change import judged_figure
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE, SuiteEvaluation
from tasks.evaluation.bounds import Verdict
from tasks.evaluation.comparisons import ACCURACY, BENCHMARK, BITS_PER_BYTE, Compared, ServedFigures, judge
from tasks.evaluation.decide_gate import ANCHOR, CHAMPION, Anchors, GateDecision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from configs.schema import SuiteGateRecipe


def anchored_figure(benchmark: str) -> str:
    """The name under which the best promoted version so far in a benchmark is anchored."""
    return f"benchmark_{benchmark}"


@step(content=("decision.json",), distributions=("numpy", "scipy"))
def decide_suite(
    *,
    evaluation: Artifact[SuiteEvaluation],
    champion_evaluation: Artifact[SuiteEvaluation] | None,
    anchors: Anchors[SuiteEvaluation],
    recipe: SuiteGateRecipe,
    output: Output,
    served: ServedFigures | None = None,
) -> GateDecision:
    """`served` is None where no file is served. Raises ValueError where a benchmark with a bound was not asked of one
    of them, or has no figure to bound."""
    verdict = Verdict()
    for name, bound in recipe.bounds.items():
        figure, value = _judged_figure(evaluation.record, name)
        if figure == BITS_PER_BYTE:
            verdict.ceiling(f"{figure} of benchmark {name}", value, bound.worst)
        else:
            verdict.floor(f"{figure} of benchmark {name}", value, bound.worst)
    if champion_evaluation is not None:
        for name, compared in _compare(evaluation, champion_evaluation, recipe.bounds, served).items():
            verdict.bounds.append(judge(compared, CHAMPION, recipe.bounds[name].margin))
    anchored = tuple(
        anchored_figure(name)
        for name in recipe.bounds
        if _takes_over(name, evaluation, champion_evaluation, anchors, recipe, verdict, served)
    )
    unanchored = [name for name in map(anchored_figure, recipe.bounds) if name not in {*anchors.evaluations, *anchored}]
    decision = GateDecision(
        accepted=verdict.is_held,
        bounds=tuple(verdict.bounds),
        candidate_digest=evaluation.digest,
        champion_digest="" if champion_evaluation is None else champion_evaluation.digest,
        anchor_digests={figure: anchor.digest for figure, anchor in anchors.evaluations.items()},
        anchored=anchored,
        champion_anchored=() if champion_evaluation is None else tuple(unanchored),
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision


def _judged_figure(evaluation: SuiteEvaluation, benchmark: str) -> tuple[str, float]:
    """(accuracy or bits per byte, its value) of a benchmark."""
    if benchmark not in evaluation.figures:
        raise ValueError(
            f"benchmark {benchmark} has a bound in evaluation.suite.bounds, and checkpoint "
            f"{evaluation.checkpoint_digest[:12]} was not asked it: evaluate it on the suite that holds it"
        )
    figures = evaluation.figures[benchmark]
    name = judged_figure(figures)
    if not name:
        raise ValueError(
            f"benchmark {benchmark} has a bound in evaluation.suite.bounds, but no {ACCURACY} or {BITS_PER_BYTE}, as "
            f"patches without a tree: take the benchmark out of the suite"
        )
    return name, figures[name]


def _takes_over(
    benchmark: str,
    evaluation: Artifact[SuiteEvaluation],
    champion_evaluation: Artifact[SuiteEvaluation] | None,
    anchors: Anchors[SuiteEvaluation],
    recipe: SuiteGateRecipe,
    verdict: Verdict,
    served: ServedFigures | None,
) -> bool:
    """Whether the candidate becomes the benchmark's anchor: there is none, or it is better beyond interval and noise.
    A benchmark that was added while the champion reigns has none: there the champion is compared. An anchor that is the
    champion, or the candidate itself, is not judged a second time."""
    anchor = anchors.evaluations.get(anchored_figure(benchmark), champion_evaluation)
    if anchor is None or anchor.digest == evaluation.digest:
        return anchor is None
    bound = recipe.bounds[benchmark]
    compared = _compare(evaluation, anchor, {benchmark: bound}, served)[benchmark]
    if champion_evaluation is None or champion_evaluation.digest != anchor.digest:
        verdict.bounds.append(judge(compared, ANCHOR, bound.margin))
    return compared.difference.is_better


def _compare(
    evaluation: Artifact[SuiteEvaluation],
    other: Artifact[SuiteEvaluation],
    benchmarks: Iterable[str],
    served: ServedFigures | None,
) -> dict[str, Compared]:
    """The candidate minus another on the same items, by benchmark."""
    from tasks.evaluation.benchmarks.suite_changes import benchmark_difference
    from tasks.evaluation.benchmarks.suite_results import paired_items

    pairs = paired_items(other.path(SUITE_FILE), evaluation.path(SUITE_FILE))
    compared = {}
    for name in benchmarks:
        figure, _ = _judged_figure(other.record, name)
        difference = benchmark_difference(figure, pairs[name], served)
        compared[name] = Compared(f"{figure} of benchmark {name}", BENCHMARK, difference, True)
    return compared
