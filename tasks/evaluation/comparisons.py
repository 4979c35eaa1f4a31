"""Compares a candidate with another checkpoint on the same items: non-inferiority by the paired 95 % interval.

A bound is held where the interval excludes a loss of the margin or more. It is broken where it does not and the whole
interval is on the worse side. Otherwise it is undecided, which also refuses: too few items prove nothing. The suite may
hold fewer than MIN_ITEMS independent items of a domain, or of multiple choice. Such a figure is refused only where the
whole interval is beyond the margin: the user's text decides how many items there are, and the figure over all documents
contains them too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from infra.step import Record, digest_of
from tasks.evaluation.bounds import Bound, Outcome
from tasks.evaluation.intervals import MIN_ITEMS, Interval, paired_share_interval, ratio_interval, seeds_noise_floor
from tasks.evaluation.items import (
    ARITHMETIC,
    CHAT_PROBLEM,
    CHOICE,
    DOCUMENT,
    FAR,
    SAFETY,
    TASK,
    WORKED,
    Item,
    accuracy,
    accuracy_interval,
    by_domain,
    by_unit,
    group_of,
    seed_noise_of,
    text_once,
)

BITS_PER_BYTE = "bits_per_byte"
OWN_TEXTS = {"worked_bits_per_byte": WORKED, "far_bits_per_byte": FAR}
"""Figure -> kind of its items: bits per byte that are compared only for phases that are trained for them. A course of
others may forget how generated texts are written, and reads nothing as long."""
SHARES = {
    "arithmetic_accuracy": ARITHMETIC,
    "pass_at_1": CHAT_PROBLEM,
    "choice_accuracy": CHOICE,
    "agentic_success": TASK,
    "safe_answer_share": SAFETY,
}
"""Figure -> kind of its items."""
FIGURES = (BITS_PER_BYTE, *SHARES)
"""What candidates are compared on; bits per byte also domain by domain, multiple choice benchmark by benchmark, safe
answers also for harmful and harmless requests, tasks environment by environment."""
ANSWERED_KINDS = (CHAT_PROBLEM, ARITHMETIC)
"""What every format of a release is asked: problems in conversations with sampled answers, and as plain text with
greedy ones."""
SERVED_KINDS = (*ANSWERED_KINDS, CHOICE, SAFETY, TASK)
"""What the served file is asked: questions by likelihood, requests and tasks besides."""
ACCURACY = "accuracy"
BENCHMARK = "benchmark"
"""Kind of the items of a suite's benchmarks."""
NOUNS = {
    BENCHMARK: "items",
    DOCUMENT: "documents",
    ARITHMETIC: "problems",
    CHAT_PROBLEM: "problems",
    CHOICE: "questions",
    WORKED: "problems",
    FAR: "documents",
    SAFETY: "requests",
    TASK: "tasks",
}
GROUPS = {CHOICE: "benchmark {}", SAFETY: "{} requests", TASK: "tasks of {}"}
"""What the parts of a kind are called."""
FIXES = {
    BENCHMARK: "raise evaluation.suite.limit, or take a benchmark with more items",
    DOCUMENT: "raise data.recipe.split.test_share or evaluation.recipe.max_document_tokens, or bring more documents",
    ARITHMETIC: "raise data.recipe.synthesize.num_evaluation_problems",
    WORKED: "raise data.recipe.synthesize.num_evaluation_problems",
    FAR: "raise evaluation.recipe.far_text.num_documents, or bring more documents that are as long",
    CHAT_PROBLEM: "raise evaluation.recipe.num_chat_problems and data.recipe.synthesize.num_evaluation_problems",
    CHOICE: "raise evaluation.recipe.num_choice_items, or bring more questions",
    SAFETY: "raise evaluation.recipe.num_safety_prompts, or bring more requests",
    TASK: "raise data.recipe.synthesize.num_evaluation_tasks",
}
POWER = 2
"""Factor on the number of items whose interval is as wide as the margin: a candidate that is equal to the other then
passes four times in five (the square of 1 + 0.84 / 1.96)."""


@dataclass(frozen=True)
class Difference:
    """Candidate minus other in one figure."""

    value: float
    interval: Interval
    num_items: int
    """Independent ones."""
    sign: int
    """1 where more is better, -1 where less is."""
    noise_floor: float = 0.0
    """What the figure differs by where nothing but chance does: of sampled answers the difference that two runs with
    other seeds exceed one time in twenty, of greedy ones the share of items that another engine decides otherwise."""

    @property
    def gain(self) -> Interval:
        """The interval, with its sign turned so that more is better."""
        lower, upper = self.interval
        return (lower, upper) if self.sign > 0 else (-upper, -lower)

    @property
    def is_better(self) -> bool:
        """Beyond the interval and the noise floor."""
        return self.gain[0] > 0 and abs(self.value) > self.noise_floor

    @property
    def is_worse(self) -> bool:
        """Beyond the interval and the noise floor."""
        return self.gain[1] < 0 and abs(self.value) > self.noise_floor


@dataclass(frozen=True)
class Compared:
    """One figure, or a part of it, a domain or a benchmark, as it was compared."""

    figure: str
    kind: str
    difference: Difference
    is_required: bool
    """Whether the bound refuses where there are too few items."""


def measured_figures(items: Sequence[Item]) -> tuple[str, ...]:
    """Those of FIGURES that an evaluation has items of."""
    kinds = {item.kind for item in items}
    return tuple(figure for figure in FIGURES if SHARES.get(figure, DOCUMENT) in kinds)


def compare(figure: str, items: Sequence[Item], others: Sequence[Item], noise_floor: float = 0.0) -> list[Compared]:
    """The figure first, then its parts: every domain of bits per byte, every benchmark of multiple choice where there
    are several, harmful and harmless requests, tasks of every environment. Nothing for a kind without items.
    `noise_floor` is the figure's own where it does not come from seeds only. Documents must be finite."""
    if figure in OWN_TEXTS:
        kind = OWN_TEXTS[figure]
        ours, theirs = ([item for item in side if item.kind == kind] for side in (items, others))
        return [Compared(figure, kind, bits_difference(ours, theirs), kind == WORKED)] if ours else []
    if figure != BITS_PER_BYTE:
        kind = SHARES[figure]
        ours, theirs = ([item for item in side if item.kind == kind] for side in (items, others))
        parts = _compare_groups(figure, ours, theirs) if kind in GROUPS else []
        whole = [Compared(figure, kind, _share_difference(ours, theirs, noise_floor), kind != CHOICE)] if ours else []
        return [*whole, *parts]
    other_domains = by_domain(others, DOCUMENT)
    domains = {name: (own, other_domains[name]) for name, own in by_domain(items, DOCUMENT).items()}
    return [
        Compared(figure, DOCUMENT, bits_difference(text_once(items), text_once(others)), True),
        *(
            Compared(f"{figure} of domain {name}", DOCUMENT, bits_difference(*pair), False)
            for name, pair in domains.items()
        ),
    ]


def _compare_groups(figure: str, ours: Sequence[Item], theirs: Sequence[Item]) -> list[Compared]:
    """Benchmarks, harmful and harmless requests, or environments. Raises ValueError where one side lacks a group of the
    other."""
    sides: list[dict[str, list[Item]]] = [{}, {}]
    for side, items in zip(sides, (ours, theirs), strict=True):
        for item in items:
            side.setdefault(group_of(item), []).append(item)
    kind, (one, other) = SHARES[figure], sides
    if missing := sorted(set(one) ^ set(other)):
        name = GROUPS[kind].format(missing[0])
        raise ValueError(f"{name} was asked of one checkpoint only: evaluate both on one suite")
    if len(one) < 2:
        return []
    return [
        Compared(f"{figure} of {GROUPS[kind].format(name)}", kind, _share_difference(one[name], other[name]), False)
        for name in sorted(one)
    ]


def bits_difference(ours: Sequence[Item], theirs: Sequence[Item]) -> Difference:
    """Difference in bits per byte: summed bits over summed bytes, so that long documents weigh as they do in the
    figure."""
    units = _paired(ours, theirs)
    extra_bits = [sum(our.bits - other.bits for our, other in unit) for unit in units]
    num_bytes = [sum(our.num_bytes for our, _ in unit) for unit in units]
    assert math.isfinite(sum(extra_bits)), "texts that are not finite cannot be compared"
    return Difference(sum(extra_bits) / sum(num_bytes), ratio_interval(extra_bits, num_bytes), len(units), -1)


def _share_difference(ours: Sequence[Item], theirs: Sequence[Item], noise_floor: float = 0.0) -> Difference:
    """Difference in the mean share of right answers."""
    units = _paired(ours, theirs)
    differences = [sum(our.score - other.score for our, other in unit) for unit in units]
    interval = paired_share_interval(differences, [len(unit) for unit in units])
    by_seeds = seeds_noise_floor(seed_noise_of(ours), seed_noise_of(theirs))
    return Difference(sum(differences) / len(ours), interval, len(units), 1, max(by_seeds, noise_floor))


def _paired(ours: Sequence[Item], theirs: Sequence[Item]) -> list[list[tuple[Item, Item]]]:
    """Pairs of items of the same question; those of one unit in one list."""
    others = {item.item_id: item for item in theirs}
    assert len(others) == len(theirs) == len(ours), "equal suite digests, different items"
    return [[(item, others[item.item_id]) for item in unit] for unit in by_unit(ours)]


def judge(compared: Compared, against: str, margin: float, is_own: bool = False, must_gain: bool = False) -> Bound:
    """Whether the items show that the candidate is not worse than another by the margin; with `is_own` also that it is
    not worse beyond the interval, with `must_gain` that it is better beyond it."""
    difference = compared.difference
    outcome, reason = _decide(compared, margin, is_own)
    if is_own and outcome == "held" and not difference.is_better:
        reason += "; the phase is trained for this figure, which is no better beyond the interval"
        outcome = "broken" if must_gain else outcome
    end, limit = (
        ("lower end must stay above", -margin) if difference.sign > 0 else ("upper end must stay below", margin)
    )
    (lower, upper), noun = difference.interval, NOUNS[compared.kind]
    is_bounded = math.isfinite(lower + upper)
    interval = f" [{lower:+.4f}, {upper:+.4f}]" if is_bounded else ""
    floor = f", noise floor {difference.noise_floor:.4f}" if difference.noise_floor else ""
    measured = f"{difference.value:+.4f}{interval} (95 %, {difference.num_items} independent {noun}{floor})"
    return Bound(
        figure=compared.figure,
        against=against,
        value=round(difference.value, 6),
        is_own=is_own,
        interval=(round(lower, 6), round(upper, 6)) if is_bounded else None,
        limit=limit,
        num_items=difference.num_items,
        noise_floor=round(difference.noise_floor, 6),
        outcome=outcome,
        is_refusal=outcome == "broken" or (outcome == "undecided" and compared.is_required),
        sentence=f"{compared.figure} differs from the {against}'s by {measured}, the {end} {limit:+}{reason}",
    )


def _decide(compared: Compared, margin: float, is_own: bool) -> tuple[Outcome, str]:
    """(outcome, what the bound's sentence says about it)."""
    difference, noun = compared.difference, NOUNS[compared.kind]
    lower, upper = difference.gain
    if difference.num_items < MIN_ITEMS:
        if upper < -margin:
            return "broken", ""
        needed = f": undecided, {difference.num_items} of the {MIN_ITEMS} independent {noun} that a comparison needs"
        return "undecided", f"{needed}: {FIXES[compared.kind]}" if compared.is_required else needed
    if is_own and difference.is_worse:
        return (
            "broken",
            "; and the phase is trained for this figure: worse beyond the interval is refused at any margin",
        )
    if lower > -margin:
        return "held", ""
    if difference.is_worse:
        return "broken", ""
    half = (upper - lower) / 2
    enough = (
        f", about {math.ceil(POWER * difference.num_items * (half / margin) ** 2):,} independent {noun} decide it"
        if math.isfinite(half)
        else ""
    )
    return "undecided", f": undecided{enough}: {FIXES[compared.kind]}"


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
    """Every figure of SERVED_KINDS that the items have, by its name; `others` may hold more items. Raises KeyError
    where they lack one."""
    by_id = {item.item_id: item for item in others}
    before = [by_id[item.item_id] for item in items]
    kinds = {item.kind for item in items}
    return {
        figure: _change(figure, kind, items, before)
        for figure, kind in SHARES.items()
        if kind in SERVED_KINDS and kind in kinds
    }


def _change(figure: str, kind: str, items: Sequence[Item], others: Sequence[Item]) -> FigureChange:
    compared, *_ = compare(figure, items, others)
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
