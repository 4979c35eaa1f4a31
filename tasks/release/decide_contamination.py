"""Step: accepts or refuses a release by how many evaluation items its training data still quotes.

An item that was trained on may be answered from memory. A source of which a share of items was trained on can
therefore show at most that share too much: the bound is below the margins by which a candidate may differ.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.evaluation.bounds import Verdict
from tasks.evaluation.decide_gate import GateDecision

if TYPE_CHECKING:
    from configs.schema import ContaminationBound
    from tasks.data.contamination.measure_contamination import MeasuredContamination


@step(content=("decision.json",))
def decide_contamination(
    *, contamination: Artifact[MeasuredContamination], recipe: ContaminationBound, output: Output
) -> GateDecision:
    """A refusal is a result. The source with the largest share decides."""
    measured, verdict = contamination.record, Verdict()
    verdict.ceiling(
        "share of an evaluation source that training data quotes",
        measured.worst_share,
        recipe.max_contaminated_share,
        _remark(measured),
    )
    decision = GateDecision(
        accepted=verdict.is_held, bounds=tuple(verdict.bounds), candidate_digest=contamination.digest
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision


def _remark(measured: MeasuredContamination) -> str:
    where = ", ".join(f"{count:,} in a {kind}" for kind, count in measured.contaminated_by_kind.items())
    return (
        f": {measured.worst_source_contaminated:,} of {measured.worst_source_items:,} items of "
        f"{measured.worst_source or 'no source'}; of all {measured.num_items:,} items {where or 'none'} "
        f"(contaminated_items.parquet of measure_contamination names each)"
    )
