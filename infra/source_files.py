"""The files of the project's code as they were when this process began: what it has imported, whatever an update writes
meanwhile."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

SUFFIXES = (".py", ".cpp", ".h")
START_SECONDS = 0.02
"""Between the start of a process, which Linux knows to 0.01 s, and Python's first import of the project."""


class CodeChangedError(RuntimeError):
    """Code was changed while a run was using it: what it computes cannot be put down to either version."""


@cache
def source(path: Path) -> bytes:
    """A file's content when this process first read it."""
    return path.read_bytes()


def read_sources(folders: Iterable[Path]) -> None:
    """Read the code below the folders, so that `source` knows it as it is now. Raises CodeChangedError for a file that
    was written after this process began: modules that it has imported may be older."""
    began, now = _first_import(), time.time()
    for path in (path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES):
        if began < path.stat().st_ctime <= now:  # one of the future was written before the clock was set back
            raise CodeChangedError(f"{path} was written while this run started: run again")
        source(path)


def _first_import() -> float:
    """The earliest time at which this process can have imported anything, by the clock as it is now."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started) + START_SECONDS


def changed_sources(paths: Iterable[Path]) -> list[Path]:
    """The files whose code is no longer what `source` knows; comments and docstrings are no code."""
    return [
        path for path in paths if _now(path) != source(path) and _code(path, _now(path)) != _code(path, source(path))
    ]


def without_texts(tree: ast.Module) -> ast.Module:
    """A module's tree without docstrings and blocks that only type checkers see, changed in place."""
    _WithoutTexts().visit(tree)
    return tree


def _now(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _code(path: Path, content: bytes) -> object:
    return ast.dump(without_texts(ast.parse(content))) if path.suffix == ".py" and content else content


class _WithoutTexts(ast.NodeTransformer):
    """Drops docstrings and blocks that only type checkers see."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            body[:] = [item for item in body if not _is_text(item) and not _is_type_checking(item)]
        return node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
