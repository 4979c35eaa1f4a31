"""Rewards sampled answers: the weighted sum of a verified answer, its form and its length."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import PolicyObjective
from model.text.tokenizer_layout import END_TOKENS
from tasks.data.prompts.verifiers import WrittenAnswer, verify_answers
from tasks.training.policy.prompt_order import Prompt


class RewardError(RuntimeError):
    """A reward that is no number: raised before anything learns from it."""


@dataclass(frozen=True)
class Reward:
    """The parts of an answer's reward, and their weighted sum."""

    verified: float
    """1 for a right answer that ended by itself, else 0."""
    format: float
    """1 for an answer in form, else 0."""
    length: float
    """0 to -1."""
    has_verdict: bool
    """Whether the verifier came to one: without it `verified` is 0."""
    total: float


def reward_answers(
    prompts: Sequence[Prompt], written: Sequence[WrittenAnswer], num_tokens: Sequence[int], objective: PolicyObjective
) -> list[Reward]:
    """What each answer to its prompt is worth. `num_tokens` count the token that ended it. Depends on nothing else:
    neither on the step nor on the other answers. Raises VerifierError."""
    verdicts = verify_answers([prompt.asked for prompt in prompts], written)
    weights, rewards = objective.rewards, []
    for verdict, answer, size in zip(verdicts, written, num_tokens, strict=True):
        verified = float(verdict is True)
        form = float(is_in_form(answer, objective.enable_thinking))
        length = overlong_punishment(size, objective.max_new_tokens, weights.overlong_tokens)
        total = weights.verified * verified + weights.format * form + weights.length * length
        rewards.append(Reward(verified, form, length, verdict is not None, total))
    return rewards


def is_in_form(written: WrittenAnswer, enable_thinking: bool) -> bool:
    """Whether an answer ended by itself, once, and says something after one closed block of reasoning; without
    thinking, which the prompt then closes, it has no such block."""
    text, *rest = re.split("|".join(map(re.escape, END_TOKENS)), written.text)
    if not written.is_finished or len(rest) != 1 or rest[0]:
        return False
    if not enable_thinking:
        return bool(text.strip()) and "<think>" not in text and "</think>" not in text
    is_one_block = text.count("<think>") == text.count("</think>") == 1 and text.strip().startswith("<think>")
    return is_one_block and bool(text.partition("</think>")[2].strip())


def overlong_punishment(num_tokens: int, max_new_tokens: int, overlong_tokens: int) -> float:
    """0 up to max_new_tokens - overlong_tokens, then linearly down to -1 (arXiv 2503.14476, eq. 13)."""
    return min(0.0, (max_new_tokens - overlong_tokens - num_tokens) / overlong_tokens)


def reward_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """Means of the parts over a step's answers, and how many got no verdict."""
    size = len(rewards)
    return {
        "pass_rate": sum(reward.verified for reward in rewards) / size,
        "reward_format": sum(reward.format for reward in rewards) / size,
        "reward_length": sum(reward.length for reward in rewards) / size,
        "unverified": float(sum(not reward.has_verdict for reward in rewards)),
    }


def refuse_broken_rewards(rewards: Sequence[float], prompt_id: str, step: int) -> None:
    """Raises RewardError for a reward of one prompt's group that is not finite."""
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise RewardError(
                f"step {step}: the reward of answer {number} to prompt {prompt_id} is {reward}. The optimizer step "
                f"was not taken: correct the "
                "reward function, or take the prompt out"
            )
