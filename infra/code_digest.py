"""Digest of the code that a step runs: what it imports, transitively, without comments and docstrings.

From the root modules the imports are followed through tasks/, model/ and data_contracts/ (also those inside functions; blocks under
`if TYPE_CHECKING` are skipped, they never run). configs/ and infra/ are left out: resolved configuration values are hashed by
themselves, and infra may not change content.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLLOWED = ("tasks", "model", "data_contracts")


def code_digest(roots: tuple[str, ...], data_files: tuple[str, ...] = ()) -> str:
    """sha256 over every module in the closure of `roots` and over `data_files` (relative to the project root)."""
    digest = hashlib.sha256()
    for module in closure(roots):
        digest.update(f"{module}\n{_module_digest(module)}\n".encode())
    for name in sorted(data_files):
        digest.update(f"{name}\n{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def closure(roots: tuple[str, ...], followed: tuple[str, ...] = FOLLOWED) -> list[str]:
    """Names of the modules that `roots` import, directly or not, themselves included, sorted. followed: top-level packages of the project
    whose modules count."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(name for name in imports(module) if name.split(".")[0] in followed and module_path(name).is_file())
    return sorted(seen)


def module_path(module: str) -> Path:
    """The file of a module of this project."""
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    tree = ast.parse(module_path(module).read_text(encoding="utf-8"))
    _WithoutTexts().visit(tree)
    return tree


@cache
def _module_digest(module: str) -> str:
    digest = hashlib.sha256(ast.dump(_tree(module)).encode())
    # A compiled kernel lies beside the module of its name; it may include any header there.
    source = module_path(module).with_suffix(".cpp")
    if source.is_file():
        for part in (source, *sorted(source.parent.glob("*.h"))):
            digest.update(part.read_bytes())
    return digest.hexdigest()


@cache
def imports(module: str) -> tuple[str, ...]:
    """Dotted names that a module imports at run time, also inside functions; of `from a import b` both `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(sorted(found))


class _WithoutTexts(ast.NodeTransformer):
    """Drops docstrings and blocks that only type checkers see."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body[:] = [item for item in body if not _is_text(item) and not _is_type_checking(item)]
        return node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
