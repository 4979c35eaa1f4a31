"""Reads one record of a file of role `prompts` as a prompt with a checkable answer, or says why it is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase
from typing import Any

from infra.step import canonical_json
from tasks.data.environments.calculator import KIND as CALCULATOR
from tasks.data.environments.calculator import is_same_number
from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import TOOLS as ENVIRONMENT_TOOLS
from tasks.data.environments.passages import KIND as SEARCH
from tasks.data.environments.patches import PatchError, apply_patch
from tasks.data.environments.python_programs import KIND as PYTHON
from tasks.data.environments.repository import KIND as SWE_TASK
from tasks.data.environments.repository import failed_tests
from tasks.data.environments.repository_tests import name_of
from tasks.data.problems.refusals import HARMFUL, HARMLESS, expected_behaviour
from tasks.data.prompts.constraints import constraint_problem
from tasks.data.prompts.function_calls import ExpectedCall, name_and_arguments
from tasks.data.prompts.published_layouts import LacksError, in_form_of_kind, passage_of
from tasks.data.readers.json_lines import is_deep
from tasks.data.records.record_fields import media_of
from tasks.data.seeds.problem_kinds import CHOICE, CODE, CONSTRAINTS, MATH, SAFETY, TOOLS
from tasks.data.seeds.seed_problems import asked_question, code_parts, math_parts, only_question

Given = Mapping[str, Any]
LABELS = {HARMFUL: HARMFUL, HARMLESS: HARMLESS, "unsafe": HARMFUL, "safe": HARMLESS}
CHOOSE = "Answer with the letter of the right choice."
LEFT_OUT = object()
"""Stands for a field without a value."""
MAX_EXACT_VALUES = 1000
ANY_TYPE = "any"
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""BFCL's names of types that JSON Schema names otherwise; where any is allowed, it names none."""
TEST_IDS = ("FAIL_TO_PASS", "PASS_TO_PASS")


class UnusablePromptError(ValueError):
    """A record is no prompt with a checkable answer, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class CheckablePrompt:
    question: str
    tools: str
    """Function descriptions that the prompt shows, as a JSON list."""
    answer: str
    """What the verifier of the kind expects (tasks/data/prompts/verifiers.py)."""


def prompt_of(kind: str, record: Given) -> CheckablePrompt:
    """Raises UnusablePromptError."""
    if media_of(record):
        raise UnusablePromptError("unsupported_part")
    try:
        record = in_form_of_kind(kind, record)
    except LacksError as error:
        raise UnusablePromptError("no_answer") from error
    question, tools, answer = READERS[kind](record)
    tools = signatures(ENVIRONMENT_TOOLS[kind]) if kind in ENVIRONMENT_TOOLS else tools
    if not question.strip():
        raise UnusablePromptError("no_question")
    if not answer.strip():
        raise UnusablePromptError("no_answer")
    return CheckablePrompt(question.strip(), tools, answer.strip())


def _mathematics(record: Given) -> tuple[str, str, str]:
    answer, _ = math_parts(record)
    return asked_question(record), "[]", answer


def _program(record: Given) -> tuple[str, str, str]:
    tests, _, module, told = code_parts(record)
    question = asked_question(record)
    answer = canonical_json({"tests": tests, "module": module}) if tests.strip() else ""
    return f"{question}\n{told}" if question else "", "[]", answer


def _choice(record: Given) -> tuple[str, str, str]:
    """`choices` or `options`, and `answer` or `gold`: a letter, a number from 0, or the text of a choice. Choices are a
    list, or an object by letters, as MedQA's."""
    question = asked_question(record)
    stated = [_without_letters(record.get(key)) for key in ("choices", "options")]
    choices = next((each for each in stated if isinstance(each, list)), [])
    if not 2 <= len(choices) <= len(ascii_uppercase) or not all(isinstance(choice, str) for choice in choices):
        raise UnusablePromptError("no_choices")
    letters = ascii_uppercase[: len(choices)]
    lines = [f"{letter}. {choice.strip()}" for letter, choice in zip(letters, choices, strict=True)]
    given = record.get("answer", record.get("gold"))
    answer = ""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(choices):
        answer = letters[given]
    elif isinstance(given, str):
        # The text of a choice comes first: choices may be letters themselves, in another order.
        answer = letters[choices.index(given)] if choices.count(given) == 1 else given if given in [*letters] else ""
    passage = passage_of(record)
    return (
        "\n".join([*([passage, ""] if passage else []), question, "", *lines, "", CHOOSE]) if question else "",
        "[]",
        answer,
    )


def _without_letters(choices: object) -> object:
    if isinstance(choices, dict) and [*choices] == [*ascii_uppercase[: len(choices)]]:
        return [*choices.values()]
    return choices


def _constraints(record: Given) -> tuple[str, str, str]:
    """IFEval's fields: `prompt`, `instruction_id_list`, and `kwargs` with a mapping for each."""
    names, given = record.get("instruction_id_list"), _parsed(record.get("kwargs"))
    if not isinstance(names, list) or not isinstance(given, list) or len(names) != len(given) or not names:
        raise UnusablePromptError("no_answer")
    wanted = []
    for name, arguments in zip(names, given, strict=True):
        if not isinstance(arguments, dict):
            raise UnusablePromptError("malformed_constraint")
        stated = {key: value for key, value in arguments.items() if value is not None}
        if problem := constraint_problem(str(name), stated):
            raise UnusablePromptError(problem)
        wanted.append([name, stated])
    return asked_question(record), "[]", canonical_json(wanted)


def _tools(record: Given) -> tuple[str, str, str]:
    question, tools = tool_request(record)
    truth = record.get("ground_truth")
    calls = (
        _accepted_calls(truth)
        if isinstance(truth, list)
        else _exact_calls(_parsed(record.get("answer", record.get("answers"))))
    )
    return question, tools, canonical_json(calls)


def tool_request(record: Given) -> tuple[str, str]:
    """(the question, the functions as a JSON list): `tools`, or BFCL's `function`. A record with the functions has its
    calls in `answer`, a list of {name, arguments}, or in BFCL's `ground_truth`, with the accepted values of every
    argument."""
    turns = record.get("question")
    if isinstance(turns, list) and len(turns) > 1:
        raise UnusablePromptError("several_turns")
    tools = _parsed(record.get("tools", record.get("function")))
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise UnusablePromptError("no_tools")
    described = [_json_schema(tool if "function" in tool else {"type": "function", "function": tool}) for tool in tools]
    question = asked_question(record) or _only_turn(record.get("question"))
    return question, json.dumps(described, ensure_ascii=False)


def _json_schema(described: Any) -> Any:
    """A description with the types of JSON Schema, where it has BFCL's."""
    if isinstance(described, list):
        return [_json_schema(item) for item in described]
    if not isinstance(described, dict):
        return described
    named = {
        key: JSON_TYPES.get(value, value) if key == "type" and isinstance(value, str) else _json_schema(value)
        for key, value in described.items()
    }
    return {key: value for key, value in named.items() if (key, value) != ("type", ANY_TYPE)}


def _safety(record: Given) -> tuple[str, str, str]:
    """`label`: harmful or harmless, or unsafe or safe as in XSTest; `answer`, if a harmless one has a known answer."""
    label = LABELS.get(str(record.get("label")))
    if label is None:
        raise UnusablePromptError("no_label")
    known = record.get("answer")
    answer = known.strip() if label == HARMLESS and isinstance(known, str) else ""
    return asked_question(record), "[]", expected_behaviour(label, answer)


def _exact_calls(given: object) -> list[ExpectedCall]:
    calls: list[ExpectedCall] = []
    for call in given if isinstance(given, list) else [given]:
        name, written = name_and_arguments(call)
        arguments = _parsed(written)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise UnusablePromptError("no_answer")
        accepted = {key: [value] for key, value in arguments.items()}
        calls.append({"name": name, "accepted": accepted, "optional": []})
    return calls


def _accepted_calls(given: Sequence[object]) -> list[ExpectedCall]:
    """Of BFCL: {name: {argument: accepted values}}; an empty text among them says that the argument is optional."""
    calls: list[ExpectedCall] = []
    for call in given:
        if not isinstance(call, dict) or len(call) != 1:
            raise UnusablePromptError("no_answer")
        ((name, accepted),) = call.items()
        if not isinstance(accepted, dict) or not all(isinstance(values, list) for values in accepted.values()):
            raise UnusablePromptError("no_answer")
        optional = [key for key, values in accepted.items() if "" in values]
        exact = {key: [one for value in values for one in _exact_values(value)] for key, values in accepted.items()}
        calls.append({"name": name, "accepted": exact, "optional": optional})
    return calls


def _exact_values(accepted: object) -> list[object]:
    """Every value that an accepted one stands for: the fields of an object have lists of accepted values, as arguments
    have, and an empty text among them says that the field may be left out."""
    if isinstance(accepted, list):
        choices = [_exact_values(item) for item in accepted]
    elif isinstance(accepted, dict):
        listed = [values if isinstance(values, list) else [values] for values in accepted.values()]
        choices = [
            [LEFT_OUT if value == "" else one for value in values for one in _exact_values(value)] for values in listed
        ]
    else:
        return [accepted]
    if math.prod(map(len, choices)) > MAX_EXACT_VALUES:
        raise UnusablePromptError("too_many_accepted_values")
    combinations = product(*choices)
    if isinstance(accepted, list):
        return [list(chosen) for chosen in combinations]
    return [
        {key: value for key, value in zip(accepted, chosen, strict=True) if value is not LEFT_OUT}
        for chosen in combinations
    ]


def _only_turn(given: object) -> str:
    """The question of BFCL's turns of messages, where it is one turn of one user."""
    question = only_question(given[0]) if isinstance(given, list) and len(given) == 1 else ""
    if not question:
        raise UnusablePromptError("not_one_question")
    return question


def _parsed(value: object) -> Any:
    """The value of JSON text, None for other text; anything else as it is. It is `malformed` if it nests too
    deeply, or has half of a surrogate pair, which no column holds."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnusablePromptError("malformed") from error
    except (ValueError, RecursionError):
        return None
    if is_deep(parsed):
        raise UnusablePromptError("malformed")
    return parsed


def _number(record: Given) -> tuple[str, str, str]:
    """As mathematics, with a number for an answer."""
    question, _, answer = _mathematics(record)
    if not is_same_number(answer, answer):
        raise UnusablePromptError("no_number")
    return question, "", canonical_json({"answer": answer.strip()})


def _search(record: Given) -> tuple[str, str, str]:
    """`passages`: texts, or mappings with `title` and `text`; `answer` or `answers`: texts, any of which is right."""
    passages = record.get("passages")
    answers = record.get("answers", [record.get("answer")])
    if not isinstance(passages, list) or not passages:
        raise UnusablePromptError("no_passages")
    texts = [passage if isinstance(passage, str) else _passage(passage) for passage in passages]
    if not isinstance(answers, list) or not answers or not all(isinstance(each, str) and each for each in answers):
        raise UnusablePromptError("no_answer")
    return asked_question(record), "", canonical_json({"passages": texts, "answers": answers})


def _passage(given: object) -> str:
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise UnusablePromptError("no_passages")
    return f"{given['title']}: {given['text']}" if isinstance(given.get("title"), str) else given["text"]


def _repair(record: Given) -> tuple[str, str, str]:
    """SWE-bench's fields, with the repository's files as `tree`, of which those of Python are shown. The hidden tests
    are those that fail before the record's own patch and pass after it, and those that pass both times."""
    texts = [record.get(key) for key in ("problem_statement", "patch", "test_patch")]
    tree, *ids = (_parsed(record.get(key)) for key in ("tree", *TEST_IDS))
    if not isinstance(tree, dict) or not all(isinstance(text, str) for text in texts):
        raise UnusablePromptError("no_repository")
    statement, patch, test_patch = map(str, texts)
    if not all(isinstance(part, list) or record.get(key) is None for key, part in zip(TEST_IDS, ids, strict=True)):
        raise UnusablePromptError("no_answer")
    failing, passing = ([str(each) for each in part or []] for part in ids)
    given = {path: text for path, text in tree.items() if isinstance(text, str)}
    files = _of_python(given)
    try:
        tested = {
            path: text for path, text in _of_python(apply_patch(given, test_patch)).items() if files.get(path) != text
        }
        repaired = _of_python(apply_patch(given, patch)) | tested
    except PatchError as error:
        raise UnusablePromptError("broken_patch") from error
    failed = failed_tests(repaired, failing + passing)
    wanted = failing + [each for each in passing if name_of(each) not in failed]
    if not failing or failed & set(map(name_of, failing)) or not failed_tests(files | tested, failing):
        raise UnusablePromptError("tests_failed")
    question = f"Repair the repository: change its code, not its tests. Then say what you did.\n\n{statement.strip()}"
    return question, "", canonical_json({"files": files, "tests": tested, "wanted": wanted})


def _of_python(tree: dict[str, str]) -> dict[str, str]:
    return {path: text for path, text in tree.items() if path.endswith(".py")}


READERS = {
    MATH: _mathematics,
    CODE: _program,
    CHOICE: _choice,
    CONSTRAINTS: _constraints,
    TOOLS: _tools,
    SAFETY: _safety,
    CALCULATOR: _number,
    PYTHON: _number,
    SEARCH: _search,
    SWE_TASK: _repair,
}
"""Functions record -> (question, tools, answer), by kind; the tools of an environment are the environment's."""
