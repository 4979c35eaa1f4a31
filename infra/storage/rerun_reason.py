"""Says why a step is computed: compares its identity with the one it had when this scale last ran here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.files.atomic_files import replace_durably
from infra.home import Home
from infra.step import canonical_json

NUM_REMEMBERED = 8
"""Identities kept per stage: `glm46 adopt` finds what a key stood for among them."""


def explain_and_remember(home: Home, scale: str, stage: str, identity: dict[str, Any]) -> str:
    """What differs from the last identity of this stage, in a few words; the new one is kept for the next time."""
    path = home.run_dir / "identities" / scale / f"{stage.replace(' ', '-')}.json"
    known = json.loads(path.read_text()) if path.exists() else []
    _remember(path, [*(other for other in known if other != identity), identity][-NUM_REMEMBERED:])
    previous = known[-1] if known else None
    if previous is None:
        return "first run"
    return describe_differences(previous, identity) or "not in the store"


def describe_differences(previous: dict[str, Any], identity: dict[str, Any]) -> str:
    """What differs between two identities of one step, in a few words; empty where nothing does."""
    parts = [
        *_differences(previous["inputs"], identity["inputs"], "input"),
        *_differences(previous["recipe"], identity["recipe"], "recipe"),
    ]
    parts += ["code changed"] if previous["code"] != identity["code"] else []
    parts += _differences(previous["distributions"], identity["distributions"], "version of")
    return "; ".join(parts[:3]) + (f"; {len(parts) - 3} more" if len(parts) > 3 else "")


def _remember(path: Path, identities: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, canonical_json(identities).encode())


def _differences(previous: Any, current: Any, what: str, where: str = "") -> list[str]:
    if isinstance(previous, dict) and isinstance(current, dict):
        names = [name for name in {**previous, **current} if previous.get(name) != current.get(name)]
        return [
            part
            for name in names
            for part in _differences(previous.get(name), current.get(name), what, f"{where}.{name}" if where else name)
        ]
    if previous == current:
        return []
    return [
        f"{what} {where} changed" if what == "input" else f"{what} {where}: {_short(previous)} -> {_short(current)}"
    ]


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
