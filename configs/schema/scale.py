"""The root of the tree, with the checks between its sections."""

from __future__ import annotations

from itertools import pairwise
from typing import Self, get_args

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.courses import CourseRecipe, CourseSection
from configs.schema.data import DataSection
from configs.schema.evaluation import EvaluationSection
from configs.schema.model import ModelRecipe, ModelSection
from configs.schema.named_phases import (
    refuse_wrong_experts,
    refuse_wrong_own_model,
    refuse_wrong_reference,
    refuse_wrong_reward_model,
)
from configs.schema.packing import mixture_waypoints
from configs.schema.phases import PhaseKind, PhaseRecipe, PhaseSection, TrainingRecipe
from configs.schema.release import GGUF_BLOCK, QUANTIZED_BLOCK, ROW_FORMATS, ReleaseSection
from configs.schema.serving import ServingSection


class Scale(Frozen):
    """One complete YAML."""

    scale: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    data: DataSection
    model: ModelSection
    courses: tuple[CourseSection, ...] = Field(min_length=1)
    phases: tuple[PhaseSection, ...] = Field(min_length=1)
    evaluation: EvaluationSection
    release: ReleaseSection
    serving: ServingSection

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"phases: a name occurs twice in {names}")
        scheduled = [name for course in self.courses for name in course.recipe.phases]
        if scheduled != names:
            raise ValueError(
                f"courses hold the phases {scheduled}, but phases are {names}: list the same names in the same order"
            )
        tokenizer = self.data.recipe.tokenizer
        used = tokenizer.num_ordinary_tokens + tokenizer.num_special_tokens
        if used > self.model.recipe.vocab_size:
            raise ValueError(
                f"tokenizer.num_ordinary_tokens + {tokenizer.num_special_tokens} special tokens = {used} exceeds "
                f"model.vocab_size ({self.model.recipe.vocab_size}): lower the first or raise the second"
            )
        for course in self.courses:
            seeds = {phase.name: phase.recipe.seed for phase in self.phases if phase.name in course.recipe.phases}
            if len(set(seeds.values())) > 1:
                raise ValueError(
                    f"course {course.recipe.name}: one seed orders its documents, its phases have {seeds}: give them "
                    f"the same"
                )
            adapters = [
                phase.name for phase in self.phases if phase.name in seeds and phase.recipe.adapter.kind != "none"
            ]
            if adapters and len(seeds) > 1:
                raise ValueError(
                    f"course {course.recipe.name}: phase {adapters[0]} trains an adapter, which no other phase of the "
                    f"course could continue: give it a course of its own"
                )
            samplers = [phase.name for phase in self.phases if phase.name in seeds and phase.recipe.samples_solutions]
            if samplers and len(seeds) > 1:
                raise ValueError(
                    f"course {course.recipe.name}: phase {samplers[0]} packs what the weights at its start or experts "
                    f"answer, and no other phase reads on in that: give it a course of its own"
                )
        num_buckets = self.data.recipe.filter.num_quality_buckets
        for phase in self.phases:
            if len(phase.recipe.bucket_weights) not in (0, num_buckets):
                raise ValueError(
                    f"phase {phase.name}: bucket_weights has {len(phase.recipe.bucket_weights)} weights, "
                    f"data.recipe.filter.num_quality_buckets is {num_buckets}: give one for each bucket, or [] for none"
                )
            most = self._architecture_of(phase).max_position_embeddings
            if phase.recipe.sequence_length > most:
                raise ValueError(
                    f"phase {phase.name}: sequence_length ({phase.recipe.sequence_length}) exceeds "
                    f"model.max_position_embeddings ({most})"
                )
            refuse_wrong_own_model(phase, self.model.recipe.vocab_size)
        return self

    @model_validator(mode="after")
    def _phases_start_from_earlier_ones(self) -> Self:
        names, kinds = [phase.name for phase in self.phases], [phase.kind for phase in self.phases]
        if kinds != sorted(kinds, key=get_args(PhaseKind).index):
            raise ValueError(
                f"phases: their kinds are {kinds}: list them in the order {', '.join(get_args(PhaseKind))}, in which a "
                f"run goes through them"
            )
        for number, phase in enumerate(self.phases):
            if phase.start is not None and phase.start not in names[:number]:
                raise ValueError(
                    f"phase {phase.name}: start {phase.start} is no earlier phase: set it to "
                    f"{' or '.join([*names[:number], 'null'])}"
                )
            start = self.start_of(phase)
            scores = start is not None and not start.recipe.trains_language_model
            if start is not None and scores and phase.recipe.trains_language_model:
                raise ValueError(
                    f"phase {phase.name} starts from {start.name}, a reward model, which does not answer: set its "
                    f"start to the phase that {start.name} starts from"
                )
            refuse_wrong_reward_model(phase, self.phases[:number], self._scorer_of(phase))
            refuse_wrong_reference(phase, self.phases[:number])
            refuse_wrong_experts(phase, self.phases[:number])
        sections = dict(zip(names, self.phases, strict=True))
        for course in self.courses:
            for before, name in pairwise(course.recipe.phases):
                start = self.start_of(sections[name])
                if start is None or start.name != before:
                    raise ValueError(
                        f"course {course.recipe.name}: phase {name} continues the schedule of {before}, but starts "
                        f"from {sections[name].start}: set its start to {before}, or give it a course of its own"
                    )
        return self

    @model_validator(mode="after")
    def _model_can_be_evaluated_and_released(self) -> Self:
        model, evaluation, release, served = (
            self.model.recipe,
            self.evaluation.recipe,
            self.release.recipe,
            self.serving.resources,
        )
        positions = "model.recipe.max_position_embeddings", model.max_position_embeddings
        smoke = "release.recipe: smoke_prompt_tokens + smoke_new_tokens"
        for name, value, (bound_name, bound) in (
            ("evaluation.recipe.sequence_length", evaluation.sequence_length, positions),
            ("evaluation.recipe.max_new_tokens", evaluation.max_new_tokens + 1, positions),
            ("evaluation.recipe.max_answer_tokens", evaluation.max_answer_tokens + 1, positions),
            (smoke, release.smoke_prompt_tokens + release.smoke_new_tokens, positions),
            (
                smoke,
                release.smoke_prompt_tokens + release.smoke_new_tokens,
                ("serving.resources.context_length", served.context_length),
            ),
        ):
            if value > bound:
                raise ValueError(
                    f"{name} needs {value} positions, {bound_name} is {bound}: lower the first or raise the second"
                )
        if release.num_answered_problems > evaluation.num_chat_problems:
            raise ValueError(
                f"release.recipe.num_answered_problems ({release.num_answered_problems}) exceeds "
                f"evaluation.recipe.num_chat_problems ({evaluation.num_chat_problems}), with whose answers those of "
                f"the formats are compared: lower the first or raise the second"
            )
        widths = {
            "hidden_size": model.hidden_size,
            "num_attention_heads x head_dim": model.num_attention_heads * model.head_dim,
        }
        widths |= {"intermediate_size": model.intermediate_size} if model.first_k_dense_replace else {}
        widths |= (
            {"moe_intermediate_size": model.moe_intermediate_size}
            if model.first_k_dense_replace < model.num_hidden_layers
            else {}
        )
        blocks = {name: GGUF_BLOCK for name in release.gguf_types if name.startswith("Q")}
        blocks |= {name: QUANTIZED_BLOCK for name in release.quantized_formats if name not in ROW_FORMATS}
        for name, block in blocks.items():
            odd = [f"{size} ({width})" for size, width in widths.items() if width % block]
            if odd:
                setting = "gguf_types" if name in release.gguf_types else "quantized_formats"
                raise ValueError(
                    f"release.recipe.{setting} holds {name}, whose rows are multiples of {block}: model.recipe "
                    f"{' and '.join(odd)} "
                    f"cannot be; leave {name} out, or choose such sizes"
                )
        return self

    @model_validator(mode="after")
    def _requests_are_asked_where_they_are_judged(self) -> Self:
        for phase in self.phases:
            gate = phase.recipe.gate
            floors = gate.min_harmful_refused_share, gate.min_harmless_answered_share
            if (
                any(floors) or gate.own_figure == "safe_answer_share"
            ) and not self.evaluation.recipe.num_safety_prompts:
                raise ValueError(
                    f"phase {phase.name}: its gate judges answers to requests, evaluation.recipe.num_safety_prompts is "
                    f"0: raise it, or set min_harmful_refused_share and min_harmless_answered_share to 0 and "
                    f"own_figure to another"
                )
        return self

    @model_validator(mode="after")
    def _tasks_are_played_where_they_are_judged(self) -> Self:
        made, is_played = self.data.recipe.synthesize, self.evaluation.recipe.tasks is not None
        has_tasks = bool(made.num_evaluation_tasks and made.tasks)
        if has_tasks != is_played:
            raise ValueError(
                f"synthesize.num_evaluation_tasks is {made.num_evaluation_tasks} for {len(made.tasks)} environments, "
                f"evaluation.recipe.tasks is {'set' if is_played else 'null'}: held-out tasks need both, or neither"
            )
        for phase in self.phases:
            if phase.recipe.gate.own_figure == "agentic_success" and not is_played:
                raise ValueError(
                    f"phase {phase.name}: its own_figure is agentic_success, and evaluation.recipe.tasks is null: set "
                    f"it with synthesize.num_evaluation_tasks, or name another figure"
                )
        return self

    @model_validator(mode="after")
    def _experts_are_counted_where_they_are_judged(self) -> Self:
        rollouts = self.evaluation.recipe.rollouts
        for phase in self.phases if rollouts != "in_process" else ():
            for name in ("max_expert_load", "max_expert_cv"):
                if (bound := getattr(phase.recipe.gate, name)) is not None:
                    raise ValueError(
                        f"phase {phase.name}: its gate has {name} {bound:g}, and evaluation.recipe.rollouts is "
                        f"{rollouts}: a server counts no tokens of experts; set gate.{name} to null, or rollouts to "
                        f"in_process"
                    )
        return self

    @model_validator(mode="after")
    def _far_text_is_scored_where_it_is_judged(self) -> Self:
        far, positions = self.evaluation.recipe.far_text, self.model.recipe.max_position_embeddings
        if far is not None and far.context_tokens + far.scored_tokens > positions:
            raise ValueError(
                f"evaluation.recipe.far_text: context_tokens ({far.context_tokens}) and scored_tokens "
                f"({far.scored_tokens}) exceed model.recipe.max_position_embeddings ({positions}): lower them"
            )
        for phase in self.phases:
            if phase.recipe.gate.own_figure == "far_bits_per_byte" and far is None:
                raise ValueError(
                    f"phase {phase.name}: its own_figure is far_bits_per_byte, and evaluation.recipe.far_text is null: "
                    f"set it, or name another figure"
                )
        return self

    @model_validator(mode="after")
    def _steps_hold_a_row(self) -> Self:
        for phase in self.phases:
            course, length = self.course_of(phase), phase.recipe.sequence_length
            if course.start_batch_tokens < length:
                raise ValueError(
                    f"course {course.name}: start_batch_tokens ({course.start_batch_tokens}) holds no sequence of "
                    f"phase {phase.name} "
                    f"({length} tokens): raise it"
                )
        return self

    @property
    def calibration_phase(self) -> PhaseSection | None:
        """The last phase whose rows are packed before it trains: quantization looks at such rows."""
        reading = [phase for phase in self.phases if phase.recipe.reads_rows and not phase.recipe.samples_solutions]
        return reading[-1] if reading else None

    @property
    def released_phase(self) -> PhaseSection | None:
        """The last phase that leaves a language model: its weights are released. None where all are reward models."""
        return next((phase for phase in reversed(self.phases) if phase.recipe.trains_language_model), None)

    def start_of(self, phase: PhaseSection) -> PhaseSection | None:
        """The phase whose weights it starts from; None for the first, and for a model of its own."""
        names = [section.name for section in self.phases]
        if phase.recipe.own_model is not None:
            return None
        if phase.start is not None:
            return self.phases[names.index(phase.start)]
        number = names.index(phase.name)
        return self.phases[number - 1] if number else None

    def course_of(self, phase: PhaseSection) -> CourseRecipe:
        """The course to which the phase belongs."""
        return next(course.recipe for course in self.courses if phase.name in course.recipe.phases)

    def packed_before(self, phase: PhaseSection) -> tuple[PhaseSection, ...]:
        """The phases of the course before this one that read packed rows: it continues in the documents where they
        stopped."""
        before = self.course_of(phase).phases
        before = before[: before.index(phase.name)]
        return tuple(section for section in self.phases if section.name in before and section.recipe.reads_rows)

    def course_start_tokens(self, phase: PhaseSection) -> int:
        """Tokens of the course before the phase."""
        before = self.course_of(phase).phases
        budgets = {section.name: section.recipe.num_tokens for section in self.phases}
        return sum(budgets[name] for name in before[: before.index(phase.name)])

    def course_num_tokens(self, phase: PhaseSection) -> int:
        """Length of the whole course in tokens."""
        budgets = {section.name: section.recipe.num_tokens for section in self.phases}
        return sum(budgets[name] for name in self.course_of(phase).phases)

    def training_recipe(self, phase: PhaseSection) -> TrainingRecipe:
        """The settings that decide the result of training the phase, without the place of given weights. A reward model
        predicts no token: it has no MTP layer."""
        shared = phase.recipe.model_dump(include=set(TrainingRecipe.model_fields) & set(PhaseRecipe.model_fields))
        if phase.recipe.own_model is not None:
            shared["objective"]["own_model"]["checkpoint_dir"] = phase.name  # its content is an input of the phase
        return TrainingRecipe(
            **shared,
            phase=phase.name,
            model=self._architecture_of(phase),
            scorer=self._scorer_of(phase),
            course=self.course_of(phase),
            course_start_tokens=self.course_start_tokens(phase),
            course_num_tokens=self.course_num_tokens(phase),
            prompt_mixture=mixture_waypoints(phase.recipe.mixture) if phase.recipe.samples_answers else (),
        )

    def _architecture_of(self, phase: PhaseSection) -> ModelRecipe:
        """Of what the phase trains."""
        own = phase.recipe.own_model
        model = self.model.recipe if own is None else own.architecture
        if phase.recipe.trains_language_model:
            return model
        return model.model_copy(update={"num_nextn_predict_layers": 0})

    def _scorer_of(self, phase: PhaseSection) -> ModelRecipe | None:
        """The architecture of the reward model that scores a policy's answers."""
        named = [section for section in self.phases if section.name == phase.recipe.reward_model]
        return self._architecture_of(named[0]) if named else None
