"""What a figure of generated answers becomes in another format or engine, on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel

from infra.step import Record, digest_of
from tasks.evaluation.comparisons import SHARES, compare
from tasks.evaluation.intervals import Interval
from tasks.evaluation.items import ARITHMETIC, CHAT_PROBLEM, Item, accuracy, accuracy_interval

ANSWERED_KINDS = (CHAT_PROBLEM, ARITHMETIC)
"""What every format of a release is asked: problems in conversations with sampled answers, and as plain text with
greedy ones."""


class FigureChange(BaseModel):
    """One figure, beside the same of what the format was made from."""

    value: float
    interval: Interval | None
    """95 %; None where the items are too few for one, as below."""
    before: float
    change: float
    """Value minus before."""
    change_interval: Interval | None
    """Of the paired difference."""
    noise_floor: float
    """What the change would be by other seeds (comparisons.Difference); 0 for greedy answers."""
    disagreement: float
    """Share of the items that one side answered rightly more often than the other."""
    num_items: int
    num_answers: int
    is_worse: bool
    """Whether the change is a loss beyond its interval and the noise floor."""

    @property
    def is_sampled(self) -> bool:
        """Whether the items were answered with several seeds; else greedily."""
        return self.num_answers > self.num_items


class ServedFigures(Record):
    """The figures of the file that is served, computed by its engine, beside the checkpoint's own."""

    figures: dict[str, FigureChange]

    @property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json"))


def figure_changes(items: Sequence[Item], others: Sequence[Item]) -> dict[str, FigureChange]:
    """Every figure of ANSWERED_KINDS by its name; `others` may hold more items. Raises KeyError where they lack one."""
    by_id = {item.item_id: item for item in others}
    before = [by_id[item.item_id] for item in items]
    kinds = {item.kind for item in items}
    return {
        figure: _change(figure, kind, items, before)
        for figure, kind in SHARES.items()
        if kind in ANSWERED_KINDS and kind in kinds
    }


def _change(figure: str, kind: str, items: Sequence[Item], others: Sequence[Item]) -> FigureChange:
    (compared,) = compare(figure, items, others)
    difference, own = compared.difference, [item for item in items if item.kind == kind]
    scores = {item.item_id: item.score for item in others}
    return FigureChange(
        value=round(accuracy(items, kind), 6),
        interval=_bounded(accuracy_interval(items, kind)),
        before=round(accuracy(others, kind), 6),
        change=round(difference.value, 6),
        change_interval=_bounded(difference.interval),
        noise_floor=round(difference.noise_floor, 6),
        disagreement=round(sum(item.score != scores[item.item_id] for item in own) / len(own), 6),
        num_items=difference.num_items,
        num_answers=sum(item.num_samples for item in own),
        is_worse=difference.is_worse,
    )


def _bounded(interval: Interval) -> Interval | None:
    lower, upper = interval
    return (round(lower, 6), round(upper, 6)) if math.isfinite(lower + upper) else None
