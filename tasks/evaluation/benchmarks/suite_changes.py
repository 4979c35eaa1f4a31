"""What two results of a suite differ by, benchmark by benchmark, on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.evaluation.benchmarks.benchmark_change import (
    BY_LIKELIHOOD,
    GREEDY,
    BenchmarkChange,
    greedy_noise_floor,
    judged_figure,
)
from tasks.evaluation.benchmarks.suite_results import (
    Figure,
    ItemPair,
    bounded,
    paired_difference,
    paired_items,
    read_result,
)
from tasks.evaluation.comparisons import BITS_PER_BYTE, Difference, FigureChange
from tasks.evaluation.intervals import seed_noise, seeds_noise_floor

if TYPE_CHECKING:
    from tasks.evaluation.comparisons import ServedFigures


def benchmark_difference(figure: str, pairs: Sequence[ItemPair], served: ServedFigures | None) -> Difference:
    """Second minus first of each pair, with its noise floor."""
    value, interval = paired_difference(figure, pairs)
    kind = answered_as(figure, pairs)
    floor = greedy_noise_floor(figure, kind, served) if kind else _seeds_floor(figure, pairs)
    return Difference(value, interval, len(pairs), -1 if figure == BITS_PER_BYTE else 1, floor)


def answered_as(figure: str, pairs: Sequence[ItemPair]) -> str:
    """BY_LIKELIHOOD or GREEDY; empty where answers were sampled with several seeds."""
    if figure != BITS_PER_BYTE and any(each.num_samples > 1 for pair in pairs for each in pair):
        return ""
    return BY_LIKELIHOOD if pairs[0][0].output is None else GREEDY


def _seeds_floor(figure: str, pairs: Sequence[ItemPair]) -> float:
    sides = [[(each.scores[figure], each.num_samples) for each in side] for side in zip(*pairs, strict=True)]
    return seeds_noise_floor(
        *(seed_noise([round(score * tried) for score, tried in side], [tried for _, tried in side]) for side in sides)
    )


def suite_changes(before_path: Path, after_path: Path) -> dict[str, BenchmarkChange]:
    """Every benchmark with a judged figure, by its name. Raises ValueError for results of other items."""
    pairs = paired_items(before_path, after_path)
    before, after = (
        {each.name: [figure for figure in each.figures if not figure.part] for each in read_result(path)[0].benchmarks}
        for path in (before_path, after_path)
    )
    changes = {}
    for benchmark, figures in before.items():
        if name := judged_figure([figure.name for figure in figures]):
            sides = [next(figure for figure in side[benchmark] if figure.name == name) for side in (before, after)]
            changes[benchmark] = _change(name, sides[0], sides[1], pairs[benchmark])
    return changes


def _change(name: str, before: Figure, after: Figure, pairs: Sequence[ItemPair]) -> BenchmarkChange:
    difference = benchmark_difference(name, pairs, None)
    change = FigureChange(
        value=round(after.value, 6),
        interval=after.interval,
        before=round(before.value, 6),
        change=round(difference.value, 6),
        change_interval=bounded(difference.interval),
        noise_floor=round(difference.noise_floor, 6),
        disagreement=round(sum(one.scores[name] != other.scores[name] for one, other in pairs) / len(pairs), 6),
        num_items=len(pairs),
        num_answers=sum(other.num_samples for _, other in pairs),
        is_worse=difference.is_worse,
    )
    return BenchmarkChange(figure=name, answered_as=answered_as(name, pairs), change=change)
