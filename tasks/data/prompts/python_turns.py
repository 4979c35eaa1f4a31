"""Answers in several turns: the model calls the tool `python`, reads what its program printed, and goes on.

The tool is that of the environment `python`: each call is a program of its own in the sandbox. What is judged is the
turn that makes no call; a model that still calls in its last turn has not answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from model.text.chat_template import answer_of, observation
from tasks.data.environments.environment import ToolError, signatures
from tasks.data.environments.python_programs import TOOLS, open_python
from tasks.data.prompts.function_calls import written_calls

SHOWN_TOOLS = signatures(TOOLS)
"""The functions of a prompt, as a JSON list."""
MAX_TURNS = 8
"""Turns of the model, the last one included."""
SEEDS_PER_TURN = 1 << 20
"""Seeds between two turns of a sampled answer: more than a benchmark has answers."""
MAX_SHOWN_CHARS = 2000
"""Characters of what a program printed that the model reads: a loop may print without end."""
NUM_PROGRAMS = 2
"""Programs that run at the same time."""
OBSERVATION, AFTER_OBSERVATION = "<|observation|>", "</tool_response>"


def run_calls(turns: Sequence[str]) -> list[list[str]]:
    """What the calls of each turn are answered, in their order; nothing for a turn without a call that can be read."""
    with ThreadPoolExecutor(NUM_PROGRAMS) as threads:
        return list(threads.map(_answers, turns))


def _answers(turn: str) -> list[str]:
    environment, answers = open_python('{"answer": ""}'), []
    for name, arguments in written_calls(answer_of(turn)) or ():
        try:
            answer = environment.call(name, arguments)
        except ToolError as error:
            answer = f"Error: {error}"
        answers.append(answer[:MAX_SHOWN_CHARS].encode(errors="replace").decode())
    return answers


def shown_answers(answers: Sequence[str], enable_thinking: bool) -> str:
    """What the calls of a turn were answered, from the end of the turn up to where the model writes again."""
    return OBSERVATION + "".join(segment.text for segment in observation(answers, enable_thinking))


def last_words(written: str) -> str:
    """What the model says in its last turn; "" where that still calls, or has a call that cannot be read."""
    said = answer_of(written.rpartition(AFTER_OBSERVATION)[2])
    return said if written_calls(said) == [] else ""
