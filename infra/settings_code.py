"""Lists the code in configs/ that computes content: properties, methods, functions and constants of the settings that a
step is given.

Values of settings are in a step's key already, and validators only refuse. The rest can change content without changing
a value: `ModelRecipe.rotary_dim`, the waypoints of a mixture. It counts definition by definition, under the name of its
module, so that a new setting re-runs nothing. Classes named ...Resources are left out, as are their values: no content
depends on them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from infra.source_files import source

ROOT = Path(__file__).resolve().parent.parent
Setting = tuple[str, str]
"""(module of configs, name)."""


def settings_code(settings: Iterable[Setting]) -> dict[str, str]:
    """Name -> code of every definition that computes: in the settings, in the classes of their fields, and in what
    those call."""
    code: dict[str, str] = {}
    waiting, seen = [(setting, True) for setting in settings], set()
    while waiting:
        (module, name), is_called = waiting.pop()
        definition = definitions(module).get(name)
        if ((module, name), is_called) in seen or definition is None or name.endswith("Resources"):
            continue
        seen.add(((module, name), is_called))
        if isinstance(definition, tuple):
            waiting.append((definition, is_called))
            continue
        if isinstance(definition, ast.ClassDef):
            computing = [part for part in definition.body if _computes(part)]
            # Fields and bases lead to other classes; only methods call what they name.
            waiting += [((module, other), False) for other in _names(definition)]
        else:
            computing = [definition] if is_called else []
            waiting += [] if is_called else [((module, other), False) for other in _names(definition)]
        if computing:
            code[f"{module}.{name}"] = "\n".join(map(_dump, computing))
            waiting += [((module, other), True) for part in computing for other in _names(part)]
    return dict(sorted(code.items()))


@cache
def definitions(module: str) -> dict[str, ast.stmt | Setting]:
    """Top-level definitions of a module by name; for a name that it imports from another module of configs, the
    (module, name) there."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    by_name: dict[str, ast.stmt | Setting] = {}
    for node in ast.parse(source(path)).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("configs."):
            by_name.update((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            by_name[node.name] = _as_it_runs(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            by_name.update(
                (name.id, node) for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            )
    return by_name


def _as_it_runs(definition: ast.stmt) -> ast.stmt:
    """The definition without docstrings and without the types of functions."""
    for node in ast.walk(definition):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return definition


def _computes(part: ast.stmt) -> bool:
    return isinstance(part, ast.FunctionDef) and not any(
        "model_validator" in _names(decorator) for decorator in part.decorator_list
    )


@cache
def _dump(part: ast.stmt) -> str:
    return ast.dump(part)


@cache  # of a node of `definitions`, which stays: every step asks for the same few hundred
def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
