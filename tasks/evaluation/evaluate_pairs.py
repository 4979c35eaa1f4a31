"""Step: a phase's scores of held-out preference pairs -> accuracy with its interval, and calibration.

The margin of a pair is the difference of a reward model's two scores, or for DPO beta times how much more than the
reference the policy prefers the preferred answer: the implicit reward. Before a DPO phase every margin is 0. Out:
margins.parquet (id, collection, margin), in the order of the ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.intervals import Interval, share_interval

if TYPE_CHECKING:
    from pathlib import Path

    from configs.schema import PairEvaluationRecipe
    from tasks.data.packing.pack_pairs import PackedPairs
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

CHANCE = 0.5
"""Accuracy of equal scores."""
NUM_BINS = 10


class CalibrationBin(Record):
    """The pairs of one range of certainty."""

    num_pairs: int
    certainty: float
    """Mean of sigmoid(|margin|)."""
    accuracy: float


class PairEvaluation(Record):
    num_pairs: int
    pair_accuracy: float
    """Share of pairs whose preferred answer has the higher score; a tie is half right."""
    interval: Interval
    """95 %."""
    mean_margin: float
    calibration_error: float
    """Expected calibration error: mean over the pairs of |certainty - accuracy| of their bin."""
    bins: tuple[CalibrationBin, ...]
    accuracy_by_collection: tuple[tuple[str, float], ...]
    """By name: a pattern of files is no name that a tracker takes."""
    is_scored: bool
    """Whether a reward model gave the scores."""


@step(content=("margins.parquet",), distributions=("pyarrow", "numpy", "scipy"))
def evaluate_pairs(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    pairs: Artifact[PackedPairs],
    recipe: PairEvaluationRecipe,
    output: Output,
) -> PairEvaluation:
    """Judge by the pairs to test by, which the phase scored at its end (tasks/training/loop/pair_scores.py)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    collections = pq.read_table(pairs.path("test.parquet"), columns=["id", "collection"]).to_pylist()
    differences = _differences(checkpoint.path("pairs/scores.parquet"))
    rows = [pair | {"margin": recipe.beta * differences[pair["id"]]} for pair in collections]
    pq.write_table(pa.Table.from_pylist(rows), output.path("margins.parquet"))
    margins = [row["margin"] for row in rows]
    bins = calibration_bins(margins)
    of_collection = {row["collection"]: [] for row in rows}
    for row in rows:
        of_collection[row["collection"]].append(is_right(row["margin"]))
    right = [is_right(margin) for margin in margins]
    lower, upper = share_interval(right, [1] * len(right))
    return PairEvaluation(
        num_pairs=len(rows),
        pair_accuracy=round(_mean(right), 6),
        interval=(round(max(lower, 0.0), 6), round(min(upper, 1.0), 6)),
        mean_margin=round(_mean(margins), 6),
        calibration_error=round(calibration_error(bins), 6),
        bins=tuple(bins),
        accuracy_by_collection=tuple((name, round(_mean(each), 6)) for name, each in sorted(of_collection.items())),
        is_scored=checkpoint.record.objective == "reward",
    )


def is_right(margin: float) -> float:
    """1 where the preferred answer is put first, 0.5 for a tie; a margin that is not finite is wrong."""
    return CHANCE if margin == 0 else float(margin > 0 and math.isfinite(margin))


def calibration_bins(margins: Sequence[float]) -> list[CalibrationBin]:
    """The pairs in NUM_BINS equal ranges of certainty, from 0.5 to 1; empty ranges are left out."""
    certainties = [1 / (1 + math.exp(-min(abs(margin), 700.0))) for margin in margins]
    numbers = [min(int((certainty - CHANCE) * 2 * NUM_BINS), NUM_BINS - 1) for certainty in certainties]
    bins = []
    for number in sorted(set(numbers)):
        members = [index for index, each in enumerate(numbers) if each == number]
        bins.append(
            CalibrationBin(
                num_pairs=len(members),
                certainty=round(_mean([certainties[index] for index in members]), 6),
                accuracy=round(_mean([is_right(margins[index]) for index in members]), 6),
            )
        )
    return bins


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Mean of |certainty - accuracy| over the pairs of all bins."""
    num_pairs = sum(each.num_pairs for each in bins)
    return sum(each.num_pairs * abs(each.certainty - each.accuracy) for each in bins) / num_pairs


def _differences(path: Path) -> dict[str, float]:
    """By how much the preferred answer's value is higher than under the reference, by the pair's id."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    ids = table.column("id").to_pylist()
    chosen, rejected, *before = (table.column(name).to_numpy() for name in table.column_names[1:])
    return dict(zip(ids, ((chosen - rejected) - (before[0] - before[1])).tolist(), strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
