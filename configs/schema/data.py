"""The section `data`: its recipe, the contracts of its steps, Spark."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.chats import (
    ChatCollectionRecipe,
    ChatRecipe,
    DecontaminationRecipe,
    PreferenceCollectionRecipe,
    PreferenceRecipe,
)
from configs.schema.deduplication import DeduplicationRecipe, SemanticRecipe, SplitRecipe
from configs.schema.filtering import FilterRecipe, PersonalDataRecipe
from configs.schema.problems import PassageRecipe, PromptRecipe, SeedVariationRecipe, SynthesisRecipe, TeacherRecipe
from configs.schema.scoring import ClassifierRecipe, LanguageRecipe, NgramModelRecipe, NgramTrainingRecipe
from configs.schema.sources import BoilerplateRecipe, ExtractionRecipe, IngestRecipe
from configs.schema.tokens import RepositoryRecipe, ShardRecipe, TokenizerRecipe


class ContractRecipe(Frozen):
    name: str = Field(pattern=r"^[a-z_]+$")
    """The file data_contracts/<name>.yaml."""


class DataRecipe(Frozen):
    ingest: IngestRecipe
    extract: ExtractionRecipe
    boilerplate: BoilerplateRecipe
    classifiers: ClassifierRecipe
    ngram_model: NgramModelRecipe
    language: LanguageRecipe
    deduplicate: DeduplicationRecipe
    semantic: SemanticRecipe
    split: SplitRecipe
    filter: FilterRecipe
    personal_data: PersonalDataRecipe
    synthesize: SynthesisRecipe
    seed_variations: SeedVariationRecipe
    prompts: PromptRecipe
    teacher: TeacherRecipe
    chats: ChatRecipe
    preferences: PreferenceRecipe
    decontaminate: DecontaminationRecipe
    repositories: RepositoryRecipe
    tokenizer: TokenizerRecipe
    shards: ShardRecipe

    @model_validator(mode="after")
    def _contract_holds_at_the_bound(self) -> Self:
        if self.filter.scores.max_toxicity < self.classifiers.flagged_above:
            raise ValueError(
                f"filter.scores.max_toxicity ({self.filter.scores.max_toxicity}) is below classifiers.flagged_above "
                f"({self.classifiers.flagged_above}), at which harmless sentences are judged: lower flagged_above, or "
                f"raise max_toxicity"
            )
        return self

    @property
    def ngram_training(self) -> NgramTrainingRecipe:
        """The part that language models depend on."""
        return NgramTrainingRecipe(
            language=self.language, ngram_model=self.ngram_model, ingest=self.ingest, extract=self.extract
        )

    @property
    def chat_collection(self) -> ChatCollectionRecipe:
        """The recipe of conversations: they are masked, compared and decontaminated as documents are."""
        return ChatCollectionRecipe(
            chats=self.chats,
            personal_data=self.personal_data,
            deduplicate=self.deduplicate,
            decontaminate=self.decontaminate,
        )

    @property
    def passage_sample(self) -> PassageRecipe:
        """The recipe of the documents that searches are about."""
        return PassageRecipe(num_documents=self.prompts.num_document_searches)

    @property
    def preference_collection(self) -> PreferenceCollectionRecipe:
        """The recipe of preference pairs, which are treated as conversations are."""
        return PreferenceCollectionRecipe(
            preferences=self.preferences,
            personal_data=self.personal_data,
            deduplicate=self.deduplicate,
            decontaminate=self.decontaminate,
        )


class SparkResources(Frozen):
    master: str
    """Spark master URL: local[2], spark://host:7077, yarn, k8s://..."""
    driver_memory: str = Field(pattern=r"^[0-9]+[kmgtKMGT]$")
    """Heap of the driver's JVM: 2g, 512m. The tokenizer's words take at most half as much of the driver's Python; the
    rest is in files."""
    executor_memory: str
    shuffle_partitions: int = Field(gt=0)

    @property
    def is_local(self) -> bool:
        """Whether the executors are this machine."""
        return self.master.startswith("local")

    @property
    def driver_array_bytes(self) -> int:
        """Bytes that a step may hold in the driver's Python; beyond them it uses files."""
        return int(self.driver_memory[:-1]) * 2 ** (10 * (1 + "kmgt".index(self.driver_memory[-1].lower()))) // 2


class DataSection(Frozen):
    recipe: DataRecipe
    resources: SparkResources
