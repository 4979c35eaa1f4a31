"""The inputs of a report about the phases: what training left of each, and how it was judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.step import Artifact, Record, digest_of
from tasks.training.state.trained_checkpoint import OF_PAIRS

if TYPE_CHECKING:
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.evaluation.evaluate_pairs import PairEvaluation
    from tasks.evaluation.sample_solutions import SampledSolutions
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

DIGITS = 12
"""Number of digits of a digest that are shown to a person."""


class NamedRelease(Record):
    """A registered version, and the champion that it replaces when it is promoted."""

    model: str
    version: str
    replaced: str
    """Version; empty where there is no champion before it."""

    @property
    def digest(self) -> str:
        """sha256 over the names."""
        return digest_of(self.model_dump(mode="json"))


@dataclass(frozen=True)
class ReportedPhase:
    """One trained phase."""

    name: str
    packed: Artifact[PackedPhase] | None
    """None where the phase sampled its own answers, or its weights came from outside."""
    checkpoint: Artifact[TrainedCheckpoint]
    evaluation: Artifact[Evaluation]
    decision: Artifact[GateDecision]
    quoted_loss: float | None = None
    """What a source document expects without evidence; shown beside the measured one."""
    solutions: Artifact[SampledSolutions] | None = None
    """What the phase's start answered before it: for rejection sampling to train on, or as pass rates of prompts."""
    pairs: Artifact[PairEvaluation] | None = None
    """Figures of the preference pairs, where the phase trained on some."""

    @property
    def objective(self) -> str:
        """What the phase trained for, and by which adapter if not by all weights."""
        recipe = self.checkpoint.manifest.identity["recipe"] or {}  # none: weights from outside
        adapter = recipe.get("adapter", {"kind": "none"})
        how = "" if adapter["kind"] == "none" else f", {adapter['kind']} of rank {adapter['rank']}"
        return f"{self.checkpoint.record.objective}{how}"

    @property
    def reads_pairs(self) -> bool:
        """Whether its loss is that of preference pairs."""
        return self.checkpoint.record.objective in OF_PAIRS

    @property
    def start(self) -> str | None:
        """Digest of the checkpoint that the phase started from; None for random weights, and for weights from
        outside."""
        return self.checkpoint.manifest.identity["inputs"].get("start")

    @property
    def stages(self) -> list[Artifact[Any]]:
        return [
            artifact
            for artifact in (self.solutions, self.packed, self.checkpoint, self.evaluation, self.decision, self.pairs)
            if artifact is not None
        ]


@dataclass(frozen=True)
class ReportedRewardModel:
    """One reward model: it scores answers, and none of a language model's figures is its own."""

    name: str
    checkpoint: Artifact[TrainedCheckpoint]
    decision: Artifact[GateDecision]
    pairs: Artifact[PairEvaluation]
    quoted_loss: float | None = None

    @property
    def objective(self) -> str:
        return self.checkpoint.record.objective

    @property
    def reads_pairs(self) -> bool:
        return True

    @property
    def stages(self) -> list[Artifact[Any]]:
        return [self.checkpoint, self.decision, self.pairs]


@dataclass(frozen=True)
class ReportedPhases:
    """The phases that a run reached, in order."""

    phases: tuple[ReportedPhase, ...]
    not_reached: tuple[str, ...] = ()
    """Names of the phases after a refusal."""
    reward_models: tuple[ReportedRewardModel, ...] = ()
    unread: tuple[str, ...] = ()
    """What of the data no phase of the scale reads, in sentences."""

    def __iter__(self) -> Iterator[ReportedPhase]:
        return iter(self.phases)

    @property
    def last(self) -> ReportedPhase:
        """The newest phase with a language model, whose checkpoint is released or was refused; where a run trained
        only reward models, the newest."""
        answering = [phase for phase in self.phases if phase.checkpoint.record.objective != "reward"]
        return (answering or list(self.phases))[-1]

    @property
    def path(self) -> ReportedPhases:
        """The phases that led to the weights of the last one, without those of other branches."""
        path = [self.last]
        while before := [phase for phase in self.phases if phase.checkpoint.digest == path[0].start]:
            path.insert(0, before[0])
        return ReportedPhases(tuple(path))

    @property
    def num_tokens(self) -> int:
        """Tokens trained on, over all phases."""
        return sum(phase.checkpoint.record.num_tokens for phase in self.phases)

    @property
    def digest(self) -> str:
        """sha256 over the names and the members' digests."""
        members = [
            [phase.name, phase.quoted_loss, *(artifact.digest for artifact in phase.stages)] for phase in self.phases
        ]
        branches = [[model.name, *(artifact.digest for artifact in model.stages)] for model in self.reward_models]
        return digest_of([members, list(self.not_reached), branches, list(self.unread)])
