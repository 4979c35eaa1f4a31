"""The process that runs a solution and does what the judge asks; its answers are only ever values.

It is forked before the tests arrive, so they are not in its memory. Runs inside the sandbox: imports only the
standard library.
"""

from __future__ import annotations

import builtins
import io
import random
import sys
import types
from typing import Any

from tasks.data.sandbox.value_exchange import Peer

MAX_PRINTED = 1 << 20


class SolutionSide(Peer):
    """The side of the solution; a request without an object is about the solution's module."""

    module: types.ModuleType

    def answer(self, verb: str, target: object, *arguments: Any) -> object:
        if verb == "load":
            return self._load(*arguments)
        if verb == "run":
            return self._run(*arguments)
        return super().answer(verb, self.module if target is None else target, *arguments)

    def names_library(self, value: object) -> bool:
        """Only built-in types and modules other than the solution: the judge accepts nothing else."""
        is_type = isinstance(value, type) and value.__module__ == "builtins"
        return is_type or (isinstance(value, types.ModuleType) and value is not self.module)

    def _load(self, code: str, name: str) -> None:
        self.module = sys.modules[name] = types.ModuleType(name)
        exec(compile(code, name, "exec"), self.module.__dict__)
        random.seed(0)  # a verdict must not depend on the time

    def _run(self, code: str) -> str:
        """What a program prints that reads standard input. Raises what it raises, also SystemExit with an error."""
        random.seed(0)
        builtins.exit = builtins.quit = sys.exit  # which only site defines
        given = io.BufferedReader(io.FileIO(0, closefd=False))
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(given, encoding="utf-8")
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        sys.stderr = sys.__stderr__ = io.StringIO()
        printed = sys.stdout.buffer
        try:
            self._load(code, "__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        finally:
            sys.stdout = None
        return printed.getvalue().decode(errors="replace")


class Printed:
    """Standard output: kept until the next message, cut where it grows without end."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.size = peer, 0

    def write(self, text: str) -> int:
        self.size += len(text)
        if self.size <= MAX_PRINTED:
            self.peer.printed.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: no text is buffered."""


def run_solution(read_from: int, write_to: int) -> None:
    """Serve the judge until it is gone."""
    peer = SolutionSide(read_from, write_to)
    sys.stdout = Printed(peer)
    sys.stdin = sys.stderr = None
    peer.serve_all()
