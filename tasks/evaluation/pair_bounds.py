"""The bounds of a gate on preference pairs: accuracy, calibration, and whether the phase gained over chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.evaluation.bounds import Bound, Outcome, Verdict
from tasks.evaluation.evaluate_pairs import CHANCE, PairEvaluation
from tasks.evaluation.intervals import MIN_ITEMS

if TYPE_CHECKING:
    from configs.schema import GateRecipe

PAIR_ACCURACY = "pair_accuracy"


def check_pairs(record: PairEvaluation, recipe: GateRecipe, verdict: Verdict) -> None:
    """Floor on the accuracy; of a reward model also a ceiling on its calibration error."""
    verdict.floor(PAIR_ACCURACY, record.pair_accuracy, recipe.min_pair_accuracy)
    if record.is_scored:
        verdict.ceiling("calibration_error", record.calibration_error, recipe.max_calibration_error)
    if recipe.own_figure == PAIR_ACCURACY:
        verdict.bounds.append(gain_over_chance(record, recipe.must_gain))


def gain_over_chance(record: PairEvaluation, must_gain: bool) -> Bound:
    """The phase starts at chance: worse than it beyond the interval is refused, no better only with `must_gain`."""
    lower, upper = (round(end - CHANCE, 6) for end in record.interval)
    outcome: Outcome = "held"
    reason = ""
    if record.num_pairs < MIN_ITEMS:
        outcome, reason = "undecided", f": undecided, {record.num_pairs} of the {MIN_ITEMS} pairs that it needs"
    elif upper < 0:
        outcome, reason = "broken", "; worse than chance beyond the interval is refused"
    elif lower <= 0:
        outcome = "broken" if must_gain else "held"
        reason = "; the phase is trained for this figure, which is no better beyond the interval"
    gain = record.pair_accuracy - CHANCE
    return Bound(
        figure=PAIR_ACCURACY,
        against="chance",
        value=round(gain, 6),
        interval=(lower, upper),
        limit=0.0,
        is_own=True,
        num_items=record.num_pairs,
        outcome=outcome,
        is_refusal=outcome == "broken" or (outcome == "undecided" and must_gain),
        sentence=(
            f"{PAIR_ACCURACY} differs from chance by {gain:+.4f} [{lower:+.4f}, {upper:+.4f}] (95 %, "
            f"{record.num_pairs} pairs){reason}"
        ),
    )
