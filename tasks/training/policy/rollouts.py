"""The answers that the weights of a step sample to its prompts, and what they are worth."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from configs.schema import PolicyObjective, TrainingRecipe
from model.generation.generation import Generation, Sampling, sampling_draws
from tasks.training.policy.episodes import Episode, EpisodeFigures, EpisodePlayer
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rewards import Reward, add_score, refuse_broken_rewards, reward_answers

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from model.architecture.transformer import Glm4Moe


MAX_SHOWN_ANSWER_CHARS = 1000
"""Of a prompt's expected answer in rollouts.jsonl: that of a repository holds all its files."""
SAMPLING_PARTS: tuple[str, ...] = ("weight_sync_seconds", "rollout_seconds", "reward_seconds")
"""Metrics of what a step does before it trains: gives the weights to who samples, plays answers, judges them."""


class RolloutEngine(Protocol):
    """Samples with one version of the weights: model/generation/generation.py, or a server (served_engine.py)."""

    weights_version: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        weights_version: str,
        draws: Sequence[Sequence[float]],
    ) -> Generation:
        """Continue each prompt by as many tokens at most as it has draws."""
        ...


@dataclass(frozen=True)
class Rollout:
    """One sampled answer: a row of the step."""

    prompt: Prompt
    prompt_ids: list[int]
    answer_ids: list[int]
    """With the stop token that ended it, if one did: it is trained too. Of an episode all its turns, with what tools
    answered between them."""
    log_probabilities: list[float]
    """Of the answer's tokens when they were sampled, at the temperature of the sampling; 0 where a tool wrote."""
    text: str
    reward: Reward
    routes_LTK: Tensor | None = None
    """The experts of each token that was read, int16 (model/architecture/routes.py); None where they are not kept."""
    tool_spans: Sequence[tuple[int, int]] = ()
    """Where in answer_ids tools wrote, from and up to: read by the model, never trained."""
    episode: EpisodeFigures | None = None
    """How it was played; None for a prompt that is answered in one turn."""
    weights_version: str = ""
    """Of the weights that sampled it, as its engine named them."""

    @property
    def row(self) -> list[int]:
        return [*self.prompt_ids, *self.answer_ids]

    @property
    def num_sampled(self) -> int:
        """Tokens of the answer that the model wrote."""
        return len(self.answer_ids) - sum(stop - start for start, stop in self.tool_spans)


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
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    recipe: TrainingRecipe,
    stop_token_ids: tuple[int, ...],
    step: int,
    first_group: int = 0,
    seconds: dict[str, float] | None = None,
) -> list[Rollout]:
    """A group of answers per prompt, group by group, by the engine's weights, before a reward model scores them.
    `first_group` is the number of the first prompt in its step; to `seconds` of SAMPLING_PARTS is added what the
    rewards took. Each answer has draws of its own, decided by seed, step and its index in the step:
    neither the rank that samples it nor its batch changes them; of a server the first seeds its own. The size of the
    batches changes at most the last bits (bfloat16). Prompts whose kind names an environment are answered in turns.

    Raises RewardError for a reward that is no number, VerifierError for a verifier that failed.
    """
    objective = recipe.objective
    assert isinstance(objective, PolicyObjective), objective
    asked = [prompt for prompt in prompts for _ in range(objective.samples_per_prompt)]
    prompt_ids = [prompt.token_ids(tokenizer, objective.enable_thinking) for prompt in prompts]
    asked_ids = [token_ids for token_ids in prompt_ids for _ in range(objective.samples_per_prompt)]
    sampling = Sampling(
        objective.max_new_tokens,
        objective.temperature,
        stop_token_ids=stop_token_ids,
        seed=sampling_seed(recipe.seed, step),
        first_index=first_group * objective.samples_per_prompt,
        keeps_routes=objective.routes != "ignore",
    )
    draws = sampling_draws(sampling, len(asked))
    episodes = [
        Episode(token_ids, own, prompt.open_environment(), prompt.kind)
        for token_ids, own, prompt in zip(asked_ids, draws, asked, strict=True)
    ]
    player = EpisodePlayer(tokenizer, objective.episodes, stop_token_ids, objective.enable_thinking)
    player.play(lambda rows, given: engine.generate(rows, sampling, engine.weights_version, given), episodes)
    started = time.perf_counter()
    num_tokens = [len(episode.token_ids) for episode in episodes]
    rewards = reward_answers(asked, [episode.written for episode in episodes], num_tokens, objective)
    if seconds is not None:
        seconds["reward_seconds"] += time.perf_counter() - started
    rollouts = [
        Rollout(
            prompt,
            episode.prompt_ids,
            episode.token_ids,
            episode.log_probabilities,
            tokenizer.decode(episode.token_ids, skip_special_tokens=False),
            reward,
            episode.routes_LTK,
            episode.tool_spans,
            episode.figures,
            engine.weights_version,
        )
        for prompt, episode, reward in zip(asked, episodes, rewards, strict=True)
    ]
    _refuse_broken_groups(rollouts, objective.samples_per_prompt, step)
    return rollouts


def add_scores(
    rollouts: Sequence[Rollout], scores: Sequence[float], objective: PolicyObjective, step: int
) -> list[Rollout]:
    """The answers with the reward model's scores in their rewards. Raises RewardError for a score that is no number."""
    scored = [
        replace(rollout, reward=add_score(rollout.reward, score, objective.rewards.reward_model, _is_broken(rollout)))
        for rollout, score in zip(rollouts, scores, strict=True)
    ]
    _refuse_broken_groups(scored, objective.samples_per_prompt, step)
    return scored


def _is_broken(rollout: Rollout) -> bool:
    return rollout.episode is not None and rollout.episode.ending != "answered"


def _refuse_broken_groups(rollouts: Sequence[Rollout], group_size: int, step: int) -> None:
    for start in range(0, len(rollouts), group_size):
        group = rollouts[start : start + group_size]
        refuse_broken_rewards([rollout.reward.total for rollout in group], group[0].prompt.id, step)


def sample_until_informative(
    sample: Callable[[Sequence[Prompt], int], list[Rollout]],
    prompts: Sequence[Prompt],
    further: Callable[[Sequence[str]], list[Prompt]],
    max_refills: int,
    group_size: int,
) -> list[Rollout]:
    """Dynamic sampling (arXiv 2503.14476, section 3.2): the answers to the prompts, and to further prompts for groups
    of equal rewards, in the order in which they were asked. `sample` gets prompts and the number of the first in the
    step, `further` the domain of each group to replace; it may give fewer. At most `max_refills` times in a step."""
    rollouts = sample(prompts, 0)
    latest = rollouts
    for _ in range(max_refills):
        groups = [latest[start : start + group_size] for start in range(0, len(latest), group_size)]
        lost = [group[0].prompt.domain for group in groups if len({rollout.reward.total for rollout in group}) == 1]
        replacing = further(lost) if lost else []
        if not replacing:
            break
        latest = sample(replacing, len(rollouts) // group_size)
        rollouts = [*rollouts, *latest]
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
            "kind": group[0].prompt.kind,
            "question": group[0].prompt.question,
            "answer": group[0].prompt.answer[:MAX_SHOWN_ANSWER_CHARS],
            "samples": [rollout.text for rollout in group],
            "weights_version": group[0].weights_version,
            "rewards": [rollout.reward.total for rollout in group],
            "parts": [asdict(rollout.reward) for rollout in group],
            "episodes": [asdict(rollout.episode) for rollout in group if rollout.episode is not None],
        }
        for group in groups
        if group
    ]


def sampling_seed(seed: int, step: int) -> int:
    """The seed of what is sampled at once, of a phase's seed and the number of the time."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big")
