"""Held-out tasks, played in their environments as reinforcement learning plays them, several times each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infra.step import Output, Progress
from model.text.chat_template import answer_of
from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import TOOLS
from tasks.data.prompts.verifiers import verify_answers
from tasks.evaluation.engine import end_token_ids
from tasks.evaluation.items import TASK, Item
from tasks.evaluation.suite import Question
from tasks.training.policy.prompts import Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationRecipe
    from tasks.evaluation.engine import PlayingEngine
    from tasks.training.policy.episodes import Episode

TASKS_PER_BLOCK = 16
"""Number of tasks that are played between two progress reports; the seeds count these blocks."""


def play_tasks(
    engine: PlayingEngine,
    tokenizer: Tokenizer,
    tasks: Sequence[Question],
    recipe: EvaluationRecipe,
    weights_version: str,
    output: Output,
) -> Iterator[Item]:
    """One item per task with all its episodes; each starts in an environment of its own. An episode depends on its
    position among the tasks, not on batches.

    A model whose logits are not finite plays none: a whole block of tasks is wrong, with the log-probability NaN.
    """
    for start in range(0, len(tasks), TASKS_PER_BLOCK):
        output.report(Progress(start, len(tasks), "tasks", "playing held-out tasks"))
        prompts = [_prompt(task) for task in tasks[start : start + TASKS_PER_BLOCK]]
        episodes = _play(engine, tokenizer, prompts, recipe, weights_version, start)
        asked = [prompt.asked for prompt in prompts for _ in range(recipe.samples_per_problem)]
        verdicts = (
            [None] * len(asked) if episodes is None else verify_answers(asked, [each.written for each in episodes])
        )
        for number, task in enumerate(tasks[start : start + TASKS_PER_BLOCK]):
            samples = slice(number * recipe.samples_per_problem, (number + 1) * recipe.samples_per_problem)
            played = [] if episodes is None else episodes[samples]
            answers = [answer_of(episode.written.text) for episode in played]
            num_right = sum(verdict is True for verdict in verdicts[samples])
            yield Item(
                task.item_id,
                TASK,
                task.domain,
                task.unit,
                task.prompt_digest,
                expected=task.answer,
                output=json.dumps(answers, ensure_ascii=False),
                score=num_right / recipe.samples_per_problem,
                log_probability=sum(sum(each.log_probabilities) for each in played) if played else math.nan,
                num_bytes=sum(len(answer.encode()) for answer in answers),
                num_samples=recipe.samples_per_problem,
                num_right=num_right,
                num_formed=sum(episode.ending == "answered" for episode in played),
            )


def longest_episode(tokenizer: Tokenizer, tasks: Sequence[Question], recipe: EvaluationRecipe) -> int:
    """Tokens of the longest task's prompt and of what may follow it; 0 without tasks."""
    prompts = [_prompt(task).token_ids(tokenizer, recipe.enable_thinking) for task in tasks]
    if not prompts:
        return 0
    assert recipe.tasks is not None, "tasks are played where the recipe has limits for them"
    return max(map(len, prompts)) + recipe.tasks.max_new_tokens


def _prompt(task: Question) -> Prompt:
    """The task as reinforcement learning asks it."""
    kind = task.item_id.split("/")[1]
    return Prompt(task.item_id, task.domain, kind, task.text, signatures(TOOLS[kind]), task.answer)


def _play(
    engine: PlayingEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    recipe: EvaluationRecipe,
    weights_version: str,
    seed: int,
) -> list[Episode] | None:
    """samples_per_problem episodes of each prompt, to their ends; None where the logits are not finite."""
    from model.generation.generation import NonFiniteLogitsError, Sampling, sampling_draws
    from tasks.training.policy.episodes import Episode, EpisodePlayer

    assert recipe.tasks is not None, "tasks are played where the recipe has limits for them"
    stops = end_token_ids(tokenizer)
    sampling = Sampling(recipe.tasks.max_new_tokens, recipe.temperature, stop_token_ids=stops, seed=seed)
    asked = [prompt for prompt in prompts for _ in range(recipe.samples_per_problem)]
    episodes = [
        Episode(prompt.token_ids(tokenizer, recipe.enable_thinking), draws, prompt.open_environment(), prompt.kind)
        for prompt, draws in zip(asked, sampling_draws(sampling, len(asked)), strict=True)
    ]
    player = EpisodePlayer(tokenizer, recipe.tasks.episodes, stops, recipe.enable_thinking)
    try:
        player.play(lambda rows, given: engine.generate(rows, sampling, weights_version, given), episodes)
    except NonFiniteLogitsError:
        return None
    return episodes
