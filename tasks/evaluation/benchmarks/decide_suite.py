"""Step: accepts or refuses a release by its figures on a suite: a bound on each, then the paired comparison with the
champion on the same items.

In: suite.json with its items of the candidate and, where there is one, of the champion. Out: decision.json. A refusal
is a result with reasons; a figure that is missing, and results of other items, raise.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE, SuiteEvaluation
from tasks.evaluation.bounds import Verdict
from tasks.evaluation.comparisons import ACCURACY, BENCHMARK, BITS_PER_BYTE, Compared, Difference, judge
from tasks.evaluation.decide_gate import CHAMPION, GateDecision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from configs.schema import SuiteGateRecipe
    from tasks.evaluation.benchmarks.suite_results import ItemPair


@step(content=("decision.json",), distributions=("numpy", "scipy"))
def decide_suite(
    *,
    evaluation: Artifact[SuiteEvaluation],
    champion_evaluation: Artifact[SuiteEvaluation] | None,
    recipe: SuiteGateRecipe,
    output: Output,
) -> GateDecision:
    """Raises ValueError where a benchmark with a bound was not asked, or has no figure to bound."""
    verdict = Verdict()
    for name, bound in recipe.bounds.items():
        figure, value = _judged_figure(evaluation.record, name)
        if figure == BITS_PER_BYTE:
            verdict.ceiling(f"{figure} of benchmark {name}", value, bound.worst)
        else:
            verdict.floor(f"{figure} of benchmark {name}", value, bound.worst)
    if champion_evaluation is not None:
        from tasks.evaluation.benchmarks.suite_results import paired_items

        pairs = paired_items(champion_evaluation.path(SUITE_FILE), evaluation.path(SUITE_FILE))
        for name, bound in recipe.bounds.items():
            figure, _ = _judged_figure(champion_evaluation.record, name)
            verdict.bounds.append(judge(_compared(name, figure, pairs[name]), CHAMPION, bound.margin))
    decision = GateDecision(
        accepted=verdict.is_held,
        bounds=tuple(verdict.bounds),
        candidate_digest=evaluation.digest,
        champion_digest="" if champion_evaluation is None else champion_evaluation.digest,
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
    name = next((name for name in (ACCURACY, BITS_PER_BYTE) if name in figures), "")
    if not name:
        raise ValueError(
            f"benchmark {benchmark} has a bound in evaluation.suite.bounds, but no {ACCURACY} or {BITS_PER_BYTE}, as "
            f"patches without a tree: take the benchmark out of the suite"
        )
    return name, figures[name]


def _compared(benchmark: str, figure: str, pairs: Sequence[ItemPair]) -> Compared:
    from tasks.evaluation.benchmarks.suite_results import paired_difference

    value, interval = paired_difference(figure, pairs)
    difference = Difference(value, interval, len(pairs), -1 if figure == BITS_PER_BYTE else 1)
    return Compared(f"{figure} of benchmark {benchmark}", BENCHMARK, difference, True)
