"""What the flows of one pipeline run share, and what they pass to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.schema import PhaseSection
from flows.running.stage_log import StageLog
from infra.step import Artifact
from infra.storage.store import Store
from tasks.data.packing.pack_phase import PackedPhase
from tasks.evaluation.decide_gate import GateDecision
from tasks.evaluation.evaluate_checkpoint import Evaluation
from tasks.release.decide_promotion import PromotionDecision
from tasks.release.evaluate_gguf import GgufEvaluation
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

if TYPE_CHECKING:
    from configs.schema import Scale
    from infra.home import Home


@dataclass(frozen=True)
class Run:
    """What the flows of one pipeline run share."""

    scale: Scale
    home: Home
    store: Store
    mlflow: str
    """URI of the MLflow server."""
    pipeline_run_id: str
    """MLflow run of this pipeline run."""
    log: StageLog


@dataclass(frozen=True)
class AssessedModel:
    """A checkpoint with its evaluation and verdict; `reasons` is empty unless the gate refused."""

    phase: PhaseSection
    packed: Artifact[PackedPhase] | None
    """None where the phase sampled its own answers, or its weights came from outside."""
    checkpoint: Artifact[TrainedCheckpoint]
    evaluation: Artifact[Evaluation]
    decision: Artifact[GateDecision]
    version: str
    run_id: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ReleasedModel:
    """A registered version with the decisions on it."""

    version: str
    anchored: tuple[str, ...]
    """Figures whose anchor the version becomes when it is promoted."""
    gguf_evaluation: Artifact[GgufEvaluation]
    quantization_decision: Artifact[GateDecision]
    """On the quantized files."""
    decision: Artifact[GateDecision]
    """On the comparison with champion and anchors."""
    promotion: Artifact[PromotionDecision]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not promoted; empty where it is accepted."""
        return self.promotion.record.refusals
