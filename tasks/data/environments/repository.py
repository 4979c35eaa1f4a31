"""Environment `swe_task`: a repository with a fault, tools that read, edit and test it, and hidden tests that judge the
edits.

Tests run in the sandbox, in one process with the code that they test: the edited code is what the assistant wrote, and
could be written against the tests' runner. Its results count only with a number that is drawn for each run.
"""

from __future__ import annotations

import inspect
import json
import secrets
from typing import Any

from tasks.data.environments import repository_tests
from tasks.data.environments.environment import Environment, Parameter, Tool, ToolError, ToolTimeoutError
from tasks.data.environments.repository_tests import PASSED_MARK, names_of
from tasks.data.sandbox.code_sandbox import run_program

KIND = "swe_task"
NUM_SHOWN_LINES = 100
PATH = Parameter("path", "string", "Of a file, from the root of the repository")
TOOLS = (
    Tool("list_files", "Lists the Python files of the repository.", ()),
    Tool(
        "read_file",
        f"Shows {NUM_SHOWN_LINES} lines of a file with their numbers.",
        (PATH, Parameter("first_line", "integer", "From 1")),
    ),
    Tool(
        "edit_file",
        "Replaces a text that occurs once in a file; an empty text makes a new file.",
        (PATH, Parameter("old", "string", "Text to replace"), Parameter("new", "string", "Text in its place")),
    ),
    Tool("run_tests", "Runs the tests of one file and names those that fail.", (PATH,)),
)
Files = dict[str, str]


def open_repository(expected: str) -> Environment:
    """`expected` is JSON: `files` by path, the hidden tests' files `tests`, and the ids `wanted` of the tests that have
    to pass."""
    task = json.loads(expected)
    files: Files = task["files"]
    functions = {tool.name: (tool, function) for tool, function in zip(TOOLS, _functions(files), strict=True)}
    return Environment(functions, lambda answer: passes(files | task["tests"], task["wanted"]))


def passes(files: Files, ids: list[str]) -> bool:
    """Whether these tests pass; False where their process ended."""
    return not failed_tests(files, ids)


def failed_tests(files: Files, ids: list[str]) -> set[str]:
    """Those of these tests that fail, without the names of their cases; all where their process ended."""
    names = names_of(ids)
    try:
        marks, _ = _results(files, ids, "")
    except ToolTimeoutError:
        return {*names}
    return {name for name, mark in zip(names, marks, strict=True) if mark != PASSED_MARK}


def _functions(files: Files) -> tuple[Any, ...]:
    """The functions of TOOLS, in their order."""

    def text_of(path: str) -> str:
        if path not in files:
            raise ToolError(f"there is no file {path}")
        return files[path]

    def list_files() -> str:
        return "\n".join(sorted(files))

    def read_file(path: str, first_line: int) -> str:
        lines = text_of(path).splitlines()
        if not 1 <= first_line <= len(lines):
            raise ToolError(f"{path} has the lines 1 to {len(lines)}")
        shown = lines[first_line - 1 : first_line - 1 + NUM_SHOWN_LINES]
        return "\n".join(f"{number} {line}" for number, line in enumerate(shown, first_line))

    def edit_file(path: str, old: str, new: str) -> str:
        if not old and path not in files and path.endswith(".py"):
            files[path] = new
            return f"{path} is new"
        text = text_of(path)
        if not old or text.count(old) != 1:
            raise ToolError(f"the text to replace occurs {text.count(old) if old else 0} times in {path}, not once")
        files[path] = text.replace(old, new)
        return f"{path} is changed"

    def run_tests(path: str) -> str:
        text_of(path)
        marks, failed = _results(files, [], path)
        return f"{marks.count(PASSED_MARK)} of {len(marks)} tests pass\n{failed}".strip()

    return list_files, read_file, edit_file, run_tests


def _results(files: Files, ids: list[str], path: str) -> tuple[str, str]:
    """A mark for each test, in their order, and what is shown of those that fail (`repository_tests.report`). Raises
    ToolTimeoutError where there are none."""
    seal = secrets.token_hex(8)
    source = inspect.getsource(repository_tests)
    ran = run_program(f"{source}\nreport({files!r}, {ids!r}, {path!r}, {seal!r})\n")
    _, is_sealed, results = (ran or ("", ""))[0].rpartition(f"\n{seal}")
    if not is_sealed:
        raise ToolTimeoutError("the tests used up their time or memory, or ended their process")
    marks, _, failed = results.partition("\n")
    return marks, failed
