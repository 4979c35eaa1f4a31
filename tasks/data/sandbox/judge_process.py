"""The process that runs the tests of a solution and reports their results; it never runs the solution's code. Of a job
without tests it reports what the program prints.

The solution gives plain data of exactly Python's own types, or a Remote. A Remote never decides a comparison with
plain data: it is unequal to it, has no order with it, and arithmetic with it gives no plain number. The solution may
call the objects of this side that were passed to it, use their operators, and read public attributes of objects that
the tests define. A test that needs more is `unverifiable`. Runs inside the sandbox: imports only the standard
library.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import os
import select
import sys
import types
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from tasks.data.sandbox.remote_objects import BINARY, OPERATORS, ORDER, UNARY, is_mixed, is_remote, mark_mixed
from tasks.data.sandbox.value_exchange import EndedError, Peer

PASSED, FAILED, UNVERIFIABLE = VERDICTS = ("passed", "failed", "unverifiable")
MAX_PRINTED_CHARS, MAX_ERROR_CHARS = 10_000, 300
MAX_WRITTEN = 1 << 16
TESTS = "tests"
OPEN_MODULES = (TESTS, "io", "_io", "unittest.mock")
"""Modules whose objects the solution may read attributes of: the tests, files and mocks."""


class Judge(Peer):
    """The side of the tests."""

    input_to, unread = -1, b""
    """A pipe to the solution's standard input, and what is still to be written there."""
    refused = ""
    """The first operation that is impossible across two processes: with one the verdict is `unverifiable`."""

    def give(self, input_to: int, text: str) -> None:
        """Let the solution read a text, and then its end, while this side waits for it."""
        self.input_to, self.unread = input_to, text.encode()
        os.set_blocking(input_to, False)
        self._write_input()

    def _write_input(self) -> None:
        with suppress(BlockingIOError):
            try:
                while self.unread:
                    self.unread = self.unread[os.write(self.input_to, self.unread[:MAX_WRITTEN]) :]
            except BrokenPipeError:  # the solution reads no further
                self.unread = b""
            os.close(self.input_to)

    def _take(self, size: int) -> bytes:
        while self.unread:
            readable, writable, _ = select.select([self.read_from], [self.input_to], [])
            if writable:
                self._write_input()
            if readable:
                break
        return super()._take(size)

    def refuse(self, what: str) -> Any:
        self.refused = self.refused or what
        raise TypeError(what)

    def operate(self, remote: Any, name: str, *arguments: Any) -> Any:
        """Apply the module's rules; an object that derives from a plain type is compared, and calculated with, as its
        plain value."""
        with_plain = name in (*BINARY, *ORDER, "__contains__") and not is_remote(arguments[0])
        if with_plain and type(remote)._is_plain:
            value = self.request("plain", remote)
            return (
                NotImplemented
                if is_remote(value)
                else getattr(type(value), name, lambda *_: NotImplemented)(value, *arguments)
            )
        if with_plain and name == "__contains__" and hasattr(type(remote), "__iter__"):
            return any(item is arguments[0] or item == arguments[0] for item in remote)
        if with_plain and name in (*ORDER, "__contains__"):
            self.refused = self.refused or f"{name} between an object of the solution and plain data"
            return NotImplemented
        if name in (*UNARY, "__bool__") and is_mixed(remote):
            return self.refuse(f"{name} of what arithmetic with plain data gave")
        result = self.request("operate", remote, name, *arguments)
        if with_plain and is_remote(result):
            mark_mixed(result)
        elif with_plain and result is not NotImplemented and "pow" not in name:
            return self.refuse(f"{name} of an object of the solution and plain data gives plain data")
        return result

    def answer(self, verb: str, target: Any, *arguments: Any) -> object:
        """The answer to the solution's request about an object of the tests."""
        allowed = verb in ("names", "plain", "isinstance", "issubclass")
        allowed |= verb == "call" and (not isinstance(target, type) or target.__module__ == TESTS)
        allowed |= verb == "operate" and arguments[0] in OPERATORS and arguments[0] != "__call__"
        allowed |= verb == "text" and arguments[0] in ("__str__", "__repr__")
        allowed |= verb == "get" and _is_open(target, arguments[0])
        return (
            super().answer(verb, target, *arguments)
            if allowed
            else self.refuse(f"{verb} {arguments[:1]} of {type(target).__name__}")
        )

    def serve(self, message: dict[str, Any]) -> None:
        target = message["body"][1]
        if type(target) is not list or target[0] != "yours":
            self.refuse("a request about an object that nobody handed over")
        super().serve(message)

    def accept_library(self, value: object) -> object:
        """Accept only built-in types and modules: the solution must not make this side call anything else."""
        is_type = isinstance(value, type) and value.__module__ == "builtins"
        assert is_type or isinstance(value, types.ModuleType) or value is NotImplemented or value is Ellipsis
        return value


def _is_open(target: Any, name: str) -> bool:
    kind = type(target)
    if name.startswith("_") or kind.__module__ not in OPEN_MODULES or isinstance(target, type):
        return False
    unittest = sys.modules.get("unittest")
    if unittest is not None and isinstance(target, unittest.TestCase):
        return False
    return kind.__module__ != "unittest.mock" or name not in dir(sys.modules["unittest.mock"].NonCallableMagicMock)


class SolutionModule(types.ModuleType):
    """The module that tests import: its names are the solution's."""

    def __init__(self, name: str, peer: Judge) -> None:
        super().__init__(name)
        self.__dict__["_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [known for known in self._peer.request("names", None) if not known.startswith("_")]
        return self._peer.request("get", None, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.request("set", None, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delete", None, name)


def judge(peer: Judge, code: str, tests: str, module: str) -> str:
    """The verdict on a solution: tests without a module use its names; with one they import it and use unittest."""
    try:
        peer.request("load", None, code, module or "program")
        passed = _passes_unittest(peer, tests, module) if module else _passes_script(peer, tests)
    except BaseException:
        passed = False
    try:
        peer.request("names", None)
    except BaseException:  # a process that has ended, or is out of step, gives no answer
        return FAILED
    if peer.refused:
        return UNVERIFIABLE
    return PASSED if passed else FAILED


def _passes_script(peer: Judge, tests: str) -> bool:
    parsed = ast.parse(tests)
    namespace = {"__name__": TESTS, **_solution_names(peer, parsed)}
    exec(compile(tests, TESTS, "exec"), namespace)
    _run_functions(parsed, namespace)
    return True


def _run_functions(tests: ast.Module, namespace: dict[str, Any]) -> int:
    """Call the functions that are named as pytest names tests and that the tests do not call themselves; their
    number."""
    called = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    functions = [
        namespace[node.name]
        for node in tests.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and node.name not in called
    ]
    for function in functions:
        function()
    return len(functions)


def _solution_names(peer: Judge, tests: ast.Module) -> dict[str, Any]:
    """Names that the tests use without defining them. Built-ins and modules stay Python's own, since a solution could
    replace its judge; only where the tests use no other name of the solution may that name be a built-in's."""
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and not node.id.startswith("__")}
    bases = {
        node.value.id
        for node in ast.walk(tests)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    defined = set(peer.request("names", None))
    modules = {name: importlib.import_module(name) for name in used & bases & defined & sys.stdlib_module_names}
    names = used & defined - set(modules) - set(dir(builtins))
    if not names:
        names = used & defined & set(dir(builtins))
        if len(names) > 1:
            peer.refuse(f"tests of a solution that replaces {', '.join(sorted(names))}")
    return {**modules, **{name: peer.request("get", None, name) for name in names}}


def _passes_unittest(peer: Judge, tests: str, module: str) -> bool:
    import unittest

    sys.modules[module] = SolutionModule(module, peer)
    loaded = sys.modules[TESTS] = types.ModuleType(TESTS)
    exec(compile(tests, TESTS, "exec"), loaded.__dict__)
    suite, result = unittest.defaultTestLoader.loadTestsFromModule(loaded), unittest.TestResult()
    suite.run(result)
    num_functions = _run_functions(ast.parse(tests), loaded.__dict__)
    return result.testsRun + num_functions > len(result.skipped) and result.wasSuccessful()


def run_printing(peer: Judge, code: str) -> str:
    """What a program prints and its error in one line, as JSON; empty where its process ended. Seeded, so that it
    prints the same in every run."""
    sys.stdout, error = io.StringIO(), ""
    try:
        peer.request("load", None, "import random\nrandom.seed(0)", "seeded")
        peer.request("load", None, code, "program")
    except EndedError:
        return ""
    except BaseException as problem:
        error = f"{type(problem).__name__}: {str(problem)[:MAX_ERROR_CHARS]}"
    return json.dumps([sys.stdout.getvalue()[:MAX_PRINTED_CHARS], error])


def judge_printed(peer: Judge, code: str, expected: str) -> str:
    """PASSED for a program that prints the expected lines, but for blanks around them and blank lines around all; in a
    line of numbers 1.0 is 1. As LiveCodeBench compares."""
    try:
        printed = peer.request("run", None, code)
        if type(printed) is not str:
            return FAILED
        lines, wanted = (text.strip().split("\n") for text in (printed, expected))
        is_right = len(lines) == len(wanted) and all(map(_is_same_line, lines, wanted))
    except BaseException:
        return FAILED
    return PASSED if is_right else FAILED


def _is_same_line(line: str, wanted: str) -> bool:
    if line.strip() == wanted.strip():
        return True
    try:
        return [*map(Decimal, line.split())] == [*map(Decimal, wanted.split())]
    except InvalidOperation:
        return False


def run_judge(read_from: int, write_to: int, verdict_to: int, input_to: int, job: dict[str, str]) -> None:
    """Write the verdict, or of a job without tests what its program prints, to the descriptor `verdict_to`."""
    sys.stdin = sys.stdout = sys.stderr = None
    peer = Judge(read_from, write_to)
    peer.give(input_to, job.get("input", ""))
    if "output" in job:
        line = judge_printed(peer, job["code"], job["output"])
    elif "tests" in job:
        line = judge(peer, job["code"], job["tests"], job["module"])
    else:
        line = run_printing(peer, job["code"])
    with open(verdict_to, "wb") as answer:
        answer.write(line.encode())
