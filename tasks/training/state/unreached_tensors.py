"""Which trainable tensors no gradient reached, from a hand-over state. Imports no PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

FIRST_MOMENTS = ("momentum", "first_moment")
"""Kinds of state files whose tensors are zero until a gradient comes."""
UNREACHED = "unreached"
"""Key of such a file's metadata: a JSON list of the tensors that are zero throughout; absent where there are none."""
UNREACHED_FILE = "unreached.json"
"""The same list of an adapter's tensors, whose moments a hand-over does not hold; absent likewise."""


def unreached_tensors(state_dir: Path) -> tuple[str, ...]:
    """Names of the tensors that no gradient has reached since the moments began, on the course of the phase."""
    own = state_dir / UNREACHED_FILE
    names: list[str] = json.loads(own.read_bytes()) if own.exists() else []
    for kind in FIRST_MOMENTS:
        for path in sorted(state_dir.glob(f"{kind}-*.safetensors")):
            with safe_open(path, framework="np") as file:
                names += json.loads((file.metadata() or {}).get(UNREACHED, "[]"))
    return tuple(sorted(names))
