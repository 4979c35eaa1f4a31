"""What a report is made from: the data's artifacts and, per phase, what training left and how it was judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from infra.step import Artifact, digest_of

if TYPE_CHECKING:
    from tasks.data.collect_chats import CollectedChats
    from tasks.data.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.deduplicate_documents import DeduplicatedDocuments
    from tasks.data.filter_documents import FilteredDocuments
    from tasks.data.ingest_documents import IngestedDocuments
    from tasks.data.pack_phase import PackedPhase
    from tasks.data.shard_chats import ChatShards
    from tasks.data.shard_documents import TokenShards
    from tasks.data.split_documents import SplitDocuments
    from tasks.data.synthesize_problems import SynthesizedProblems
    from tasks.data.train_tokenizer import TrainedTokenizer
    from tasks.data.validate_contract import ContractResult
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.training.train_phase import TrainedCheckpoint

DIGITS = 12
"""Of a digest, where a person reads it."""


@dataclass(frozen=True)
class ReportedData:
    """The data of a run, in the order in which it was made."""

    ingested: Artifact[IngestedDocuments]
    deduplicated: Artifact[DeduplicatedDocuments]
    split: Artifact[SplitDocuments]
    filtered: Artifact[FilteredDocuments]
    problems: Artifact[SynthesizedProblems]
    decontaminated: Artifact[DecontaminatedDocuments]
    chats: Artifact[CollectedChats]
    tokenizer: Artifact[TrainedTokenizer]
    shards: Artifact[TokenShards]
    chat_shards: Artifact[ChatShards]
    suite: Artifact[EvaluationSuite]
    contracts: tuple[Artifact[ContractResult], ...]

    @property
    def stages(self) -> list[Artifact[Any]]:
        """Every artifact but the contracts'."""
        return [getattr(self, member.name) for member in fields(self) if member.name != "contracts"]

    @property
    def digest(self) -> str:
        """sha256 over the members' digests."""
        return digest_of([artifact.digest for artifact in (*self.stages, *self.contracts)])


@dataclass(frozen=True)
class ReportedPhase:
    """One trained phase."""

    name: str
    packed: Artifact[PackedPhase] | None
    """None where the phase sampled its own answers, or its weights came from outside."""
    checkpoint: Artifact[TrainedCheckpoint]
    evaluation: Artifact[Evaluation]
    decision: Artifact[GateDecision]

    @property
    def stages(self) -> list[Artifact[Any]]:
        return [artifact for artifact in (self.packed, self.checkpoint, self.evaluation, self.decision) if artifact is not None]


@dataclass(frozen=True)
class ReportedPhases:
    """The phases of a run, in order; the last one's checkpoint is what is released."""

    phases: tuple[ReportedPhase, ...]

    def __iter__(self) -> Iterator[ReportedPhase]:
        return iter(self.phases)

    @property
    def last(self) -> ReportedPhase:
        return self.phases[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens trained on, over all phases."""
        return sum(phase.checkpoint.record.num_tokens for phase in self.phases)

    @property
    def digest(self) -> str:
        """sha256 over the names and the members' digests."""
        return digest_of([[phase.name, *(artifact.digest for artifact in phase.stages)] for phase in self.phases])
