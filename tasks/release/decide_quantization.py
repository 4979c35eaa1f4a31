"""Step: accepts or refuses quantized files by how many bits per byte each loses against the F32 file.

llama.cpp measured both.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.evaluation.bounds import Verdict
from tasks.evaluation.decide_gate import GateDecision

if TYPE_CHECKING:
    from configs.schema import ReleaseRecipe
    from tasks.release.evaluate_gguf import GgufEvaluation

REFERENCE_TYPE = "F32"


@step(content=("decision.json",))
def decide_quantization(
    *, gguf_evaluation: Artifact[GgufEvaluation], recipe: ReleaseRecipe, output: Output
) -> GateDecision:
    """A refusal is a result. Raises ValueError where no F32 file was measured."""
    measured = gguf_evaluation.record.bits_per_byte
    if REFERENCE_TYPE not in measured:
        raise ValueError(
            f"release.recipe.gguf_types is {list(measured)}: {REFERENCE_TYPE} must be among them: the others are "
            f"measured against it"
        )
    verdict = Verdict()
    finite = {gguf_type: math.nan if bits is None else bits for gguf_type, bits in measured.items()}
    verdict.finite(f"bits per byte of {REFERENCE_TYPE}", finite[REFERENCE_TYPE])
    for gguf_type in measured:
        if gguf_type != REFERENCE_TYPE:
            loss = round(finite[gguf_type] - finite[REFERENCE_TYPE], 6)
            verdict.ceiling(
                f"bits per byte that {gguf_type} loses against {REFERENCE_TYPE}",
                loss,
                recipe.max_quantization_bits_per_byte,
            )
    decision = GateDecision(
        accepted=verdict.is_held, bounds=tuple(verdict.bounds), candidate_digest=gguf_evaluation.digest
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision
