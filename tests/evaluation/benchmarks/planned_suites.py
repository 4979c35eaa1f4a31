"""Results of a suite with planned scores, for tests of decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.evaluation.benchmarks.benchmark_tasks import ItemOutcome
from tasks.evaluation.benchmarks.evaluate_suite import SuiteEvaluation
from tasks.evaluation.benchmarks.suite_results import (
    FORMAT,
    BenchmarkResult,
    SuiteResult,
    encode_items,
    figures_of,
    items_digest,
    write_result,
)

NUM_ITEMS = 40


def right_answers(share: float, num_items: int = NUM_ITEMS) -> list[float]:
    """Scores of items, the first ones right."""
    return [float(number < round(share * num_items)) for number in range(num_items)]


def write_planned(
    path: Path,
    planned: Mapping[str, Sequence[float]],
    figure: str = "accuracy",
    num_samples: int = 1,
    output: str | None = "a",
) -> SuiteEvaluation:
    """Write suite.json and its items: by benchmark the score of every item, of so many samples; without `output` as
    judged by likelihood."""
    outcomes = {
        name: [_outcome(name, number, figure, score, num_samples, output) for number, score in enumerate(scores)]
        for name, scores in planned.items()
    }
    items = encode_items([each for answered in outcomes.values() for each in answered])
    benchmarks = tuple(
        BenchmarkResult(
            name=name,
            settings={},
            files=(),
            num_records=len(answered),
            left_out={},
            num_items=len(answered),
            items_digest=items_digest(answered),
            figures=figures_of(answered),
            harness={},
        )
        for name, answered in outcomes.items()
    )
    result = SuiteResult(
        format=FORMAT,
        target="planned",
        engine="none",
        suite="planned",
        settings={},
        versions={},
        items_sha256=hashlib.sha256(items).hexdigest(),
        benchmarks=benchmarks,
    )
    write_result(path, result, items)
    return SuiteEvaluation(
        checkpoint_digest="planned",
        figures={each.name: {figure.name: figure.value for figure in each.figures} for each in benchmarks},
        num_items={each.name: each.num_items for each in benchmarks},
    )


def _outcome(
    benchmark: str, number: int, figure: str, score: float, num_samples: int, output: str | None
) -> ItemOutcome:
    return ItemOutcome(
        benchmark=benchmark,
        item_id=f"{number:016x}",
        example_ids=(),
        prompt=f"question {number}",
        choices=(),
        expected="a",
        output=output,
        num_samples=num_samples,
        log_probabilities=(),
        scores={figure: score},
        num_bytes=1,
    )
