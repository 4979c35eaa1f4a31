"""Adopts work that was done under older code for newer code: a person's decision, kept with its reason.

The work counts as done, or continues.
"""

from __future__ import annotations

import json
from typing import Any

from infra.home import Home
from infra.storage.store import Store, step_key


def adopt(store: Store, home: Home, old: str, new: str, reason: str) -> str:
    """Commit the work of key OLD under key NEW, or move its unfinished work there; returns what was done, in words.

    Raises ValueError unless both keys are of one step and differ only in code or package versions, and for an empty
    reason.
    """
    if not reason.strip():
        raise ValueError("--reason is empty: say why the older code's result is still right")
    wanted = _asked_for(home, new)
    if wanted is None:
        raise ValueError(
            f"no run under {home.root} asked for key {new}: run once with the new code, then adopt the key it printed"
        )
    if store.read_manifest(new) is not None:
        raise ValueError(f"key {new} is committed already: nothing is left to adopt")
    manifest = store.read_manifest(old)
    before = manifest.identity if manifest is not None else _asked_for(home, old)
    if before is None:
        raise ValueError(
            f"key {old} is neither committed in {store.uri} nor known to {home.root}: name a key that a run printed"
        )
    _refuse_other_work(before, wanted)
    if manifest is not None:
        adopted = manifest.model_copy(
            update={"key": new, "generation": 0, "identity": wanted, "adopted_from": f"{old}: {reason}"}
        )
        while not store.create_manifest(adopted):  # generations before it may be marked invalid
            if store.read_manifest(new) is not None:
                raise ValueError(f"key {new} was committed by another run in the meantime: nothing is left to adopt")
            adopted = adopted.model_copy(update={"generation": adopted.generation + 1})
        return f"step {manifest.step}: the artifact of {old[:12]} has the key {new[:12]}"
    if not (home.work_dir(old)).is_dir():
        raise ValueError(f"key {old} has neither an artifact nor unfinished work under {home.root}")
    if home.work_dir(new).exists():
        raise ValueError(f"key {new} has unfinished work of its own in {home.work_dir(new)}: remove it first")
    home.work_dir(old).rename(home.work_dir(new))
    (home.work_dir(new) / "adopted_from").write_text(f"{old}: {reason}")
    return f"step {wanted['step']}: the unfinished work of {old[:12]} continues under {new[:12]}"


def _asked_for(home: Home, key: str) -> dict[str, Any] | None:
    """The identity of a key that a run of this home asked for."""
    for path in sorted((home.run_dir / "identities").rglob("*.json")):
        for identity in json.loads(path.read_text()):
            if step_key(identity) == key:
                return identity
    return None


def _refuse_other_work(before: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part in ("step", "recipe", "inputs"):
        if before[part] != wanted[part]:
            raise ValueError(
                f"the keys differ in {part}, not in code alone: only work on the same {part} can be adopted"
            )
