"""The objectives that a phase may train for."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Domain, Frozen
from configs.schema.courses import PhaseName
from configs.schema.model import ModelRecipe
from configs.schema.policy_objectives import (
    MAX_MEASURED_SAMPLES,
    EpisodeRecipe,
    GroupObjective,
    PpoObjective,
    refuse_long_turns,
)


class PretrainObjective(Frozen):
    """Cross-entropy of every next token."""

    kind: Literal["pretrain"]


class SftObjective(Frozen):
    """Cross-entropy of what the assistant writes and of the role token that closes its turn; documents of the mixture
    as in pretrain."""

    kind: Literal["sft"]


class SolutionObjective(Frozen):
    """The loss of sft, on sampled answers that a verifier found right: in the mixture they are the domain chat
    (tasks/evaluation/sample_solutions.py). What rejection_sampling and distillation share."""

    kind: Literal["rejection_sampling", "distillation"]
    samples_per_prompt: int = Field(ge=2, le=MAX_MEASURED_SAMPLES)
    """Answers to every prompt (S0: 8 to 64)."""
    max_kept_per_prompt: int = Field(gt=0)
    """Most right answers to one prompt that become conversations, no two of them equal: an easy prompt would otherwise
    count samples_per_prompt times."""
    dropped_shortest_share: float = Field(ge=0, lt=1)
    """Share of the prompts with kept answers whose conversations are left out: those with the shortest answers, by
    their mean number of tokens (report: 0.5 gained 2 to 4 % in mathematics and science on half the data). 0: none. Of
    each expert by itself."""
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    enable_thinking: bool
    """Whether the prompts ask for reasoning in <think>."""
    rollouts: Literal["in_process", "sglang", "vllm"]
    """Who answers: the process that evaluates, which holds the whole model, or the server of this kind that the phase's
    resources.rollout_server names, which reads the models from the store; its draws are its own."""


class RejectionSamplingObjective(SolutionObjective):
    """The answers are those of the weights at the phase's start, to every prompt that has no environment."""

    kind: Literal["rejection_sampling"]


class OwnModelRecipe(Frozen):
    """A model with an architecture of its own, and the weights that it starts from."""

    architecture: ModelRecipe
    """That of the weights' config.json. The vocabulary is the scale's."""
    checkpoint_dir: str = Field(min_length=1)
    """Directory of the weights in the public layout, with the tokenizer.json that the data are tokenized with. It
    enters no key: the digest of its files does."""


class RewardObjective(Frozen):
    """Bradley-Terry loss over preference pairs, on a scalar head in place of the unembedding. A step has batch_tokens /
    sequence_length answers, each a row of its own; two of them are a pair. So in dpo."""

    kind: Literal["reward"]
    own_model: OwnModelRecipe | None
    """A model of another size than the scale's (S0: 7 to 13 B beside 355 B); null: the scale's, from the phase that
    `start` names."""


class DpoObjective(Frozen):
    """Direct preference optimization (arXiv 2305.18290)."""

    kind: Literal["dpo"]
    beta: float = Field(gt=0)
    """How strongly the policy is held to its reference: lower lets it go further (arXiv 2305.18290: 0.1)."""
    reference: PhaseName | None
    """The earlier phase whose model is the reference; null: the model that the phase starts from."""


class ExpertRecipe(Frozen):
    """A model that distillation joins with others."""

    phase: PhaseName
    """The earlier phase that left it."""
    domains: tuple[Domain, ...] = Field(min_length=1)
    """Domains of the prompts that it answers; tasks of environments (agentic) it plays."""


class DistillationObjective(SolutionObjective):
    """The answers are those of experts, each to the prompts of its domains: the phase joins them in the weights that it
    starts from (report, section 3: experts are unified by self-distillation)."""

    kind: Literal["distillation"]
    experts: tuple[ExpertRecipe, ...] = Field(min_length=1)
    """They answer one after the other. Every domain that has prompts is one expert's."""
    episodes: EpisodeRecipe

    @model_validator(mode="after")
    def _each_is_named_once(self) -> Self:
        phases = [expert.phase for expert in self.experts]
        domains = [domain for expert in self.experts for domain in expert.domains]
        for what, names in (("phase", phases), ("domain", domains)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(
                    f"experts name the {what} {' and '.join(twice)} twice: name every expert once, and every domain at "
                    f"one expert"
                )
        refuse_long_turns(self.episodes, self.max_new_tokens)
        return self


Objective = Annotated[
    PretrainObjective
    | SftObjective
    | RejectionSamplingObjective
    | DistillationObjective
    | RewardObjective
    | DpoObjective
    | GroupObjective
    | PpoObjective,
    Field(discriminator="kind"),
]
