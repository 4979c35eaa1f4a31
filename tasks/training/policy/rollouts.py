"""Prompts in the order of a policy phase, and the answers that the weights of a step sample to them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from configs.schema import PolicyObjective, TrainingRecipe
from model.generation.generation import InProcessEngine, Sampling
from model.text.chat_template import encode, problem_prompt
from tasks.data.packing.row_order import shuffled_rows
from tasks.training.policy.rewards import refuse_broken_rewards, reward_answer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from model.architecture.transformer import Glm4Moe


@dataclass(frozen=True)
class Prompt:
    id: str
    question: str
    answer: str


@dataclass(frozen=True)
class Rollout:
    """One sampled answer: a row of the step."""

    prompt: Prompt
    prompt_ids: list[int]
    answer_ids: list[int]
    """With the stop token that ended it, if one did: it is trained too."""
    log_probabilities: list[float]
    """Of the answer's tokens when they were sampled, at the temperature of the sampling."""
    text: str
    reward: float


class PromptOrder:
    """Which prompt the k-th group of a phase asks: shuffled by (seed, epoch), every prompt once per epoch."""

    def __init__(self, prompts_path: Path, seed: int) -> None:
        import pyarrow.parquet as pq

        columns = pq.read_table(prompts_path, columns=["id", "prompt", "answer"]).sort_by("id").to_pylist()
        self._prompts = [Prompt(row["id"], row["prompt"], row["answer"]) for row in columns]
        self._seed = seed

    def __len__(self) -> int:
        return len(self._prompts)

    def groups(self, start: int, stop: int) -> list[Prompt]:
        """Prompts of the groups start..stop-1."""
        return [self._prompts[self._index(number)] for number in range(start, stop)]

    def _index(self, number: int) -> int:
        epoch, index = divmod(number, len(self._prompts))
        return int(shuffled_rows(np.array([index]), len(self._prompts), self._seed + epoch)[0])


def policy_model(model: Glm4Moe, dtype: str) -> Glm4Moe:
    """The model as the training pass computes it: itself, or a bfloat16 copy. Sampling with other arithmetic is another
    policy."""
    if dtype == "float32":
        return model
    # The copies replace the parameters while the rest is copied: no second set in float32 is ever made.
    copies = {
        id(parameter): torch.nn.Parameter(parameter.detach().to(getattr(torch, dtype)))
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, copies)


def sample_answers(
    model: Glm4Moe,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    recipe: TrainingRecipe,
    stop_token_ids: tuple[int, ...],
    step: int,
    batch_sequences: int,
) -> list[Rollout]:
    """A group of answers per prompt, group by group, `batch_sequences` answers at once. Each answer has draws of its
    own, decided by seed, step and its index in the step. The size of the batches changes at most the last bits, where
    decoding rounds by it (bfloat16).

    Raises ValueError for a prompt that leaves no room for its answer, RewardError for a reward that is no number.
    """
    objective = recipe.objective
    assert isinstance(objective, PolicyObjective), objective
    asked = [prompt for prompt in prompts for _ in range(objective.samples_per_prompt)]
    prompt_ids = [_prompt_ids(tokenizer, prompt, objective, recipe.sequence_length) for prompt in prompts]
    asked_ids = [token_ids for token_ids in prompt_ids for _ in range(objective.samples_per_prompt)]
    engine = InProcessEngine(model, weights_version=str(step), batch_sequences=batch_sequences)
    sampling = Sampling(
        objective.max_new_tokens, objective.temperature, stop_token_ids=stop_token_ids, seed=_seed(recipe.seed, step)
    )
    generation = engine.generate(asked_ids, sampling, str(step))
    rollouts = []
    for prompt, token_ids, answer_ids, log_probabilities in zip(
        asked, asked_ids, generation.token_ids, generation.sampled_log_probabilities, strict=True
    ):
        text = tokenizer.decode(answer_ids, skip_special_tokens=False)
        reward = reward_answer(text, prompt.answer, is_finished=answer_ids[-1] in stop_token_ids)
        rollouts.append(Rollout(prompt, token_ids, answer_ids, log_probabilities, text, reward))
    for start in range(0, len(rollouts), objective.samples_per_prompt):
        group = rollouts[start : start + objective.samples_per_prompt]
        refuse_broken_rewards([rollout.reward for rollout in group], group[0].prompt.id, step)
    return rollouts


def describe_groups(
    rollouts: Sequence[Rollout], group_size: int, num_groups: int, step: int
) -> list[dict[str, object]]:
    """Lines of rollouts.jsonl: the first groups of a step with what was answered and what it was worth."""
    groups = [rollouts[start : start + group_size] for start in range(0, group_size * num_groups, group_size)]
    return [
        {
            "step": step,
            "prompt_id": group[0].prompt.id,
            "question": group[0].prompt.question,
            "answer": group[0].prompt.answer,
            "samples": [rollout.text for rollout in group],
            "rewards": [rollout.reward for rollout in group],
        }
        for group in groups
        if group
    ]


def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt, objective: PolicyObjective, sequence_length: int) -> list[int]:
    token_ids, _ = encode(tokenizer, problem_prompt(prompt.question, objective.enable_thinking))
    room = sequence_length - objective.max_new_tokens
    if len(token_ids) > room:
        raise ValueError(
            f"prompt {prompt.id} has {len(token_ids)} tokens, sequence_length ({sequence_length}) less max_new_tokens "
            f"({objective.max_new_tokens}) leaves {room}: raise the phase's sequence_length or lower "
            f"objective.max_new_tokens"
        )
    return token_ids


def _seed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big")
