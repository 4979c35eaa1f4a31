"""Accept or refuse a release for the alias `champion`: every gate must have accepted it, every engine must compute the
trained model, the served one must be it, nobody may have withdrawn the version, and a person who was asked must have
approved it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from infra.step import Artifact, Output, Record, digest_of, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.evaluation.decide_gate import GateDecision
    from tasks.release.check_parity import ParityReport
    from tasks.release.smoke_test import SmokeReport


class Withdrawal(Record):
    """What a person decided on the version before: to roll it back, to take down a text that it was trained on, or
    nothing."""

    reason: str
    """Empty for nothing."""

    @property
    def digest(self) -> str:
        """sha256 over the reason."""
        return digest_of(self.model_dump(mode="json"))


class Approval(Record):
    """What became of the question to a person whether to promote a release."""

    answer: Literal["approved", "refused", "none"]
    """none: nobody answered in time."""
    reason: str
    """In the person's words; for none, how long the release waited."""
    name: str
    """Who answered, as the person wrote it: Prefect's server knows no persons. Empty for none."""
    at: str
    """When the answer was read, in UTC."""

    @property
    def digest(self) -> str:
        """sha256 over the answer."""
        return digest_of(self.model_dump(mode="json"))

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.answer == "none":
            return f"nobody approved the release {self.reason}: run again to ask again"
        return f"{self.name} {self.answer} the release on {self.at}: {self.reason}"


class PromotionDecision(Record):
    """The decision on a release; also decision.json."""

    accepted: bool
    refusals: tuple[str, ...]
    """Why it was refused, one sentence per bound, difference, withdrawal or answer; empty when accepted."""
    comparison_digest: str
    """Digest of the decision against champion and anchors."""
    benchmarks_digest: str
    """Digest of the decision on the suite's benchmarks; empty where the scale has no suite."""
    quantization_digest: str
    """Digest of the decision on the quantized files."""
    contamination_digest: str
    """Digest of the decision on what training data quotes of the evaluation."""
    parity_digest: str
    """Digest of the comparison of engines."""
    smoke_digest: str
    """Digest of the smoke test's report."""
    approval: Approval | None = None
    """None where nobody was asked: the scale asks nobody, or a gate had refused."""


def refusals_of(
    gates: Sequence[Artifact[GateDecision] | Artifact[ParityReport] | None],
    smoke: Artifact[SmokeReport],
    withdrawal: Withdrawal,
) -> tuple[str, ...]:
    """Why a release is refused before a person is asked, one sentence each; None among the gates is one that the scale
    does not have."""
    records = [gate.record for gate in gates if gate is not None]
    refusals = (
        *(refusal for record in records for refusal in record.refusals),
        *(f"smoke test: {reason}" for reason in smoke.record.reasons),
        *([withdrawal.reason] if withdrawal.reason else []),
    )
    accepted = all(record.accepted for record in records) and smoke.record.passed and not withdrawal.reason
    assert accepted is not bool(refusals), (accepted, refusals)
    return refusals


@step(content=("decision.json",))
def decide_promotion(
    *,
    comparison: Artifact[GateDecision],
    benchmarks: Artifact[GateDecision] | None,
    quantization: Artifact[GateDecision],
    contamination: Artifact[GateDecision],
    parity: Artifact[ParityReport],
    smoke: Artifact[SmokeReport],
    withdrawal: Withdrawal,
    approval: Approval | None,
    output: Output,
) -> PromotionDecision:
    """A refusal is a result. `benchmarks` is None where the scale has no suite, `approval` where nobody was asked."""
    refusals = refusals_of((comparison, benchmarks, quantization, contamination, parity), smoke, withdrawal)
    if approval is not None and approval.answer != "approved":
        refusals = (*refusals, approval.sentence)
    decision = PromotionDecision(
        accepted=not refusals,
        refusals=refusals,
        comparison_digest=comparison.digest,
        benchmarks_digest="" if benchmarks is None else benchmarks.digest,
        quantization_digest=quantization.digest,
        contamination_digest=contamination.digest,
        parity_digest=parity.digest,
        smoke_digest=smoke.digest,
        approval=approval,
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision
