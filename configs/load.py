"""Reads the YAML of a scale, of a suite of benchmarks, or of prices, into a frozen tree of configs/schema/;
every mistake is one ValueError that names file, key and fix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from configs.edit_yaml import changed
from configs.schema import Prices, Scale, Suite
from configs.strict_yaml import read_yaml

CONFIGS_DIR = Path(__file__).resolve().parent
Read = TypeVar("Read", Suite, Prices)


def scale_names() -> list[str]:
    """Names of the scales that come with the project; those of configs/recipes/ as `recipes/<name>`."""
    paths = sorted(CONFIGS_DIR.glob("*.yaml")) + sorted(CONFIGS_DIR.glob("recipes/*.yaml"))
    return [path.relative_to(CONFIGS_DIR).with_suffix("").as_posix() for path in paths]


def load_scale(name_or_path: str) -> Scale:
    """The configuration of a named scale or of a YAML file (a name that ends in .yaml or .yml)."""
    path = _scale_path(name_or_path)
    return _read_scale(str(path), path.read_bytes())


def changed_scale(name_or_path: str, settings: list[str]) -> str:
    """The YAML of a scale with settings `path.to.key=VALUE` changed, comments kept. Raises ValueError where a key is
    unknown or the whole is no valid scale."""
    text = _scale_path(name_or_path).read_text()
    for setting in settings:
        text = changed(text, setting)
    _read_scale(f"{name_or_path} with {', '.join(settings) or 'nothing changed'}", text.encode())
    return text


def _scale_path(name_or_path: str) -> Path:
    path = Path(name_or_path) if name_or_path.endswith((".yaml", ".yml")) else CONFIGS_DIR / f"{name_or_path}.yaml"
    if not path.is_file():
        if name_or_path.endswith((".yaml", ".yml")):
            raise ValueError(
                f"no file {path.absolute()}: name one that exists, or a scale ({', '.join(scale_names())})"
            )
        raise ValueError(
            f"no scale {name_or_path!r}: the scales are {', '.join(scale_names())}; a file of your own is named with "
            f"its ending .yaml"
        )
    return path


def _read_scale(where: str, data: bytes) -> Scale:
    written = read_yaml(where, data)
    try:
        return Scale.model_validate(written)
    except ValidationError as error:
        raise ValueError(f"{where}: {describe_problems(error, written)}") from error


def load_suite(name_or_path: str) -> Suite:
    """A named suite of benchmarks, or that of a YAML file (a name that ends in .yaml or .yml)."""
    return _load_named("suite", Suite, name_or_path)


def load_prices(name_or_path: str) -> Prices:
    """Named prices, or those of a YAML file (a name that ends in .yaml or .yml)."""
    return _load_named("price", Prices, name_or_path)


def _load_named(kind: str, shape: type[Read], name_or_path: str) -> Read:
    is_path = name_or_path.endswith((".yaml", ".yml"))
    path = Path(name_or_path) if is_path else CONFIGS_DIR / f"{kind}s" / f"{name_or_path}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(path.stem for path in (CONFIGS_DIR / f"{kind}s").glob("*.yaml")))
        known = f"the {kind}s are {names}; a file of your own is named with its ending .yaml"
        raise ValueError(f"no file {path.absolute()}: {known}" if is_path else f"no {kind} {name_or_path!r}: {known}")
    try:
        return shape.model_validate(read_yaml(str(path), path.read_bytes()))
    except ValidationError as error:
        raise ValueError(f"{path}: {describe_problems(error)}") from error


def describe_problems(error: ValidationError, written: Any = None) -> str:
    """Every mistake in one line: key and what is wrong with it. An entry of a list in `written` that has a name is
    called by it, as `config --set` does."""
    return "; ".join(
        f"{'.'.join(_named(item['loc'], written)) or 'file'}: {_explain(item['type'], item['msg'])}"
        for item in error.errors()
    )


def _named(path: tuple[int | str, ...], written: Any) -> Iterator[str]:
    for key in path:
        entries: Any = dict(enumerate(written)) if isinstance(written, list) else written
        written = entries.get(key) if isinstance(entries, dict) else None
        yield str(written["name"] if isinstance(key, int) and isinstance(written, dict) and "name" in written else key)


def _explain(kind: str, message: str) -> str:
    texts = {
        "extra_forbidden": "unknown key; remove it or correct its spelling",
        "missing": "key is missing; every scale states every key",
    }
    return texts.get(kind, message.removeprefix("Value error, "))
