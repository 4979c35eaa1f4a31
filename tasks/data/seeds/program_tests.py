"""Reads the tests of programs from records in published layouts: what a program prints for an input, or what a function
returns for arguments.

Fields: `input_output` of APPS and TACO, `public_test_cases` and `private_test_cases` of LiveCodeBench, `public_tests`,
`private_tests` and `generated_tests` of CodeContests, `tests` of DeepCoder, `verification_info` of SYNTHETIC-1,
`reward_model` of data for verl, and `test` with a function `check` of LeetCodeDataset and HumanEval.
"""

from __future__ import annotations

import base64
import json
import pickletools
import re
import typing
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from infra.step import canonical_json
from tasks.data.readers.json_lines import is_deep
from tasks.data.sandbox.code_sandbox import STANDARD_INPUT

FIELDS = (
    *("input_output", "public_test_cases", "private_test_cases", "public_tests", "private_tests", "generated_tests"),
    *("tests", "test_cases", "verification_info"),
)
ASSERTIONS = ("test_list", "tests", "test_cases", "testcase")
"""Fields of lines that assert: MBPP's, SYNTHETIC's, AceCode's, OpenCoder's."""
SOLUTIONS = "solutions"
FUNCTION_FIELDS = ("fn_name", "func_name")
MAX_TESTS_CHARS = 1 << 20
"""Of the inputs and outputs of a record; the first tests that fit are kept."""
MAX_PACKED_BYTES = 1 << 28
MODULE = "solution"
PYTHON_3 = 3
"""CodeContests' number of the language."""
READS = "The program reads standard input and prints its answer to standard output."
TESTS = """import unittest

import {module}


class Tests(unittest.TestCase):
    def test_calls(self):
        owner = {module}.Solution() if hasattr({module}, "Solution") else {module}
        for arguments, accepted in {cases}:
            returned = owner.{function}(*arguments)
            self.assertIn(list(returned) if type(returned) is tuple else returned, accepted)
"""

ENTRY_POINT = re.compile(r"Solution\(\)\.\w+")
CHECKED_TESTS = """import unittest

import {module}

{definitions}

{check}


class Tests(unittest.TestCase):
    def test_calls(self):
        check({candidate})
"""


class PublishedTests(NamedTuple):
    """All empty where a record in one of the layouts has no tests that can be run."""

    tests: str
    module: str
    """STANDARD_INPUT, or the module that the tests import."""
    told: str
    """What the question does not say of the form of the program."""


class Case(NamedTuple):
    given: Any
    """Input as text, or a list of arguments."""
    expected: Any
    function: str
    """Empty where the program prints."""


NO_TESTS = PublishedTests("", "", "")


class _UnreadableError(ValueError):
    """A field that is no list of tests."""


def published_tests(record: Mapping[str, Any]) -> PublishedTests | None:
    """None for a record in another layout. A record is worth no tests if one of its fields cannot be read: the rest
    might be the examples of the question only."""
    if "entry_point" in record and "def check(" in str(record.get("test", "")):
        return _checked(record)
    rewarded = record.get("reward_model")
    fields = [record.get(name) for name in FIELDS]
    fields.append(rewarded.get("ground_truth") if isinstance(rewarded, Mapping) else None)
    stated = [_value(field) for field in fields if field]
    if not any(isinstance(value, Mapping) or _is_list_of(Mapping, value) for value in stated):
        return NO_TESTS if "input_output" in record else None
    try:
        named = _function(_value(record.get("metadata")))
        cases = _fitting([case for value in stated for case in _cases(value, named)])
    except _UnreadableError:
        return NO_TESTS
    functions = {case.function for case in cases}
    if len(functions) != 1:
        return NO_TESTS
    function = functions.pop()
    if not function:
        return PublishedTests(canonical_json([case[:2] for case in cases]), STANDARD_INPUT, READS)
    accepted = [(case.given, _accepted(case.expected)) for case in cases]
    starter = record.get("starter_code")
    told = f"It has the function `{function}`."
    if isinstance(starter, str) and starter.strip():
        told = _told_beginning(with_typing(starter.rstrip()))
    return PublishedTests(TESTS.format(module=MODULE, function=function, cases=accepted), MODULE, told)


def _checked(record: Mapping[str, Any]) -> PublishedTests:
    """LeetCodeDataset: `test` has a function that checks a method, `prompt` what both begin with. Its `input_output` is
    written for people. HumanEval: it checks a function that `prompt` begins, after definitions that tests may use."""
    definitions, starter, name = record.get("prompt"), record.get("starter_code"), str(record["entry_point"])
    if not isinstance(definitions, str):
        return NO_TESTS
    parts = {"module": MODULE, "check": record["test"]}
    if starter is None and f"def {name}(" in definitions:
        begun = f"{definitions.rstrip()}\n    pass\n\n{name} = {MODULE}.{name}"
        tests = CHECKED_TESTS.format(**parts, definitions=begun, candidate=name)
        return PublishedTests(tests, MODULE, f"Answer with the whole function `{name}` in one block of Python.")
    if not ENTRY_POINT.fullmatch(name) or not isinstance(starter, str):
        return NO_TESTS
    tests = CHECKED_TESTS.format(**parts, definitions=definitions, candidate=f"{MODULE}.{name}")
    return PublishedTests(tests, MODULE, _told_beginning(f"{definitions.strip()}\n\n{starter.strip()}"))


def _told_beginning(lines: str) -> str:
    return f"It begins with these lines:\n```python\n{lines}\n```"


def published_solutions(record: Mapping[str, Any]) -> list[str]:
    """The texts in SOLUTIONS, of CodeContests those in Python 3."""
    given = _value(record.get(SOLUTIONS))
    if isinstance(given, Mapping):
        languages, texts = given.get("language"), given.get("solution")
        if not isinstance(languages, list) or not isinstance(texts, list) or len(languages) != len(texts):
            return []
        given = [text for language, text in zip(languages, texts, strict=True) if language == PYTHON_3]
    return list(given) if _is_list_of(str, given) else []


def published_solution(record: Mapping[str, Any]) -> str:
    """The first that is Python 3; empty where none is. LeetCodeDataset has one, in `completion`, and HumanEval the rest
    of its prompt's function, in `canonical_solution`."""
    if ENTRY_POINT.fullmatch(str(record.get("entry_point"))) and isinstance(record.get("completion"), str):
        return f"{record.get('prompt', '')}\n{record['completion']}"
    if isinstance(record.get("canonical_solution"), str):
        return f"{record.get('prompt', '')}{record['canonical_solution']}"
    return next((with_typing(text) for text in published_solutions(record) if _is_python(text)), "")


def assertions(record: Mapping[str, Any]) -> str:
    """Tests as a program: the first of ASSERTIONS, with or without a list around its lines, or functions of pytest in
    `test`; empty for text that tests nothing."""
    functions = record.get("test")
    functions = functions if isinstance(functions, str) and "def test" in functions else None
    given = next((record[name] for name in ASSERTIONS if name in record), functions)
    listed = _value(given) if isinstance(given, str) else given
    imports = record.get("test_imports")
    setup = [*(imports if isinstance(imports, list) else []), record.get("test_setup_code") or ""]
    parts: list[Any] = [*setup, *listed] if isinstance(listed, list) else [given]
    written = "\n".join(parts).strip() if _is_list_of(str, parts) else ""
    return written if re.search("assert|raise", written) else ""


def with_typing(program: str) -> str:
    """A program with the import of the names of `typing` that it uses, which LeetCode imports by itself."""
    used = set(re.findall(r"\b[A-Z]\w+\b", program)) & {"Any", "Callable", "Dict", "List", "Optional", "Set", "Tuple"}
    assert used <= set(typing.__all__)
    if not used or re.search(r"^\s*(?:from typing import|import typing)", program, re.MULTILINE):
        return program
    return f"from typing import {', '.join(sorted(used))}\n\n{program}"


def _cases(value: Any, function: str) -> list[Case]:
    """Of one field. Raises _UnreadableError."""
    if isinstance(value, Mapping) and isinstance(value.get("test_cases"), list):
        return _cases(value["test_cases"], function)
    if isinstance(value, Mapping):
        given, expected = (value.get(f"{name}s", value.get(name)) for name in ("input", "output"))
        if not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
            raise _UnreadableError
        named = _function(value)
        return [_case(*pair, named, is_json=False) for pair in zip(given, expected, strict=True)]
    if not isinstance(value, list):
        raise _UnreadableError
    cases = []
    for one in value:
        if not isinstance(one, Mapping) or "input" not in one or "output" not in one:
            raise _UnreadableError
        kind = one.get("testtype", one.get("type"))
        named = _function(one) or _function(one.get("metadata")) or function
        is_called = kind in ("functional", "function_call") or (kind is None and bool(named))
        if is_called and not named:
            raise _UnreadableError
        cases.append(_case(one["input"], one["output"], named if is_called else "", is_json=kind == "functional"))
    return cases


def _case(given: Any, expected: Any, function: str, is_json: bool) -> Case:
    """`is_json`: arguments are a line of JSON each, and the result is JSON, as in LiveCodeBench."""
    if not function:
        return Case(_text(given), _text(expected), "")
    if not function.isidentifier():
        raise _UnreadableError
    if is_json and isinstance(given, str):
        given, expected = [_json(line) for line in given.split("\n") if line.strip()], _json(expected)
    if not isinstance(given, list):
        raise _UnreadableError
    try:
        _text(canonical_json([given, expected]))
    except (ValueError, TypeError, RecursionError) as error:  # a number that is not finite, a date of a Parquet file
        raise _UnreadableError from error
    return Case(given, expected, function)


def _text(value: Any) -> str:
    """Text, or its lines in a list."""
    lines = value if isinstance(value, list) else [value]
    if lines and not _is_list_of(str, lines):
        raise _UnreadableError
    text = "\n".join(lines)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no column holds
        raise _UnreadableError from error
    return text


def _accepted(expected: Any) -> list[Any]:
    """What a function may return: APPS has some results in a list of their own."""
    return [expected, expected[0]] if isinstance(expected, list) and len(expected) == 1 else [expected]


def _fitting(cases: list[Case]) -> list[Case]:
    kept, size = [], 0
    for case in cases:
        size += len(str(case.given)) + len(str(case.expected))
        if size > MAX_TESTS_CHARS:
            break
        kept.append(case)
    return kept


def _function(value: Any) -> str:
    fields = value if isinstance(value, Mapping) else {}
    return next((fields[name] for name in FUNCTION_FIELDS if isinstance(fields.get(name), str)), "")


def _value(field: Any) -> Any:
    """A field, read as JSON where it is text, which LiveCodeBench packs; None for text that is no JSON."""
    if not isinstance(field, str):
        return field
    try:
        return _json(field)
    except _UnreadableError:
        packed = _packed_text(field)
    try:
        return _json(packed)
    except _UnreadableError:
        return None


def _json(text: Any) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, TypeError, RecursionError) as error:
        raise _UnreadableError from error
    if is_deep(value):
        raise _UnreadableError
    return value


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _packed_text(field: str) -> str | None:
    """The text in base64 of zlib of a pickle that holds one text. The pickle's operations are read, and not run."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(field, validate=True), MAX_PACKED_BYTES)
        texts = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    except (ValueError, zlib.error):
        return None
    return texts[0] if len(texts) == 1 and unpacking.eof else None


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _is_python(text: str) -> bool:
    try:
        compile(text, "solution", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
