"""The files of an adapter in PEFT's format, and where they are no model."""

from __future__ import annotations

from pathlib import Path

from model.formats.hf_checkpoint import CONFIG_FILE

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def refuse_adapter(path: Path) -> None:
    """Raises ValueError for a directory with an adapter, which would be left out."""
    if not (path / ADAPTER_CONFIG).is_file():
        return
    if (path / CONFIG_FILE).is_file():
        raise ValueError(
            f"{path} holds an adapter beside a model: move {ADAPTER_CONFIG} and {ADAPTER_FILE} to a directory of their "
            f"own, and merge it where it is meant (glm46 convert {path} DST --to hf --adapter DIR)"
        )
    raise ValueError(
        f"{path} holds an adapter, no model: merge it into the model that it was trained on (glm46 convert MODEL DST "
        f"--to hf --adapter {path}), and name DST"
    )
