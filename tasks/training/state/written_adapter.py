"""Opens adapter/ of a phase beside the weights that it was trained on, and beside no others."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from infra.storage.store import hash_file
from model.formats.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from model.formats.weight_files import open_safetensors
from tasks.training.state.adapter_export import BASE_FILE, KIND_KEY, PEFT_PREFIX, WEIGHTS_KEY
from tasks.training.state.trained_checkpoint import WEIGHTS_SUFFIX, weights_sha256


class WrittenAdapter:
    """An adapter that `write_adapter` wrote. Raises ValueError for a directory that holds none."""

    def __init__(self, adapter_dir: Path) -> None:
        self.path, base_path = adapter_dir / ADAPTER_FILE, adapter_dir / BASE_FILE
        with open_safetensors(self.path) as file:
            self._stored = set(file.keys())
        if not base_path.exists():
            raise ValueError(
                f"{adapter_dir} has no {BASE_FILE}, which says on which weights it was trained: take the whole "
                f"adapter/ of its phase, or merge an adapter that glm46 did not write with PEFT (merge_and_unload)"
            )
        base = json.loads(base_path.read_text(encoding="utf-8"))
        self.weights_digest, self.kind = base[WEIGHTS_KEY], base[KIND_KEY]
        config = json.loads((adapter_dir / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        self.scaling: float = config["lora_alpha"] / config["r"]

    def names(self) -> set[str]:
        return {name.removeprefix(PEFT_PREFIX) for name in self._stored}

    def tensor(self, name: str) -> Tensor:
        with open_safetensors(self.path) as file:
            return file.get_tensor(PEFT_PREFIX + name)


def open_adapter(adapter_dir: Path, weights_dir: Path) -> WrittenAdapter:
    """Raises ValueError where the adapter was trained on other weights than those of the Hugging Face directory."""
    adapter = WrittenAdapter(adapter_dir)
    held = weights_sha256({path.name: hash_file(path) for path in weights_dir.glob(f"*{WEIGHTS_SUFFIX}")})
    if held != adapter.weights_digest:
        raise ValueError(
            f"{adapter_dir} is an adapter of another model: it was trained on weights with sha256 "
            f"{adapter.weights_digest[:12]}..., those of {weights_dir} have {held[:12]}...: name the model that its "
            f"phase started from"
        )
    if adapter.kind == "qlora":
        raise ValueError(
            f"{adapter_dir} was trained on weights rounded to 4 bits, which {weights_dir} does not hold: take hf/ of "
            f"its phase, in which it is merged"
        )
    return adapter
