"""What a phase with reinforcement learning trains for: objectives of policies, their rewards, episodes and prompts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.courses import PhaseName

MAX_MEASURED_SAMPLES = 512
"""Answers to a prompt from one version of the weights (report: pass@512 of the hardest problems)."""
MIN_TOKEN_CLIP = 0.01
"""In bfloat16 rounding moved a token's ratio by 0.003 to 0.013 on average in random models of 3 layers."""


class RewardRecipe(Frozen):
    """What a sampled answer is worth: the sum of its parts, each times its weight. Every part is logged whatever it
    weighs."""

    verified: float = Field(ge=0)
    """Weight of 1 for a right answer that ends by itself, judged by the prompt's kind
    (tasks/data/prompts/verifiers.py); 0 for any other, and for one that got no verdict."""
    format: float = Field(ge=0)
    """Weight of 1 for one closed block of reasoning (none where none is asked for), an answer after it, and a stop."""
    length: float = Field(ge=0)
    """Weight of the soft overlong punishment, 0 to -1 (arXiv 2503.14476, eq. 13)."""
    overlong_tokens: int = Field(gt=0)
    """Last tokens of max_new_tokens over which it falls from 0 to -1 (arXiv 2503.14476: 4,096 of 20,480)."""
    reward_model: float = Field(ge=0)
    """Weight of the score that objective.reward_model gives, as it is: neither scaled nor centred. 0 where none is
    named."""

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> Self:
        if not self.verified + self.format + self.length + self.reward_model:
            raise ValueError(
                "rewards gives every part the weight 0: give one of verified, format, length and reward_model more"
            )
        return self


TimedEnvironment = Literal["calculator", "python", "search", "retail", "swe_task", "others"]
"""Kinds of prompts whose environment may have a time-out of its own, and the rest."""


class EpisodeRecipe(Frozen):
    """Limits of answers in turns, with tools between them: prompts whose kind names an environment (domain agentic).
    max_new_tokens bounds all that follows the prompt, the tools' tokens included."""

    max_turns: int = Field(gt=0)
    """Turns of the assistant; one that still calls tools in its last turn earns nothing."""
    max_turn_tokens: int = Field(gt=0)
    """Tokens of one turn; a longer one is cut off, which ends the episode and earns nothing."""
    max_observation_chars: int = Field(gt=0)
    """Characters of what a tool answers; the rest is cut off."""
    tool_seconds: dict[TimedEnvironment, Annotated[float, Field(gt=0)]]
    """Wall time of the calls of one turn by environment, far above what they need: then the episode ends and earns
    nothing. `others` is that of every environment without an entry. Programs have a limit of processor time besides
    (tasks/data/sandbox/code_sandbox.py)."""

    def seconds_of(self, kind: str) -> float:
        """Wall time of the calls of one turn in the environment of prompts of this kind."""
        times: dict[str, float] = {**self.tool_seconds}
        return times.get(kind, times["others"])

    @model_validator(mode="after")
    def _every_environment_has_a_time(self) -> Self:
        if "others" not in self.tool_seconds:
            raise ValueError(
                f"episodes.tool_seconds names {', '.join(self.tool_seconds) or 'no environment'}, and not others, the "
                f"time of all environments without an entry: add it, for example others: 60.0"
            )
        return self


class DifficultyRecipe(Frozen):
    """Which prompts a phase asks, by their pass rate: the share of right answers that the weights at the phase's start
    give to each. It is measured once, before the phase trains (tasks/evaluation/sample_solutions.py); not for tasks of
    environments."""

    samples_per_prompt: int = Field(ge=2, le=MAX_MEASURED_SAMPLES)
    """Answers to every prompt (report: 8 tell moderate problems from others, 512 what is hard from what is
    impossible)."""
    min_pass_rate: float = Field(ge=0, le=1)
    """Prompts with a lower pass rate are too hard and never asked; 0 asks also those without a right answer."""
    max_pass_rate: float = Field(ge=0, le=1)
    """Prompts with a higher pass rate are too easy and never asked."""
    order: Literal["shuffled", "easy_first"]
    """easy_first: every epoch of a domain asks its prompts by falling pass rate, equal ones shuffled. A phase with
    fewer groups than prompts then leaves out the hardest."""

    @model_validator(mode="after")
    def _band_holds_something(self) -> Self:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"difficulty.min_pass_rate ({self.min_pass_rate:g}) exceeds max_pass_rate ({self.max_pass_rate:g}), so "
                f"no prompt is asked: lower the first or raise the second"
            )
        return self


class DynamicTemperature(Frozen):
    """When the temperature of the sampling rises in a phase (report, section 3.2): where rewards stop rising, answers
    become alike and teach nothing."""

    window_steps: int = Field(gt=0)
    """Steps whose mean reward is compared with that of as many steps before them."""
    min_gain: float = Field(ge=0)
    """A mean reward that rose by less has stopped rising: the temperature is multiplied by factor."""
    max_drop: float = Field(ge=0)
    """A mean reward that fell by more in the window after a rise: the temperature goes back to the one before, for the
    rest of the phase (report: 1 %, of held-out prompts)."""
    factor: float = Field(gt=1)
    max_temperature: float = Field(gt=0)


def refuse_long_turns(episodes: EpisodeRecipe, max_new_tokens: int) -> None:
    """Raises ValueError where one turn may be longer than all turns together."""
    if episodes.max_turn_tokens > max_new_tokens:
        raise ValueError(
            f"episodes.max_turn_tokens ({episodes.max_turn_tokens}) must not exceed max_new_tokens "
            f"({max_new_tokens}), which bounds all turns together: lower the first or raise the second"
        )


class ImportanceRecipe(Frozen):
    """The weight of sampled tokens against the difference between the arithmetic, or the weights, of sampling and of
    training: p trainer / p rollout, bounded."""

    kind: Literal["truncated", "masked"]
    """truncated: a ratio outside the bounds counts as the bound (S3: --use-tis). masked: what has it is left out."""
    level: Literal["tokens", "answers"]
    """Whether each token has its ratio, or all tokens of an answer have the product of theirs."""
    floor: float = Field(ge=0, le=1)
    """Lower bound; 0 for none."""
    cap: float = Field(ge=1)
    """Upper bound (slime and verl: 2.0)."""

    @model_validator(mode="after")
    def _rounding_masks_nothing(self) -> Self:
        if self.kind == "masked" and (self.cap < 1 + MIN_TOKEN_CLIP or self.floor > 1 - MIN_TOKEN_CLIP):
            raise ValueError(
                f"importance masked with floor {self.floor:g} and cap {self.cap:g}: rounding alone leaves out tokens "
                f"whose ratio is 1. Set cap to {1 + MIN_TOKEN_CLIP:g} or more and floor to {1 - MIN_TOKEN_CLIP:g} or "
                f"less, or kind to truncated"
            )
        return self


class MismatchRecipe(Frozen):
    """How far the weights that sampled a step's answers may be from those that train on them. A step beyond a bound is
    not taken and ends the phase: importance weights correct rounding, not another model."""

    max_kl: float = Field(gt=0)
    """Ceiling on rollout_kl, nats per token. In float32 it is rounding (tiny: 5e-12). In benchmarks.training.collapse
    answers of weights that were 4 steps old had 0.14 to 0.43, and training broke without a correction."""
    max_route_difference: float = Field(gt=0, le=1)
    """Ceiling on route_difference, the share of the experts chosen in sampling that training does not choose. In
    float32 it is 0; bfloat16 may choose otherwise wherever scores are near each other. 1: no ceiling."""


class PolicyObjective(Frozen):
    """Policy gradient on sampled answers: what grpo, gspo and ppo share.

    A step has batch_tokens / sequence_length answers, each a row of its own; the tokens of the budget are these rows'
    positions."""

    kind: Literal["grpo", "gspo", "ppo"]
    samples_per_prompt: int = Field(ge=2)
    """Size of a group: answers per prompt."""
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    """Of the sampling, and of all probabilities of the loss; with dynamic_temperature that of the first steps."""
    enable_thinking: bool
    """Whether the prompt asks for reasoning in <think>."""
    clip_low: float = Field(gt=0, lt=1)
    """Lower clip of the probability ratio against the weights before the update is 1 - clip_low: of tokens in grpo and
    ppo (S0: 0.2), of sequences in gspo (S3: 1e-4; arXiv 2507.18071: 3e-4)."""
    clip_high: float = Field(gt=0)
    """Upper clip is 1 + clip_high (S0: 0.2, arXiv 2503.14476: 0.28; gspo, S3: 2e-4)."""
    dual_clip: float = Field(gt=1)
    """Bound on the ratio of tokens with a negative advantage, above which they have no gradient (arXiv 1912.09729: 3):
    the lower clip alone lets a ratio of any size weigh. Acts from the second update on, as the clips do."""
    importance: ImportanceRecipe
    mismatch: MismatchRecipe
    routes: Literal["ignore", "compare", "replay"]
    """What is done with the experts that sampling chose. compare: the metric route_difference counts those that
    training does not choose. replay: training computes with them too (rollout routing replay, arXiv 2510.11370).
    ignore: they are not kept, 2 bytes for each expert of each token."""
    max_refills: int = Field(ge=0)
    """How often a step asks further prompts of the same domains for its groups of equal rewards (dynamic sampling,
    arXiv 2503.14476); 0 trains on the groups that are left. Each domain's prompts last for max_epochs."""
    updates_per_rollout: int = Field(gt=0)
    """Optimizer updates on the answers of one step, each on an equal part of its groups. From the second on the ratio
    is that of weights that have moved, so the clip acts. A step with fewer groups to learn from takes fewer."""
    loss_mean: Literal["tokens", "answers"]
    """tokens: every token of an update's answers weighs the same (arXiv 2503.14476; report: for code). answers: every
    answer does, whatever its length (arXiv 2402.03300, 2507.18071)."""
    rewards: RewardRecipe
    difficulty: DifficultyRecipe | None
    """The prompts that are asked and their order, by how hard they are for the weights at the phase's start; null: all
    of the mixture's domains, shuffled."""
    episodes: EpisodeRecipe
    max_constant_steps: int = Field(gt=0)
    """Steps in a row in which no group has two different rewards, after which training stops: nothing can be learned
    from them."""
    dynamic_temperature: DynamicTemperature | None
    """null: the temperature stays."""
    rollouts: Literal["in_process", "sglang", "vllm"]
    """Who samples answers. sglang, vllm: the server resources.rollout_server of this kind, which reads the weights of
    each step from the phase's work directory (tasks/training/policy/served_engine.py); its draws are its own, so a
    phase that is repeated ends in other bits."""
    reward_model: PhaseName | None
    """The earlier phase of objective reward whose model scores every answer; null where rewards.reward_model is 0."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        narrow = {name: value for name in ("clip_low", "clip_high") if (value := getattr(self, name)) < MIN_TOKEN_CLIP}
        if narrow and self.kind != "gspo":
            raise ValueError(
                f"{narrow} with kind {self.kind}: bounds below {MIN_TOKEN_CLIP} are those of gspo's ratio of whole "
                f"sequences; the ratio of "
                "one token moves more by rounding. Set kind gspo, or bounds as 0.2 and 0.28"
            )
        if self.rewards.overlong_tokens > self.max_new_tokens:
            raise ValueError(
                f"rewards.overlong_tokens ({self.rewards.overlong_tokens}) must not exceed max_new_tokens "
                f"({self.max_new_tokens}): lower the first or raise the second"
            )
        refuse_long_turns(self.episodes, self.max_new_tokens)
        rule = self.dynamic_temperature
        if rule is not None and rule.max_temperature <= self.temperature:
            raise ValueError(
                f"dynamic_temperature.max_temperature ({rule.max_temperature:g}) must exceed temperature "
                f"({self.temperature:g}), where it begins: raise the first, or set dynamic_temperature to null"
            )
        if self.kind == "ppo" and self.max_refills:
            raise ValueError(
                f"max_refills is {self.max_refills} with kind ppo, which learns from groups of equal rewards too: set "
                f"max_refills to 0"
            )
        if self.kind == "gspo" and self.loss_mean != "answers":
            raise ValueError("kind gspo is a mean over answers, whose whole ratio is clipped: set loss_mean to answers")
        return self

    @model_validator(mode="after")
    def _reward_model_is_weighed(self) -> Self:
        weight = self.rewards.reward_model
        if self.reward_model is None and weight:
            raise ValueError(
                f"rewards.reward_model weighs {weight}, and no model scores: set reward_model to the phase that trains "
                f"it, or the weight to 0"
            )
        if self.reward_model is not None and not weight:
            raise ValueError(
                f"reward_model is {self.reward_model}, and rewards.reward_model gives its score the weight 0: raise "
                f"the weight, or set reward_model to null"
            )
        return self


class GroupObjective(PolicyObjective):
    """grpo: advantages within the group of one prompt, no KL (report); gspo: so, with the ratio of whole sequences
    (S3). Groups of equal rewards are left out of a step: they cost no pass and count in no mean."""

    kind: Literal["grpo", "gspo"]


class PpoObjective(PolicyObjective):
    """ppo: advantages of each token against a critic (S0; arXiv 1707.06347). The critic is a model of its own with a
    scalar head, from the reward model where there is one, else from the weights that the phase starts from."""

    kind: Literal["ppo"]
    discount: float = Field(gt=0, le=1)
    """Gamma: what a reward one token later is worth (arXiv 2203.02155: 1)."""
    gae_lambda: float = Field(ge=0, le=1)
    """Lambda of generalized advantage estimation (arXiv 1506.02438): 0 trusts the critic's value of the next token, 1
    only what the answer was worth in the end."""
    kl_coefficient: float = Field(ge=0)
    """Reward that each token loses per nat of log p policy - log p reference (arXiv 2203.02155: 0.02)."""
    reference: PhaseName | None
    """The earlier phase whose model is the reference; null: the model that the phase starts from."""
    value_clip: float = Field(gt=0)
    """How far an update may move a token's value from that before the first one, and still lower the loss (0.2)."""
    critic_rate_ratio: float = Field(gt=0)
    """Learning rate of the critic over that of the policy."""
