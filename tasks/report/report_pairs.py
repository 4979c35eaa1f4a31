"""The report about preference pairs: accuracy before and after each phase that trained on them, and calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.evaluation.evaluate_pairs import CHANCE
from tasks.report.report_page import folded, paragraph, table, with_note

if TYPE_CHECKING:
    from tasks.evaluation.evaluate_pairs import PairEvaluation
    from tasks.report.report_inputs import ReportedPhases

NOTE = (
    "Share of held-out pairs whose preferred answer is put first, with its 95 % interval. Before a phase it is 0.5: a "
    "fresh scalar head knows nothing, and DPO starts from its own reference."
)


def pairs_section(phases: ReportedPhases) -> str:
    """Empty where no phase trained on pairs."""
    judged = [(model.name, model.pairs.record) for model in phases.reward_models]
    judged += [(phase.name, phase.pairs.record) for phase in phases if phase.pairs is not None]
    if not judged:
        return ""
    columns = ("phase", "scored by", "pairs", "before", "after", "calibration error")
    rows = [
        (
            name,
            "a scalar head" if record.is_scored else "the implicit reward",
            record.num_pairs,
            f"{CHANCE:.4f}",
            with_note(f"{record.pair_accuracy:.4f}", f"[{record.interval[0]:.4f}, {record.interval[1]:.4f}]"),
            f"{record.calibration_error:.4f}",
        )
        for name, record in judged
    ]
    return table(columns, rows) + paragraph(NOTE, "soft") + "".join(_details(*each) for each in judged)


def _details(name: str, record: PairEvaluation) -> str:
    """Certainty against accuracy, and the accuracy of every collection."""
    bins = [(f"{each.certainty:.4f}", f"{each.accuracy:.4f}", each.num_pairs) for each in record.bins]
    collections = [(collection, f"{value:.4f}") for collection, value in record.accuracy_by_collection]
    return folded(
        f"Pairs of {name}: calibration and collections",
        table(("mean certainty", "accuracy", "pairs"), bins) + table(("collection", "accuracy"), collections),
    )
