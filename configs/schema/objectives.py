"""The objectives that a phase may train for."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen


class PretrainObjective(Frozen):
    """Cross-entropy of every next token."""

    kind: Literal["pretrain"]


class SftObjective(Frozen):
    """Cross-entropy of what the assistant writes and of the role token that closes its turn; documents of the mixture
    as in pretrain."""

    kind: Literal["sft"]


class RewardObjective(Frozen):
    """Bradley-Terry loss over preference pairs, on a scalar head."""

    kind: Literal["reward"]


class DpoObjective(Frozen):
    kind: Literal["dpo"]
    beta: float = Field(gt=0)


MIN_TOKEN_CLIP = 0.01
"""In bfloat16 rounding moved a token's ratio by 0.003 to 0.013 on average in random models of 3 layers."""


class PolicyObjective(Frozen):
    """Policy gradient on sampled answers. grpo: advantages within the group of one prompt, no KL (report); gspo: the
    ratio of whole sequences (S3); ppo: a critic (S0).

    A step has batch_tokens / sequence_length answers, each a row of its own; the tokens of the budget are these rows'
    positions."""

    kind: Literal["grpo", "gspo", "ppo"]
    samples_per_prompt: int = Field(ge=2)
    """Size of a group: answers per prompt."""
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    enable_thinking: bool
    """Whether the prompt asks for reasoning in <think>."""
    clip_low: float = Field(gt=0, lt=1)
    """Lower clip of the probability ratio against the weights before the update is 1 - clip_low: of tokens in grpo and
    ppo (S0: 0.2), of sequences in gspo (S3: 1e-4; arXiv 2507.18071: 3e-4)."""
    clip_high: float = Field(gt=0)
    """Upper clip is 1 + clip_high (S0: 0.2, arXiv 2503.14476: 0.28; gspo, S3: 2e-4)."""
    importance_cap: float = Field(ge=1)
    """Ceiling on p trainer / p rollout, by which each sampled token is weighted: truncated importance sampling against
    the difference between the arithmetic of sampling and of training (S3: --use-tis, whose cap is 2.0 in slime, as in
    verl)."""
    max_constant_steps: int = Field(gt=0)
    """Steps in a row in which no group has two different rewards, after which training stops: nothing can be learned
    from them. Groups of equal rewards are left out of a step: they cost no pass and count in no mean."""

    @model_validator(mode="after")
    def _clip_fits_the_ratio(self) -> Self:
        narrow = {name: value for name in ("clip_low", "clip_high") if (value := getattr(self, name)) < MIN_TOKEN_CLIP}
        if narrow and self.kind != "gspo":
            raise ValueError(
                f"{narrow} with kind {self.kind}: bounds below {MIN_TOKEN_CLIP} are those of gspo's ratio of whole "
                f"sequences; the ratio of "
                "one token moves more by rounding. Set kind gspo, or bounds as 0.2 and 0.28"
            )
        return self


Objective = Annotated[
    PretrainObjective | SftObjective | RewardObjective | DpoObjective | PolicyObjective, Field(discriminator="kind")
]
