"""Runs tests of a repository that is held in memory, as pytest would, inside the sandbox.

In: paths with texts, and the ids of tests (`path::function`, `path::Class::method`). Out: a line with a mark for each
test, then the errors. It knows of pytest what small test files use: plain functions and classes, unittest, `raises`,
`mark.parametrize`, `mark.skip` and `mark.skipif`; a test that asks for a fixture fails. This module's source is sent
into the sandbox: it imports only the standard library.
"""

import importlib
import importlib.util
import io
import itertools
import linecache
import re
import sys
import types
import unittest
from collections.abc import Iterator
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

ROOTS = ("", "src/")
MAX_ERROR_CHARS, MAX_DESCRIBED = 200, 20
PASSED_MARK, FAILED_MARK = ".", "F"


class Tree:
    """Finds and loads the modules of the repository; every folder with a Python file is a package."""

    def __init__(self, files: dict[str, str]) -> None:
        self.sources: dict[str, tuple[str, str]] = {}
        self.packages: set[str] = set()
        for path, text in files.items():
            for root in ROOTS:
                if path.startswith(root) and path.endswith(".py"):
                    self._add(path, path.removeprefix(root), text)

    def _add(self, path: str, place: str, text: str) -> None:
        parts = place.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        names = parts[:-1] if is_package else parts
        self.packages |= {".".join(parts[:size]) for size in range(1, len(parts))}
        if names:
            self.sources[".".join(names)] = (path, text)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in self.sources and name not in self.packages:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=name in self.packages)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        path, text = self.sources.get(module.__name__, ("", ""))
        module.__file__ = f"/repository/{path}"
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
        exec(compile(text, module.__file__, "exec"), module.__dict__)


class Raised(AbstractContextManager):
    """`pytest.raises`: passes where the block raises one of the errors."""

    def __init__(self, errors: Any, match: str | None = None) -> None:
        self.errors, self.match = errors, match
        self.value: Any = None
        self.type: Any = None
        self.typename = ""

    def __enter__(self) -> "Raised":
        return self

    def __exit__(self, kind: Any, error: Any, trace: object) -> bool:
        assert error is not None, f"did not raise {self.errors}"
        if not isinstance(error, self.errors):
            return False
        assert self.match is None or re.search(self.match, str(error)), f"{error} does not match {self.match}"
        self.value, self.type, self.typename = error, kind, kind.__name__
        return True


def raises(errors: Any, function: Any = None, *arguments: Any, match: str | None = None, **named: Any) -> Any:
    expected = Raised(errors, match)
    if function is not None:
        with expected:
            function(*arguments, **named)
    return expected


class Mark:
    """`pytest.mark`: remembers the cases of a test, and whether it is skipped; other marks change nothing."""

    def parametrize(self, names: Any, values: Any, **_: Any) -> Any:
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        cases = [dict(zip(listed, value if len(listed) > 1 else (value,), strict=True)) for value in values]

        def mark(test: Any) -> Any:
            test.cases = [cases, *getattr(test, "cases", [])]
            return test

        return mark

    def skipif(self, condition: object, **_: Any) -> Any:
        def mark(test: Any) -> Any:
            test.is_skipped = bool(condition) or getattr(test, "is_skipped", False)
            return test

        return mark

    def skip(self, *_: Any, **__: Any) -> Any:
        return self.skipif(True)

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **_: given[0] if given and callable(given[0]) else lambda test: test


def run_test(module: types.ModuleType, names: list[str]) -> None:
    """Run one test in all its cases. Raises what it raises."""
    owner, test = None, getattr(module, names[0])
    if len(names) == 2:
        owner, test = test, getattr(test, names[1])
    if getattr(test, "is_skipped", False) or getattr(owner, "is_skipped", False):
        return
    if isinstance(owner, type) and issubclass(owner, unittest.TestCase):
        owner(names[1]).debug()
        return
    for chosen in itertools.product(*getattr(test, "cases", [])):
        arguments = {name: value for case in chosen for name, value in case.items()}
        if owner is None:
            test(**arguments)
            continue
        getattr(owner(), names[1])(**arguments)


def tests_of(path: str, module: types.ModuleType) -> Iterator[str]:
    """Ids of the tests that a module defines."""
    for name, value in vars(module).items():
        is_case = isinstance(value, type) and issubclass(value, unittest.TestCase)
        if isinstance(value, type) and (is_case or name.startswith("Test")) and value.__module__ == module.__name__:
            yield from (f"{path}::{name}::{method}" for method in dir(value) if method.startswith("test"))
        elif callable(value) and name.startswith("test"):
            yield f"{path}::{name}"


def run_tests(files: dict[str, str], ids: list[str], path: str) -> dict[str, str]:
    """The error of each test, empty where it passes: of `names_of` these ids, or where a path is given of the tests in
    that file. A file that cannot be loaded counts as one test."""
    sys.meta_path.insert(0, Tree(files))  # type: ignore[arg-type]
    shim: Any = types.ModuleType("pytest")
    shim.raises, shim.mark = raises, Mark()
    sys.modules["pytest"] = shim
    wanted = names_of(ids)
    if path:
        try:
            wanted = [*dict.fromkeys(tests_of(path, load(path)))]
        except BaseException as error:
            return {path: described(error)}
    errors = dict.fromkeys(wanted, "")
    for each in wanted:
        file, *names = each.split("::")
        try:
            run_test(load(file), names)
        except BaseException as error:
            errors[each] = described(error)
    return errors


def names_of(ids: list[str]) -> list[str]:
    """The tests with these ids, each once."""
    return [*dict.fromkeys(map(name_of, ids))]


def name_of(test: str) -> str:
    """A test's id without the name of its case."""
    return re.sub(r"\[.*\]$", "", test, flags=re.S)


def load(path: str) -> types.ModuleType:
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def report(files: dict[str, str], ids: list[str], path: str, seal: str) -> None:
    """Print after the seal, which the tests do not know, a mark for each test, then the failed ones; of many only the
    first have their error. The marks come first, as what a program prints is cut. What the tests print is dropped."""
    with redirect_stdout(io.StringIO()):
        errors = run_tests(files, ids, path)
    marks = "".join(FAILED_MARK if error else PASSED_MARK for error in errors.values())
    failed = [(each, error) for each, error in errors.items() if error]
    lines = [f"{each} {error}" if number < MAX_DESCRIBED else each for number, (each, error) in enumerate(failed)]
    print("\n".join([f"\n{seal}{marks}", *lines]))
