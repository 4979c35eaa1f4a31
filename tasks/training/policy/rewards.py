"""Rewards sampled answers: the weighted sum of a verified answer, its form, its length and a reward model's score."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.schema import PolicyObjective, TrainingRecipe
from model.text.tokenizer_layout import END_TOKENS
from tasks.data.prompts.verifiers import WrittenAnswer, verify_answers
from tasks.training.policy.prompts import Prompt
from tasks.training.state.position import Position


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
    reward_model: float | None
    """The reward model's score; None where the phase has no reward model."""
    total: float


def reward_answers(
    prompts: Sequence[Prompt], written: Sequence[WrittenAnswer], num_tokens: Sequence[int], objective: PolicyObjective
) -> list[Reward]:
    """What each answer to its prompt is worth without a reward model's score. `num_tokens` count the token that ended
    it. Depends on nothing else: neither on the step nor on the other answers. Raises VerifierError."""
    verdicts = verify_answers([prompt.asked for prompt in prompts], written)
    weights, rewards = objective.rewards, []
    for verdict, answer, size in zip(verdicts, written, num_tokens, strict=True):
        verified = float(verdict is True)
        turns = [answer, *(WrittenAnswer(text, is_finished=True) for text in answer.earlier_turns)]
        form = float(all(is_in_form(turn, objective.enable_thinking) for turn in turns))
        length = overlong_punishment(size, objective.max_new_tokens, weights.overlong_tokens)
        total = weights.verified * verified + weights.format * form + weights.length * length
        rewards.append(Reward(verified, form, length, verdict is not None, None, total))
    return rewards


def add_score(reward: Reward, score: float, weight: float, is_broken_episode: bool) -> Reward:
    """The reward with the reward model's score. An episode that ended without an answer earns nothing by it, and still
    pays a negative one: at 0 a broken call would be worth more than a poor answer. NaN stays NaN."""
    paid = weight * score
    return replace(reward, reward_model=score, total=reward.total + (min(paid, 0.0) if is_broken_episode else paid))


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
    """Means of the parts over a step's answers, and how many got no verdict. `reward_score` is that of the reward
    model, absent where there is none."""
    size, scores = len(rewards), [reward.reward_model for reward in rewards if reward.reward_model is not None]
    return {
        "pass_rate": sum(reward.verified for reward in rewards) / size,
        "reward_format": sum(reward.format for reward in rewards) / size,
        "reward_length": sum(reward.length for reward in rewards) / size,
        "unverified": float(sum(not reward.has_verdict for reward in rewards)),
        **({"reward_score": sum(scores) / size} if scores else {}),
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


def refuse_constant_rewards(recipe: TrainingRecipe, position: Position) -> None:
    """Raises RewardError where max_constant_steps steps in a row had no group with two different rewards."""
    if position.policy is None or not isinstance(recipe.objective, PolicyObjective):
        return
    num_steps = position.policy.num_constant_steps
    if num_steps >= recipe.objective.max_constant_steps:
        reward = position.policy.mean_rewards[-1]
        raise RewardError(
            f"step {position.step}: in {num_steps} steps in a row (objective.max_constant_steps) no group had two "
            f"different rewards, the "
            f"last step's mean reward is {reward:g}: nothing can be learned from them. Where it is low, train the "
            f"phase before longer or "
            "ask easier prompts; where it is high, ask harder ones"
        )
