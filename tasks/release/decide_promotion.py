"""Accept or refuse a release for the alias `champion`: every gate must have accepted it, every engine must compute the
trained model, the served one must be it, and nobody may have rolled the version back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, digest_of, step

if TYPE_CHECKING:
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.release.check_parity import ParityReport
    from tasks.release.smoke_test import SmokeReport


class Withdrawal(Record):
    """What a person decided on the version before: to roll it back, or nothing."""

    reason: str
    """Empty where nobody rolled it back."""

    @property
    def digest(self) -> str:
        """sha256 over the reason."""
        return digest_of(self.model_dump(mode="json"))


class PromotionDecision(Record):
    """The decision on a release; also decision.json."""

    accepted: bool
    refusals: tuple[str, ...]
    """Why it was refused, one sentence per bound, difference or withdrawal; empty when accepted."""
    comparison_digest: str
    """Digest of the decision against champion and anchors."""
    benchmarks_digest: str
    """Digest of the decision on the suite's benchmarks; empty where the scale has no suite."""
    quantization_digest: str
    """Digest of the decision on the quantized files."""
    parity_digest: str
    """Digest of the comparison of engines."""
    smoke_digest: str
    """Digest of the smoke test's report."""


@step(content=("decision.json",))
def decide_promotion(
    *,
    comparison: Artifact[GateDecision],
    benchmarks: Artifact[GateDecision] | None,
    quantization: Artifact[GateDecision],
    parity: Artifact[ParityReport],
    smoke: SmokeReport,
    withdrawal: Withdrawal,
    output: Output,
) -> PromotionDecision:
    """A refusal is a result. `benchmarks` is None where the scale has no suite."""
    judged = (comparison, benchmarks, quantization, parity)
    gates = [gate.record for gate in judged if gate is not None]
    refusals = (
        *(refusal for gate in gates for refusal in gate.refusals),
        *(f"smoke test: {reason}" for reason in smoke.reasons),
        *([withdrawal.reason] if withdrawal.reason else []),
    )
    accepted = all(gate.accepted for gate in gates) and smoke.passed and not withdrawal.reason
    assert accepted is not bool(refusals), (accepted, refusals)
    decision = PromotionDecision(
        accepted=accepted,
        refusals=refusals,
        comparison_digest=comparison.digest,
        benchmarks_digest="" if benchmarks is None else benchmarks.digest,
        quantization_digest=quantization.digest,
        parity_digest=parity.digest,
        smoke_digest=smoke.digest,
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision
