"""The artifacts that data preparation leaves, and the result of every contract."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from infra.step import Artifact, digest_of

if TYPE_CHECKING:
    from tasks.data.chats.collect_chats import CollectedChats
    from tasks.data.contamination.measure_contamination import MeasuredContamination
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.deduplication.deduplicate_documents import DeduplicatedDocuments
    from tasks.data.deduplication.remove_semantic_duplicates import DistinctDocuments
    from tasks.data.deduplication.split_documents import SplitDocuments
    from tasks.data.extraction.extract_documents import ExtractedDocuments
    from tasks.data.extraction.remove_boilerplate import BoilerplateFreeDocuments
    from tasks.data.filtering.filter_documents import FilteredDocuments
    from tasks.data.preferences.collect_preferences import CollectedPreferences
    from tasks.data.privacy.mask_personal_data import MaskedDocuments
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.prompts.collect_prompts import CollectedPrompts
    from tasks.data.prompts.sample_passages import SampledPassages
    from tasks.data.repositories.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.scoring.score_documents import ScoredDocuments
    from tasks.data.scoring.train_classifiers import TrainedClassifiers
    from tasks.data.scoring.train_ngram_model import TrainedNgramModel
    from tasks.data.seeds.request_traces import RequestedTraces
    from tasks.data.seeds.vary_problems import VariedProblems
    from tasks.data.seeds.verify_solutions import VerifiedSolutions
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.data.sources.ingest_documents import IngestedDocuments
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
    from tasks.data.validate_contract import ContractResult
    from tasks.evaluation.select_evaluation_items import EvaluationSuite


@dataclass(frozen=True, kw_only=True)
class PreparedDocuments:
    """What became of the documents, in the order in which it was made."""

    extracted: Artifact[ExtractedDocuments]
    boilerplate_free: Artifact[BoilerplateFreeDocuments]
    classifiers: Artifact[TrainedClassifiers]
    ngram_model: Artifact[TrainedNgramModel]
    scored: Artifact[ScoredDocuments]
    deduplicated: Artifact[DeduplicatedDocuments]
    distinct: Artifact[DistinctDocuments]
    split: Artifact[SplitDocuments]
    filtered: Artifact[FilteredDocuments]
    masked: Artifact[MaskedDocuments]
    passages: Artifact[SampledPassages] | None
    """None where no search is about the documents."""
    prompts: Artifact[CollectedPrompts]
    decontaminated: Artifact[DecontaminatedDocuments]
    repositories: Artifact[ConcatenatedRepositories]
    shards: Artifact[TokenShards]
    validation: Artifact[TokenShards]
    """Held-out documents as shards: measured while a phase trains."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What training, evaluation and the report need of the data."""

    ingested: Artifact[IngestedDocuments]
    problems: Artifact[SynthesizedProblems]
    documents: PreparedDocuments | None
    """None where the phases of the run read only conversations."""
    solutions: Artifact[VerifiedSolutions]
    variations: Artifact[VariedProblems]
    traces: Artifact[RequestedTraces] | None
    """None where no teacher is configured."""
    chats: Artifact[CollectedChats]
    preferences: Artifact[CollectedPreferences] | None
    """None where no phase of the run reads preference pairs."""
    tokenizer: Artifact[TrainedTokenizer]
    chat_shards: Artifact[ChatShards]
    suite: Artifact[EvaluationSuite]
    contamination: Artifact[MeasuredContamination]
    """What of the evaluation is in everything above that is trained on."""
    contracts: dict[str, tuple[Artifact[Any], Artifact[ContractResult]]]
    """What each contract was checked on and with which result, by the contract's name."""

    @property
    def shards(self) -> Artifact[TokenShards] | None:
        """The shards of the documents; None where there are none."""
        return None if self.documents is None else self.documents.shards

    @property
    def num_sources(self) -> int:
        """Files of documents, or of conversations where only these were read."""
        return self.chats.record.num_sources if self.documents is None else self.ingested.record.num_sources

    @property
    def stages(self) -> list[Artifact[Any]]:
        """Every artifact but the contracts'."""
        members = [getattr(self, member.name) for member in fields(self) if member.name != "contracts"]
        walk = [] if self.documents is None else [getattr(self.documents, each.name) for each in fields(self.documents)]
        return [
            artifact
            for member in members
            for artifact in (walk if member is self.documents else [member])
            if artifact is not None
        ]

    @property
    def contract_results(self) -> list[Artifact[ContractResult]]:
        return [result for _, result in self.contracts.values()]

    @property
    def digest(self) -> str:
        """sha256 over the members' digests."""
        return digest_of([artifact.digest for artifact in (*self.stages, *self.contract_results)])
