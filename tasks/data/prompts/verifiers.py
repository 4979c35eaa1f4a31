"""Judges answers, one function per kind of prompt: what reinforcement learning rewards and rejection sampling keeps.

An answer is what the assistant says after its reasoning; `expected` is the prompt's column `answer`. Runs in ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from model.text.chat_template import answer_of
from tasks.data.environments.environment import Environment
from tasks.data.problems.refusals import behaves
from tasks.data.prompts.constraints import satisfies
from tasks.data.prompts.function_calls import calls_agree
from tasks.data.sandbox.code_sandbox import FAILED, PASSED, find_verdict
from tasks.data.seeds.code_answers import program_of
from tasks.data.seeds.math_answers import (
    BOLD,
    BOX,
    LEFT_OUT,
    TEXT,
    answers_agree,
    boxed_answers,
    final_answer,
    without_emphasis,
)
from tasks.data.seeds.problem_kinds import CHOICE, CODE, CONSTRAINTS, EXACT, MATH, SAFETY, TOOLS

TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MAX_BOXES = 8
"""Boxes with different texts that may be equal: more are a guess."""

NAMED_CHOICE = re.compile(r"([A-Z])\**[.):]\** (?!.*\b[A-Z]\**[.):]).*")
"""A letter and its choice's text, in which no other letter is marked."""


class VerifierError(RuntimeError):
    """A verifier that failed itself."""


@dataclass(frozen=True)
class AskedPrompt:
    """What judging an answer needs of its prompt."""

    id: str
    kind: str
    expected: str


@dataclass(frozen=True)
class WrittenAnswer:
    """What an assistant wrote in its turn."""

    text: str
    """With its reasoning, and with the token that ended it, if one did."""
    is_finished: bool
    """Whether the assistant ended its turn by itself."""
    environment: Environment | None = None
    """That in which it was written, and which judges it; None for prompts that are answered in one turn."""
    earlier_turns: tuple[str, ...] = ()
    """What the assistant wrote in the turns before, in which it called tools."""


def verify_answers(asked: Sequence[AskedPrompt], written: Sequence[WrittenAnswer]) -> list[bool | None]:
    """Whether each answer is right; None where its verifier came to no verdict. An answer without an end, or with
    nothing after its reasoning, is wrong.

    Programs run in a sandbox per thread of the CPU. Their limit is processor time, so a busy machine changes no
    verdict; one that waits beyond the sandbox's wall clock gets none. Raises VerifierError.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_verify, asked, written))


def _verify(prompt: AskedPrompt, written: WrittenAnswer) -> bool | None:
    answer = answer_of(written.text) if written.is_finished else ""
    if not answer:
        return False
    try:
        if written.environment is not None:
            return written.environment.judge(answer)
        return VERIFIERS[prompt.kind](answer, prompt.expected)
    except Exception as error:
        raise VerifierError(
            f"the verifier of kind {prompt.kind} failed on an answer to prompt {prompt.id} ({error!r}): correct the "
            f"verifier, or take the prompt out of its file"
        ) from error


def equals(answer: str, expected: str) -> bool:
    """Text for text."""
    return answer == expected.strip()


def _without_tags(answer: str) -> str:
    """What is in `<answer>`, as prompts after DeepSeek-R1-Zero's ask for it; the answer itself where there are
    several such places, which are a guess, or a box beside it."""
    tagged = TAGGED.findall(answer)
    return tagged[0].strip() if len(tagged) == 1 and BOX not in TAGGED.sub("", answer) else answer


def agrees_mathematically(answer: str, expected: str) -> bool:
    """One final answer: in a box, in `<answer>`, after `####` or `answer:`, or an answer of one line. Two boxes that
    differ are a guess, and so wrong."""
    answer = _without_tags(answer)
    boxed = list(dict.fromkeys(boxed_answers(answer)))
    if len(boxed) > MAX_BOXES or any(not answers_agree(each, boxed[0]) for each in boxed[1:]):
        return False
    stated = boxed[-1] if boxed else final_answer(answer) or ("" if "\n" in answer else without_emphasis(answer))
    if (inner := boxed_answers(stated)) and stated == f"{BOX}{inner[0]}}}":
        stated = inner[0]
    return bool(stated) and answers_agree(stated, final_answer(expected) if BOX in expected else expected)


def passes_tests(answer: str, expected: str) -> bool | None:
    """None for tests that do not work across the sandbox's two processes, and where no verdict came. Raises ValueError
    on a machine without a sandbox."""
    tests = json.loads(expected)
    return {PASSED: True, FAILED: False}.get(find_verdict(program_of(answer), tests["tests"], tests["module"]))


def chooses(answer: str, expected: str) -> bool:
    """The letter of one choice, by itself, in a box, in `<answer>` or after `answer:`; as LaTeX's text, in brackets,
    with a full stop, or before that choice's text on the same line."""
    answer = _without_tags(answer)
    if len(set(boxed_answers(answer))) > 1:
        return False
    stated = (final_answer(answer) or answer).strip()
    written = without_emphasis(LEFT_OUT.sub(" ", BOLD.sub(r"\1", TEXT.sub(r"\1", stated)))).strip("(). ")
    named = None if "\n" in stated else NAMED_CHOICE.fullmatch(written)
    return (named[1] if named else written) == expected


def follows_constraints(answer: str, expected: str) -> bool:
    """All of them, as IFEval counts a prompt."""
    return all(satisfies(answer, name, arguments) for name, arguments in json.loads(expected))


def calls_functions(answer: str, expected: str) -> bool:
    """Name and arguments of every expected call, and no other call."""
    return calls_agree(answer, json.loads(expected))


VERIFIERS: dict[str, Callable[[str, str], bool | None]] = {
    EXACT: equals,
    MATH: agrees_mathematically,
    CODE: passes_tests,
    CHOICE: chooses,
    CONSTRAINTS: follows_constraints,
    TOOLS: calls_functions,
    SAFETY: behaves,
}
"""Functions (answer, expected) -> whether it is right, by kind of prompt."""
