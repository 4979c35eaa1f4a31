"""Held-out tasks of evaluation, played by engines that write what they are told."""

from __future__ import annotations

import json
import math

from model.generation.generation import Generation, NonFiniteLogitsError
from model.text.chat_template import encode, render_to_train
from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import TOOLS
from tasks.data.problems.environment_tasks import choose_tasks, conversation
from tasks.evaluation.items import TASK, accuracy, accuracy_interval
from tasks.evaluation.played_tasks import play_tasks
from tasks.evaluation.suite import Question
from tests.support.evaluation_fakes import RECIPE, toy_tokenizer
from tests.support.toy_steps import local_output

KINDS = ("calculator", "search", "retail")
LIMITS = RECIPE.tasks.model_copy(
    update={
        "max_new_tokens": 3000,
        "episodes": RECIPE.tasks.episodes.model_copy(
            update={"max_turns": 6, "max_turn_tokens": 400, "max_observation_chars": 1000}
        ),
    }
)


QUESTIONS = {task.question: (kind, task) for kind in KINDS for task in choose_tasks(kind, 3, for_evaluation=True)}


class Player:
    """An engine that writes the turns by which a task is solved, or its last turn at once."""

    def __init__(self, skips_tools=False):
        self.rows = []
        for kind, task in QUESTIONS.values():
            messages = conversation(kind, task)
            messages = [messages[0], messages[-1]] if skips_tools else messages
            tools = json.loads(signatures(TOOLS[kind]))
            self.rows.append(encode(toy_tokenizer(), render_to_train(messages, tools)))  # pyright: ignore

    def generate(self, prompts, sampling, weights_version, draws):
        written = [self._turn(list(prompt)) for prompt in prompts]
        assert all(0 < len(turn) <= len(own) for turn, own in zip(written, draws, strict=True))
        numbers = [[-0.5] * len(turn) for turn in written]
        return Generation(written, numbers, numbers, numbers, weights_version)

    def _turn(self, prompt):
        row, trained = next(row for row in self.rows if row[0][: len(prompt)] == prompt)
        stop = next((n for n in range(len(prompt), len(row)) if not trained[n]), len(row))
        return row[len(prompt) : stop]


class BrokenModel:
    def generate(self, prompts, sampling, weights_version, draws):
        raise NonFiniteLogitsError


def play(engine, tmp_path):
    tasks = [
        Question(f"{TASK}/{kind}/{number}", TASK, "agentic", str(number), question, task.expected)
        for number, (question, (kind, task)) in enumerate(QUESTIONS.items())
    ]
    recipe = RECIPE.model_copy(update={"tasks": LIMITS})
    return list(play_tasks(engine, toy_tokenizer(), tasks, recipe, "1", local_output(tmp_path)))


def test_who_calls_the_tools_and_says_the_answer_solves_every_task(tmp_path):
    items = play(Player(), tmp_path)
    assert len(items) == 9 and accuracy(items, TASK) == 1.0 and accuracy_interval(items, TASK)[0] > 0.6
    assert {(item.num_samples, item.num_right, item.num_formed) for item in items} == {(4, 4, 4)}
    assert all(item.log_probability < 0 and len(json.loads(item.output)) == 4 for item in items)


def test_where_the_end_of_the_environment_counts_the_same_last_words_without_calls_are_wrong(tmp_path):
    """A shop whose order must change: the words alone change nothing. An answer that was known needs no tool."""
    items = play(Player(skips_tools=True), tmp_path)
    changed = [item for item in items if "/retail/" in item.item_id and not json.loads(item.expected)["said"]]
    assert changed and all((item.score, item.num_formed) == (0.0, 4) for item in changed)
    assert all(item.score == 1.0 for item in items if "/calculator/" in item.item_id)


def test_a_model_that_is_not_finite_solves_none_and_is_counted(tmp_path):
    items = play(BrokenModel(), tmp_path)
    assert {item.num_right for item in items} == {0} and all(math.isnan(item.log_probability) for item in items)
