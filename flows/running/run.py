"""What the flows of one pipeline run share, and what they pass to each other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from configs.schema import PhaseSection
from flows.running.stage_log import StageLog
from infra.registry.promotion import Rivals
from infra.step import Artifact
from infra.storage.store import Store
from tasks.data.packing.pack_phase import PackedPhase
from tasks.data.sources.list_sources import SourceListing
from tasks.evaluation.benchmarks.evaluate_suite import SuiteEvaluation
from tasks.evaluation.decide_gate import GateDecision
from tasks.evaluation.evaluate_checkpoint import Evaluation
from tasks.evaluation.evaluate_pairs import PairEvaluation
from tasks.evaluation.sample_solutions import SampledSolutions
from tasks.release.decide_promotion import PromotionDecision
from tasks.release.decide_quantization import QuantizedEvaluations
from tasks.release.evaluate_gguf import GgufEvaluation
from tasks.release.evaluate_quantized import QuantizedEvaluation
from tasks.release.quantize_checkpoint import QuantizedCheckpoint
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
    suite_files: SourceListing | None = None
    """Files of the suite on which releases are judged; None where the scale has none."""
    machine: threading.Lock = field(default_factory=threading.Lock)
    """Held by the step that computes on this machine: it has all cores, whatever goes on elsewhere meanwhile."""


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
    pairs: Artifact[PairEvaluation] | None = None
    """Figures of the preference pairs, where the phase trained on some."""
    solutions: Artifact[SampledSolutions] | None = None
    """What the phase's start answered before it: for rejection sampling to train on, or as pass rates of prompts."""


@dataclass(frozen=True)
class AssessedRewardModel:
    """A reward model with its figures and verdict. It is no version of the scale's model: it does not answer."""

    phase: PhaseSection
    checkpoint: Artifact[TrainedCheckpoint]
    pairs: Artifact[PairEvaluation]
    decision: Artifact[GateDecision]
    run_id: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized checkpoint and what it lost."""

    checkpoint: Artifact[QuantizedCheckpoint]
    evaluation: Artifact[QuantizedEvaluation]


@dataclass(frozen=True)
class JudgedSuite:
    """A release's answers to the suite of its scale, and the verdict."""

    evaluation: Artifact[SuiteEvaluation]
    decision: Artifact[GateDecision]


@dataclass(frozen=True)
class ReleasedModel:
    """A registered version with the decisions on it."""

    version: str
    rivals: Rivals
    """Champion and anchors with which it was compared: the decisions hold only for them."""
    anchors: Mapping[str, str]
    """By figure, the version that becomes the anchor when the release is promoted: itself, or the champion."""
    gguf_evaluation: Artifact[GgufEvaluation]
    quantized: Mapping[str, QuantizedModel]
    """By format."""
    quantization_decision: Artifact[GateDecision]
    """On the quantized files and checkpoints."""
    contamination_decision: Artifact[GateDecision]
    """On what training data quotes of the evaluation."""
    decision: Artifact[GateDecision]
    """On the comparison with champion and anchors."""
    promotion: Artifact[PromotionDecision]
    suite: JudgedSuite | None
    """None where the scale has no suite."""

    @property
    def quantized_evaluations(self) -> QuantizedEvaluations:
        """What each format lost."""
        return QuantizedEvaluations({name: model.evaluation for name, model in self.quantized.items()})

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not promoted; empty where it is accepted."""
        return self.promotion.record.refusals
