"""Records as questions: what every kind of benchmark needs of a record, and the form in which it is asked."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from string import ascii_uppercase

from infra.step import canonical_json
from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.data.prompts.benchmark_records import Record
from tasks.data.prompts.prompt_records import UnusablePromptError, prompt_of, tool_request
from tasks.data.prompts.published_layouts import LacksError, given_text, in_form_of_kind, passage_of
from tasks.data.prompts.python_turns import SHOWN_TOOLS
from tasks.data.seeds.math_answers import without_annotations
from tasks.data.seeds.problem_kinds import CONSTRAINTS, MATH, SAFETY, TOOLS
from tasks.data.seeds.seed_problems import asked_question, code_parts
from tasks.evaluation.benchmarks.repository_tasks import RepositoryTask, issue_prompt, task_of
from tasks.evaluation.choice_questions import question_of

BETWEEN_EXAMPLES = "\n\n"
CHINESE = re.compile("[\u4e00-\u9fff]")
CHINESE_EXAM = "以下是单项选择题，请选出其中的正确答案。"
"""What is said before the questions of C-Eval and CMMLU, whose files do not name their subject in Chinese."""
COMPLETE = "Complete this function. Answer with the whole function in one block of Python.\n\n"
BOX = "\nPut the final answer in \\boxed{}."
DOMAINS = ("domain", "source", "subset")
"""Fields of a text of which the first names its part."""


@dataclass(frozen=True)
class Question:
    """One record as its kind asks it."""

    prompt: str
    """Empty for whole texts."""
    expected: str
    """The right choice's text, the ending, the final answer, or what the verifier expects, as JSON."""
    example: str
    """The prompt with its answer, as few-shot examples show it."""
    choices: tuple[str, ...] = ()
    right: int = 0
    """Number of the right choice."""
    before: str = ""
    """What precedes the examples."""
    tools: str = ""
    """The functions that may be called, as a JSON list."""
    task: RepositoryTask | None = None
    """What a patch is judged by."""
    part: str = ""
    """The part of the benchmark with a figure of its own: a category, a length, a domain of texts."""


def _parsed_choice(record: Record) -> tuple[str, list[str], int]:
    parsed = question_of(record)
    if parsed is None:
        raise LacksError("it has no query or question, no list of choices, or no gold or answer that names one")
    return parsed


def _choice(record: Record, is_chat: bool) -> Question:
    prompt, choices, right = _parsed_choice(record)
    return Question(prompt, choices[right], f"{prompt} {choices[right]}", tuple(choices), right)


def _lettered_choice(record: Record, is_chat: bool) -> Question:
    """In the form of MMLU, and of C-Eval and CMMLU where the question is Chinese."""
    _, choices, right = _parsed_choice(record)
    if len(choices) > (most := len(ascii_uppercase)):
        raise LacksError(f"it has no list of at most {most} choices, which letters name, but {len(choices)}")
    letters = ascii_uppercase[: len(choices)]
    lines = [f"{letter}. {choice.strip()}" for letter, choice in zip(letters, choices, strict=True)]
    question, subject = given_text(record, ("question", "query")).strip(), record.get("subject")
    about = f" about {subject.replace('_', ' ')}" if isinstance(subject, str) else ""
    told, cue = f"The following are multiple choice questions (with answers){about}.", "Answer:"
    if CHINESE.search(question):
        told, cue = CHINESE_EXAM, "答案："
    before, prompt = f"{told}{BETWEEN_EXAMPLES}", "\n".join([question, *lines, cue])
    return Question(prompt, letters[right], f"{prompt} {letters[right]}", tuple(letters), right, before)


def _context_choice(record: Record, is_chat: bool) -> Question:
    """WinoGrande's fields: `context_options`, `continuation` and `gold`."""
    contexts, right = record.get("context_options"), record.get("gold")
    if not isinstance(contexts, list) or len(contexts) < 2 or not all(isinstance(each, str) for each in contexts):
        raise LacksError("it has no list of texts in context_options")
    if type(right) is not int or not 0 <= right < len(contexts):
        raise LacksError("gold does not number one of context_options from 0")
    ending = given_text(record, ("continuation",))
    return Question("", ending, f"{contexts[right]} {ending}", tuple(contexts), right)


def _last_word(record: Record, is_chat: bool) -> Question:
    context, word = given_text(record, ("context",)), given_text(record, ("continuation",))
    return Question(context, word, f"{context} {word}")


def _text(record: Record, is_chat: bool) -> Question:
    text = given_text(record, ("text", "content"))
    named = [record[name] for name in DOMAINS if isinstance(record.get(name), str)]
    # The source of a crawled text is its address: a figure of one text says nothing.
    return Question("", text, text, part=next((name for name in named if name and "://" not in name), ""))


def _math(record: Record, is_chat: bool) -> Question:
    read = prompt_of(MATH, record)
    if is_chat:
        return Question(read.question + BOX, read.answer, "")
    worked = record["answer"] if isinstance(record.get("answer"), str) else read.answer
    prompt = f"Question: {read.question}\nAnswer:"
    return Question(prompt, read.answer, f"{prompt} {without_annotations(worked)}")


def _math_with_python(record: Record, is_chat: bool) -> Question:
    return replace(_math(in_form_of_kind("math", record), is_chat), tools=SHOWN_TOOLS)


def _exact(record: Record, is_chat: bool) -> Question:
    asked, answer = given_text(record, ("input", "question", "prompt")), given_text(record, ("target", "answer"))
    if passage := passage_of(record):
        asked = f"{passage}\n\n{asked}"
    prompt = asked if is_chat else f"Q: {asked}\nA:"
    return Question(prompt, answer, f"{prompt} {answer}")


def _constraints(record: Record, is_chat: bool) -> Question:
    read = prompt_of(CONSTRAINTS, record)
    return Question(read.question, read.answer, "")


def _request(record: Record, label: str) -> Question:
    """`prompt` or `question`, and `label`; a harmless one may have an `answer`."""
    read = prompt_of(SAFETY, record)
    given = json.loads(read.answer)["label"]
    if given != label:
        raise UnusablePromptError(f"{given}_request")
    return Question(read.question, read.answer, "")


def _completed_program(record: Record, is_chat: bool) -> Question:
    """HumanEval's fields: `prompt`, `test` and `entry_point`."""
    prompt, test, entry = (given_text(record, (name,)) for name in ("prompt", "test", "entry_point"))
    tests = f"{test}\ncheck({entry})\n"
    _refuse_packages(tests)
    if is_chat:
        return Question(COMPLETE + prompt, canonical_json({"begun": prompt, "name": entry, "tests": tests}), "")
    return Question(prompt, tests, "")


def _program(record: Record, is_chat: bool) -> Question:
    """MBPP's fields: `text`, `test_list` and, for examples, `code`; or a layout of program_tests."""
    tests, solution, module, told = code_parts(record)
    if not tests:
        raise LacksError("it has no tests that can be run, in test_list, tests or a published layout")
    if record.get("test_list") and isinstance(record.get("test"), str):
        tests = record["test"]  # EvalPlus's, of which the list is a part
    _refuse_packages(tests)
    stated = asked_question(record).strip()
    if not stated:
        raise LacksError("it has no question")
    asked = f"{stated}\n{told}\n" if module else f"{stated} Your code should pass these tests:\n\n{tests}\n"
    expected = canonical_json({"tests": tests, "module": module})
    if is_chat:
        return Question(asked, expected, "")
    prompt = f"You are an expert Python programmer, and here is your task: {asked}[BEGIN]\n"
    return Question(prompt, expected, f"{prompt}{solution}\n[DONE]")


def _refuse_packages(tests: str) -> None:
    """Raises LacksError for tests that import what the sandbox, which has no packages, cannot give them."""
    try:
        nodes = list(ast.walk(ast.parse(tests)))
    except SyntaxError:
        return  # the verdict says so
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    if packages:
        raise LacksError(
            f"its tests import {', '.join(sorted(packages))}, and programs run in a sandbox without packages: every "
            f"answer would fail"
        )


def _tools(record: Record, is_chat: bool) -> Question:
    """BFCL's fields: `question`, `function`, `ground_truth`, which is null where no call is right, and `category`."""
    if record.get("ground_truth", "") is None:
        (asked, tools), expected = tool_request(record), "[]"
    else:
        read = prompt_of(TOOLS, record)
        asked, tools, expected = read.question, read.tools, read.answer
    category = record.get("category")
    return Question(asked, expected, "", tools=tools, part=category if isinstance(category, str) else "")


def _patch(record: Record, is_chat: bool) -> Question:
    """SWE-bench's fields: `instance_id`, `problem_statement`, `patch`; with `tree` also `test_patch` and the tests."""
    try:
        task = task_of(record)
    except ValueError as error:
        raise LacksError(str(error)) from error
    return Question(issue_prompt(record, task.tree), record["patch"], "", task=task)


READERS: dict[str, Callable[[Record, bool], Question]] = {
    "choice": _choice,
    "lettered_choice": _lettered_choice,
    "context_choice": _context_choice,
    "last_word": _last_word,
    "text": _text,
    "math": _math,
    "math_with_python": _math_with_python,
    "exact": _exact,
    "constraints": _constraints,
    "completed_program": _completed_program,
    "program": _program,
    "tools": _tools,
    "patch": _patch,
    "refusal": lambda record, is_chat: _request(record, HARMFUL),
    "over_refusal": lambda record, is_chat: _request(record, HARMLESS),
}
"""Functions (record, whether it is asked in a chat) -> question, by kind of benchmark."""
