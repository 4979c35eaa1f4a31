"""Which trainable tensors no gradient reached, from the headers of what a phase left. Imports no PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

FIRST_MOMENTS = ("momentum", "first_moment")
"""Kinds of state files whose tensors are zero until a gradient comes."""
UNREACHED = "unreached"
"""Key of a file's metadata: a JSON list of the tensors that are zero throughout; absent where there are none."""


ADAPTER_FILE = "adapter_model.safetensors"
"""An adapter has no moments in its hand-over state: its own file says it."""


def unreached_tensors(final_dir: Path) -> tuple[str, ...]:
    """Names of the tensors that no gradient has reached since the moments began, on the course of the phase, from its
    handover/ and adapter/."""
    names: list[str] = []
    for pattern in (*(f"handover/{kind}-*.safetensors" for kind in FIRST_MOMENTS), f"adapter/{ADAPTER_FILE}"):
        for path in sorted(final_dir.glob(pattern)):
            with safe_open(path, framework="np") as file:
                names += json.loads((file.metadata() or {}).get(UNREACHED, "[]"))
    return tuple(sorted(names))
