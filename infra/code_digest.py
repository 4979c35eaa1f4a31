"""Digests the code that a step runs: its transitive imports, without comments and docstrings.

From the root modules the imports are followed through tasks/, model/ and data_contracts/. Imports inside functions
count; blocks under `if TYPE_CHECKING` are skipped, as they never run. A compiled kernel counts with the headers that it
includes. infra/ is left out: it may not change content. The values of configs/ are hashed by themselves; code that
computes there counts definition by definition (settings_code.py).
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from configs.machine import with_headers
from infra.parsed_sources import found_once
from infra.settings_code import Setting, settings_code
from infra.source_files import CodeChangedError, changed_sources, read_sources, source, without_texts

ROOT = Path(__file__).resolve().parent.parent
FOLLOWED = ("tasks", "model", "data_contracts")
CONFIGURED = ("configs.schema.", "configs.strict_yaml.")
"""Prefixes of the names of modules of configs/ whose code may decide content; the others decide where and how files are
written."""


def code_digest(roots: tuple[str, ...], data_files: tuple[str, ...] = ()) -> str:
    """sha256 over every module in the closure of `roots` and over `data_files` (relative to the project root)."""
    digest = hashlib.sha256()
    modules = closure(roots)
    for module in modules:
        digest.update(f"{module}\n{_code(module).digest}\n".encode())
    for name, code in settings_code(setting for module in modules for setting in settings(module)).items():
        digest.update(f"{name}\n{code}\n".encode())
    for name in sorted(data_files):
        digest.update(f"{name}\n{hashlib.sha256(source(ROOT / name)).hexdigest()}\n".encode())
    return digest.hexdigest()


def read_code() -> None:
    """Read all code that may decide content, at the start of a run: digests are those of what it has imported. Raises
    CodeChangedError for a file that was written meanwhile."""
    read_sources(ROOT / folder for folder in (*FOLLOWED, "configs"))


def refuse_changed_code(what: str, roots: tuple[str, ...], data_files: tuple[str, ...] = ()) -> None:
    """Raises CodeChangedError where the disk no longer has a file that `code_digest` counts, or one of the settings, as
    it was when this process began. Ranks and executors import what is on disk."""
    paths = [ROOT / name for name in data_files] + sorted((ROOT / "configs" / "schema").glob("*.py"))
    for module in closure(roots):
        kernel = module_path(module).with_suffix(".cpp")
        paths += [module_path(module), *(with_headers(kernel) if kernel.is_file() else ())]
    changed = [str(path.relative_to(ROOT)) for path in changed_sources(paths)]
    if changed:
        raise CodeChangedError(
            f"{what}: {', '.join(changed[:3])} changed after this run began, so nothing of it is committed: run again, "
            f"or `glm46 adopt` its unfinished work after that (docs/using.md, Run it again)"
        )


def closure(roots: tuple[str, ...], followed: tuple[str, ...] = FOLLOWED) -> list[str]:
    """Names of the modules that `roots` import, directly or not, themselves included, sorted. followed: top-level
    packages of the project whose modules count."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(name for name in imports(module) if name.split(".")[0] in followed and _is_module(name))
    return sorted(seen)


def module_path(module: str) -> Path:
    """The file of a module of this project."""
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def _is_module(name: str) -> bool:
    return module_path(name).is_file()


class Code(NamedTuple):
    """What counts of a module."""

    digest: str
    settings: tuple[Setting, ...]
    imports: tuple[str, ...]


@cache
def _code(module: str) -> Code:
    path = module_path(module)
    kernel = path.with_suffix(".cpp")
    parts = [source(part) for part in with_headers(kernel)] if kernel.is_file() else []
    digest, named, imported = found_once(path, [source(path), *parts], lambda: _parsed(source(path), parts))
    return Code(digest, tuple((where, name) for where, name in named), tuple(imported))


def _parsed(content: bytes, parts: list[bytes]) -> Code:
    tree = ast.parse(content)
    settings = tuple(
        (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(CONFIGURED)
        for alias in node.names
    )
    without_texts(tree)
    digest = hashlib.sha256(ast.dump(tree).encode())
    for part in parts:
        digest.update(part)
    return Code(digest.hexdigest(), settings, _imports(tree))


def settings(module: str) -> tuple[Setting, ...]:
    """Every definition of configs/ that a module imports, also for its annotations."""
    return _code(module).settings


def imports(module: str) -> tuple[str, ...]:
    """Dotted names that a module imports at run time, also inside functions; of `from a import b` both `a` and
    `a.b`."""
    return _code(module).imports


def _imports(tree: ast.Module) -> tuple[str, ...]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(sorted(names))
