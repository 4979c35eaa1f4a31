"""Chooses generated tasks of the environments, each solved once in its environment, and writes how.

As of problems, the tasks whose key hashes to the side of evaluation are never trained on: those are evaluated. A task
that is solved by doing and saying nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random

from infra.step import canonical_json
from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import GENERATORS, OPENERS, TOOLS
from tasks.data.environments.task import Task
from tasks.data.problems.reasoning_families import is_evaluation_key
from tasks.data.records.documents import AGENTIC, document_id

Row = dict[str, object]
TASK_SOURCE, HELD_OUT_TASK_SOURCE = "synthetic/tasks", "synthetic/held-out-tasks"
TASK_COLUMNS = "id string, domain string, kind string, prompt string, tools string, answer string"

MAX_BARREN_DRAWS = 10_000
"""Draws in succession without a new task after which an environment counts as exhausted."""


def task_rows(counts: Mapping[str, int], num_chats: int) -> tuple[list[Row], list[Row]]:
    """(rows of tasks.parquet, `counts` of each environment; rows of chats.parquet, `num_chats` of each)."""
    prompts: list[Row] = []
    chats: list[Row] = []
    for kind, count in sorted(counts.items()):
        tools, tasks = signatures(TOOLS[kind]), choose_tasks(kind, num_chats + count)
        for number, task in enumerate(tasks[:num_chats]):
            place = _place(f"synthetic/{kind}-chats", number) | {"offset": number, "piece": 0, "kind": kind}
            chats.append(place | {"messages": canonical_json(conversation(kind, task)), "tools": tools})
        prompts += [
            _asked(TASK_SOURCE, len(prompts) + number, kind, each) for number, each in enumerate(tasks[num_chats:])
        ]
    return prompts, chats


def held_out_task_rows(kinds: Iterable[str], count: int) -> list[Row]:
    """Rows of held_out_tasks.parquet: `count` tasks of each environment, on the side of evaluation."""
    tasks = [(kind, task) for kind in sorted(kinds) for task in choose_tasks(kind, count, for_evaluation=True)]
    return [_asked(HELD_OUT_TASK_SOURCE, number, *each) for number, each in enumerate(tasks)]


def _asked(source: str, number: int, kind: str, task: Task) -> Row:
    """A row of TASK_COLUMNS."""
    place: Row = {"id": document_id(source, number, 0), "domain": AGENTIC, "kind": kind, "prompt": task.question}
    return place | {"tools": signatures(TOOLS[kind]), "answer": task.expected}


def _place(source: str, number: int) -> Row:
    return {"id": document_id(source, number, 0), "source": source, "collection": source, "licence": ""}


def choose_tasks(kind: str, count: int, for_evaluation: bool = False) -> list[Task]:
    """`count` different tasks of one side. Raises ValueError if the environment has fewer."""
    chosen: list[Task] = []
    seen: set[str] = set()
    number = barren = 0
    while len(chosen) < count:
        task = GENERATORS[kind](Random(f"{kind} {number}"))
        number, barren = number + 1, barren + 1
        is_new = task.question not in seen and is_evaluation_key(f"{kind} {task.key}") == for_evaluation
        if is_new and not OPENERS[kind](task.expected).judge(""):
            assert is_solved(kind, task), task
            barren = 0
            seen.add(task.question)
            chosen.append(task)
        if barren == MAX_BARREN_DRAWS:
            raise ValueError(
                f"synthesize: {count} tasks of environment {kind} are asked for, it gives only {len(chosen)}: lower "
                f"synthesize.num_evaluation_tasks, synthesize.tasks.{kind} or synthesize.num_task_chats"
            )
    return chosen


def is_solved(kind: str, task: Task) -> bool:
    """Whether the task's own calls and last words are right in its environment. Raises ToolError."""
    environment = OPENERS[kind](task.expected)
    for name, arguments in task.calls:
        environment.call(name, arguments)
    return environment.judge(task.answer) is True


def conversation(kind: str, task: Task) -> list[dict[str, object]]:
    """The messages of one who solves the task, in the form of chats.parquet."""
    environment = OPENERS[kind](task.expected)
    messages = [_message("user", task.question)]
    for name, arguments in task.calls:
        messages.append(_message("assistant", "") | {"tool_calls": [{"name": name, "arguments": arguments}]})
        messages.append(_message("tool", environment.call(name, arguments)))
    return [*messages, _message("assistant", task.answer)]


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content, "reasoning": "", "tool_calls": []}
