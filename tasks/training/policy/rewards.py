"""Rewards a sampled answer: verified equality with the problem's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from model.text.chat_template import answer_of


class RewardError(RuntimeError):
    """A reward that is no number: raised before anything learns from it."""


def reward_answer(text: str, answer: str, is_finished: bool) -> float:
    """1.0 where the assistant's text gives exactly the answer and then ends its turn, else 0.0.

    A right answer that was cut off at max_new_tokens is worth nothing: otherwise the model would not learn to stop.
    """
    return 1.0 if is_finished and answer_of(text) == answer.strip() else 0.0


def refuse_broken_rewards(rewards: Sequence[float], prompt_id: str, step: int) -> None:
    """Raises RewardError for a reward of one prompt's group that is not finite."""
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise RewardError(
                f"step {step}: the reward of answer {number} to prompt {prompt_id} is {reward}. The optimizer step "
                f"was not taken: correct the "
                "reward function, or take the prompt out"
            )
