"""Accept or refuse quantized files: each may lose only so many bits per byte against the F32 file, as llama.cpp measured both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, step
from tasks.evaluation.decide_gate import GateDecision

if TYPE_CHECKING:
    from configs.schema import ReleaseRecipe
    from tasks.release.evaluate_gguf import GgufEvaluation

REFERENCE_TYPE = "F32"


@step(content=("decision.json",))
def decide_release(*, gguf_evaluation: Artifact[GgufEvaluation], recipe: ReleaseRecipe, output: Output) -> GateDecision:
    """A refusal is a result. Raises ValueError where no F32 file was measured."""
    measured = gguf_evaluation.record.bits_per_byte
    if REFERENCE_TYPE not in measured:
        raise ValueError(f"release.recipe.gguf_types is {list(measured)}: {REFERENCE_TYPE} must be among them, the others are held to it")
    reasons, figures, accepted = [], {}, True
    reference = measured[REFERENCE_TYPE]
    for gguf_type, bits in measured.items():
        if bits is None or reference is None:
            accepted = False
            reasons.append(f"refused: bits per byte of {gguf_type if bits is None else REFERENCE_TYPE} is not finite")
            continue
        figures[f"bits_per_byte_{gguf_type}"] = bits
        if gguf_type != REFERENCE_TYPE:
            loss = round(bits - reference, 6)
            figures[f"loss_{gguf_type}"] = loss
            held = loss <= recipe.max_quantization_bits_per_byte
            accepted &= held
            reasons.append(
                f"{'' if held else 'refused: '}{gguf_type} has {bits:.4f} bits per byte, {loss:+.4f} against {REFERENCE_TYPE}, "
                f"at most {recipe.max_quantization_bits_per_byte:+} allowed"
            )
    decision = GateDecision(
        accepted=accepted, reasons=tuple(reasons), figures=figures, candidate_digest=gguf_evaluation.digest
    )  # fmt: skip
    output.path("decision.json").write_text(json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")
    return decision
