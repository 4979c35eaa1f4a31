"""Phases: what each one reads, how it trains, which gate it must pass."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.courses import PHASE_TEMPLATES, CourseRecipe, PhaseName, allowed_objectives
from configs.schema.evaluation import GateRecipe
from configs.schema.model import ModelRecipe
from configs.schema.objectives import (
    DistillationObjective,
    DpoObjective,
    ExpertRecipe,
    Objective,
    OwnModelRecipe,
    RejectionSamplingObjective,
    RewardObjective,
    SftObjective,
    SolutionObjective,
)
from configs.schema.packing import Mixture, MixtureWaypoint, Packing, PackingRecipe, mixture_waypoints
from configs.schema.policy_objectives import PolicyObjective, PpoObjective
from configs.schema.training import AdapterRecipe, OptimizerRecipe, SpikeRecipe, TrainingResources, ValidationRecipe

PhaseKind = Literal["pretraining", "mid_training", "post_training"]


class SolutionRecipe(Frozen):
    """The settings of what models answer before a phase trains. Made by `PhaseRecipe.solution_recipe`."""

    objective: Annotated[RejectionSamplingObjective | DistillationObjective, Field(discriminator="kind")]
    keeps_answers: bool
    """Whether right answers become conversations; else they only measure how hard the prompts are."""
    domains: tuple[str, ...]
    """Domains whose prompts are asked, where no expert has its own; empty: all."""
    sequence_length: int = Field(gt=1)
    dtype: Literal["float32", "bfloat16"]
    num_threads: int = Field(gt=0)
    seed: int


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
    {at_share, mixture}, linear in between. Of a policy objective: the share of each domain among the prompts,
    normalised over the domains that have prompts. reward and dpo read preference pairs, and none of it."""
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
    def reward_model(self) -> PhaseName | None:
        """The phase whose reward model scores the phase's answers; None where none does."""
        return self.objective.reward_model if isinstance(self.objective, PolicyObjective) else None

    @property
    def reference(self) -> PhaseName | None:
        """The phase whose model the phase is held to; None where that is its start, or it is held to none."""
        return self.objective.reference if isinstance(self.objective, DpoObjective | PpoObjective) else None

    @property
    def reads_pairs(self) -> bool:
        """Whether the phase trains on preference pairs."""
        return isinstance(self.objective, RewardObjective | DpoObjective)

    @property
    def reads_rows(self) -> bool:
        """Whether the phase trains on packed rows."""
        return not self.samples_answers and not self.reads_pairs

    @property
    def samples_solutions(self) -> bool:
        """Whether the phase's conversations are right answers of the weights that it starts from, or of experts: its
        rows can be packed only when those exist."""
        return isinstance(self.objective, SolutionObjective)

    @property
    def experts(self) -> tuple[ExpertRecipe, ...]:
        """The models whose right answers the phase trains on; none where it distils none."""
        return self.objective.experts if isinstance(self.objective, DistillationObjective) else ()

    @property
    def asks_models(self) -> bool:
        """Whether models answer prompts before the phase trains: for right answers to train on, or for the pass rate of
        each prompt."""
        is_measured = isinstance(self.objective, PolicyObjective) and self.objective.difficulty is not None
        return self.samples_solutions or is_measured

    @property
    def asks_start(self) -> bool:
        """Whether those models are the weights that the phase starts from."""
        return self.asks_models and not self.experts

    @property
    def solution_recipe(self) -> SolutionRecipe:
        """The settings of what models answer before a phase trains that asks some."""
        values: dict[str, Any] = self.model_dump(include=set(SolutionRecipe.model_fields))
        if not isinstance(self.objective, PolicyObjective):
            return SolutionRecipe(**values, keeps_answers=True, domains=())
        assert self.objective.difficulty is not None, self.objective
        values["objective"] = RejectionSamplingObjective(
            kind="rejection_sampling",
            samples_per_prompt=self.objective.difficulty.samples_per_prompt,
            max_kept_per_prompt=1,
            dropped_shortest_share=0.0,
            max_new_tokens=self.objective.max_new_tokens,
            temperature=self.objective.temperature,
            enable_thinking=self.objective.enable_thinking,
            rollouts=self.objective.rollouts,
        )
        domains = {
            name for point in mixture_waypoints(self.mixture) for name, weight in point.mixture.items() if weight
        }
        return SolutionRecipe(**values, keeps_answers=False, domains=tuple(sorted(domains)))

    @property
    def trains_language_model(self) -> bool:
        """Whether the phase leaves a model that answers. A reward model only scores answers and is never released."""
        return not isinstance(self.objective, RewardObjective)

    @property
    def own_model(self) -> OwnModelRecipe | None:
        """The architecture and the weights of a reward model that starts from no phase; None elsewhere."""
        return self.objective.own_model if isinstance(self.objective, RewardObjective) else None

    @property
    def reads_chats(self) -> bool:
        """Whether conversations are among the packed rows."""
        return any("chat" in point.mixture for point in mixture_waypoints(self.mixture)) and self.reads_rows

    @property
    def reads_documents(self) -> bool:
        """Whether the phase needs documents: text in its packed rows, or prompts, which are decontaminated with it."""
        asks = self.samples_answers or self.samples_solutions
        is_text = any({*point.mixture} - {"chat"} for point in mixture_waypoints(self.mixture))
        return asks or (is_text and self.reads_rows)

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
    def _settings_of_rows_have_rows(self) -> Self:
        idle = [name for name in ("fim_rate", "bucket_weights") if getattr(self, name) and not self.reads_rows]
        if idle:
            raise ValueError(
                f"{' and '.join(idle)} would act on packed documents, and objective {self.objective.kind} reads none: "
                f"set fim_rate to 0 and bucket_weights to []"
            )
        return self

    @model_validator(mode="after")
    def _gate_judges_what_is_trained(self) -> Self:
        is_judged = self.gate.own_figure == "pair_accuracy" or self.gate.min_pair_accuracy > 0
        if not self.reads_pairs and (is_judged or self.gate.max_calibration_error < 1):
            raise ValueError(
                f"gate: min_pair_accuracy, max_calibration_error and own_figure pair_accuracy are of phases that train "
                f"on preference pairs, not of objective {self.objective.kind}: set them to 0, 1 and another figure"
            )
        if not self.trains_language_model and self.gate.own_figure not in ("none", "pair_accuracy"):
            raise ValueError(
                f"gate.own_figure {self.gate.own_figure} with objective reward, which leaves no model that answers: "
                f"set it to pair_accuracy or none"
            )
        return self

    @model_validator(mode="after")
    def _measured_prompts_are_answered_in_one_turn(self) -> Self:
        is_played = any(point.mixture.get("agentic") for point in mixture_waypoints(self.mixture))
        if isinstance(self.objective, PolicyObjective) and self.objective.difficulty is not None and is_played:
            raise ValueError(
                "objective.difficulty measures prompts that are answered in one turn, and the mixture has the domain "
                "agentic: set difficulty to null, or take agentic out of the mixture"
            )
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        objective = self.objective
        if isinstance(objective, SftObjective | SolutionObjective) and self.packing != "best_fit":
            raise ValueError(
                f"packing must be best_fit where the objective is {objective.kind}: a conversation cut in two teaches "
                f"no questions"
            )
        if self.samples_solutions and not all(point.mixture.get("chat") for point in mixture_waypoints(self.mixture)):
            raise ValueError(
                f"mixture has no chat, which are the right answers where the objective is {objective.kind}: add it, "
                f"for example {{chat: 1.0}}"
            )
        samples = isinstance(objective, PolicyObjective | SolutionObjective)
        if samples and objective.max_new_tokens >= self.sequence_length:
            raise ValueError(
                f"objective.max_new_tokens ({objective.max_new_tokens}) must stay below sequence_length "
                f"({self.sequence_length}): "
                "a row holds the prompt and its answer"
            )
        return self


class PhaseSection(Frozen):
    name: PhaseName
    kind: PhaseKind
    """The flow that trains the phase; a run goes through them in this order."""
    start: PhaseName | None
    """The earlier phase whose weights the phase starts from, and with which its gate compares it. Null: the phase
    before it in the list; the first phase starts from random weights, or from those that --start names."""
    quoted_loss: float | None
    """Loss that a source document states without evidence; shown beside the measured one, decides nothing. Null where
    none does."""
    recipe: PhaseRecipe
    resources: TrainingResources

    @model_validator(mode="after")
    def _objective_fits_the_phase(self) -> Self:
        objective, allowed = self.recipe.objective.kind, allowed_objectives(self.name)
        if self.kind != "post_training" and objective not in ("pretrain", "sft"):
            raise ValueError(
                f"phase {self.name}: objective {objective} needs a model that answers: set the objective's kind to "
                "pretrain, or the phase's kind to post_training"
            )
        if objective not in allowed:
            names = ", ".join(name for name, kinds in PHASE_TEMPLATES.items() if objective in kinds)
            raise ValueError(
                f"phase {self.name}: a phase of this name has objective {' or '.join(allowed)}, not {objective}: set "
                f"the objective's kind, or name the phase after one of {names}"
            )
        return self


class TrainingRecipe(Frozen):
    """The settings that decide the result of training one phase. The phase's gate stays out: a new bound trains nothing
    again. So does the mixture of packed rows, through which it acts. Made by `Scale.training_recipe`."""

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
    scorer: ModelRecipe | None
    """Architecture of the reward model that scores a policy's answers; None where none does."""
    prompt_mixture: tuple[MixtureWaypoint, ...]
    """Share of each domain among the prompts of a policy objective; empty for objectives on rows."""
    max_epochs: float = Field(gt=0)
    """Bounds the passes over the prompts of a domain; packed rows respect it already."""
    adapter: AdapterRecipe
    optimizer: OptimizerRecipe
    spikes: SpikeRecipe
    validation: ValidationRecipe
    dtype: Literal["float32", "bfloat16"]
    num_threads: int = Field(gt=0)
    seed: int

    @property
    def is_scored(self) -> bool:
        """Whether a reward model is trained: a scalar head in place of the unembedding."""
        return isinstance(self.objective, RewardObjective)

    @property
    def reads_pairs(self) -> bool:
        """Whether neighbouring rows are preference pairs."""
        return isinstance(self.objective, RewardObjective | DpoObjective)

    @property
    def critic_recipe(self) -> TrainingRecipe:
        """The settings by which the critic of a PPO phase trains: all its weights, the architecture of the reward model
        that it starts from or else the policy's, no MTP layer, and learning rates times critic_rate_ratio."""
        assert isinstance(self.objective, PpoObjective), self.objective
        ratio = self.objective.critic_rate_ratio
        rates = {name: getattr(self.course, name) * ratio for name in ("peak_learning_rate", "final_learning_rate")}
        model = self.scorer or self.model.model_copy(update={"num_nextn_predict_layers": 0})
        adapter = self.adapter.model_copy(update={"kind": "none"})
        course = self.course.model_copy(update=rates)
        return self.model_copy(update={"model": model, "course": course, "adapter": adapter})
