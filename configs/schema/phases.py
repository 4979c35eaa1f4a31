"""Phases: what each one reads, how it trains, which gate it must pass."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.courses import CourseRecipe, PhaseName
from configs.schema.evaluation import GateRecipe
from configs.schema.model import ModelRecipe
from configs.schema.objectives import Objective, PolicyObjective, SftObjective
from configs.schema.packing import Mixture, Packing, PackingRecipe, mixture_waypoints
from configs.schema.training import AdapterRecipe, OptimizerRecipe, SpikeRecipe, TrainingResources, ValidationRecipe


class PhaseRecipe(Frozen):
    objective: Objective
    num_tokens: int = Field(gt=0)
    """Token budget of the phase."""
    sequence_length: int = Field(gt=1)
    """Tokens per training sequence; a packed row holds one more, the last target."""
    rope_theta: float = Field(gt=0)
    """Report: 10,000 at 4K, 1,000,000 from 32K on."""
    packing: Packing
    mixture: Mixture
    """Token share per domain, normalised over the domains that have text. Either one mixture or a list of waypoints
    {at_share, mixture}, linear in between. A policy objective packs no rows and reads none of it: all of its prompts
    are generated problems."""
    bucket_weights: tuple[Annotated[float, Field(ge=0)], ...]
    """How often an epoch reads a document of each quality bucket, from low to high (GLM-4.5: over 3.2 of the highest);
    documents without a bucket once. Empty: every document once. None is read again before all of its bucket were
    read."""
    max_epochs: float = Field(gt=0)
    """Ceiling on the passes over one domain, an epoch being defined by bucket_weights, from the start of the phase's
    course; a phase whose mixture needs more is refused. The domains code and repository are counted separately,
    although repositories are made of files."""
    fim_rate: float = Field(ge=0, le=1)
    """Share of the documents of the domains code and repository that are rearranged to prefix, suffix, middle (report:
    all source code has fill-in-the-middle, without a rate)."""
    adapter: AdapterRecipe
    optimizer: OptimizerRecipe
    spikes: SpikeRecipe
    validation: ValidationRecipe
    dtype: Literal["float32", "bfloat16"]
    """Arithmetic of the forward and backward pass; master weights are float32 either way."""
    num_threads: int = Field(gt=0)
    """CPU threads per rank: part of the result on a CPU, where the order of sums depends on it."""
    seed: int
    """Seed of random initial weights, of rows and prompts, and of the order of documents, which all phases of a course
    share."""
    gate: GateRecipe

    @property
    def packing_recipe(self) -> PackingRecipe:
        """The settings on which packing depends: a new bound or learning rate packs nothing again."""
        return PackingRecipe(**self.model_dump(include=set(PackingRecipe.model_fields)))

    @property
    def samples_answers(self) -> bool:
        """Whether the phase trains on answers it samples itself, to prompts, instead of packed rows."""
        return isinstance(self.objective, PolicyObjective)

    @property
    def reads_chats(self) -> bool:
        """Whether conversations are among the packed rows."""
        return any("chat" in point.mixture for point in mixture_waypoints(self.mixture)) and not self.samples_answers

    @property
    def reads_documents(self) -> bool:
        """Whether the phase needs documents: text in its packed rows, or prompts, which are decontaminated with it."""
        return self.samples_answers or any({*point.mixture} - {"chat"} for point in mixture_waypoints(self.mixture))

    @model_validator(mode="after")
    def _budget_is_whole_rows(self) -> Self:
        if self.num_tokens % self.sequence_length:
            rows = max(1, self.num_tokens // self.sequence_length)
            raise ValueError(
                f"num_tokens ({self.num_tokens}) must be a multiple of sequence_length ({self.sequence_length}), for "
                f"example "
                f"{rows * self.sequence_length}"
            )
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        if isinstance(self.objective, SftObjective) and self.packing != "best_fit":
            raise ValueError(
                "packing must be best_fit where the objective is sft: a conversation cut in two teaches no questions"
            )
        if isinstance(self.objective, PolicyObjective) and self.objective.max_new_tokens >= self.sequence_length:
            raise ValueError(
                f"objective.max_new_tokens ({self.objective.max_new_tokens}) must stay below sequence_length "
                f"({self.sequence_length}): "
                "a row holds the prompt and its answer"
            )
        return self


class PhaseSection(Frozen):
    name: PhaseName
    kind: Literal["pretraining", "mid_training", "post_training"]
    """The flow that trains the phase; a run goes through them in this order."""
    quoted_loss: float | None
    """Loss that a source document states without evidence; shown beside the measured one, decides nothing. Null where
    none does."""
    recipe: PhaseRecipe
    resources: TrainingResources

    @model_validator(mode="after")
    def _objective_fits_the_phase(self) -> Self:
        objective = self.recipe.objective.kind
        if self.kind != "post_training" and objective not in ("pretrain", "sft"):
            raise ValueError(
                f"phase {self.name}: objective {objective} needs a model that answers: set the objective's kind to "
                "pretrain, or the phase's kind to post_training"
            )
        return self


class TrainingRecipe(Frozen):
    """The settings that decide the result of training one phase. The phase's gate and mixture stay out: a new bound
    trains nothing again, and the mixture acts through the packed rows. Made by `Scale.training_recipe`."""

    phase: PhaseName
    objective: Objective
    model: ModelRecipe
    course: CourseRecipe
    course_start_tokens: int = Field(ge=0)
    """Tokens of the course before the phase."""
    course_num_tokens: int = Field(gt=0)
    """Length of the whole course in tokens."""
    num_tokens: int = Field(gt=0)
    sequence_length: int = Field(gt=1)
    rope_theta: float = Field(gt=0)
    max_epochs: float = Field(gt=0)
    """Bounds the passes over prompts; packed rows respect it already."""
    adapter: AdapterRecipe
    optimizer: OptimizerRecipe
    spikes: SpikeRecipe
    validation: ValidationRecipe
    dtype: Literal["float32", "bfloat16"]
    num_threads: int = Field(gt=0)
    seed: int
