"""Reads S0's inference_production.yaml. S0 names this file and shows none of it: its keys are those of the commands
that S0 shows for vLLM and SGLang and of the sections that its other YAMLs have.

Each key is kept, renamed or refused with a reason; docs/deployment.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from configs.schema import ModelRecipe
from configs.strict_yaml import read_yaml
from tasks.serving.fleet import GPU_GB, Fleet, fleet_of
from tasks.serving.planned_server import Engine, ScenarioName

Value = str | int
SECTIONS = ("model", "distributed", "hardware", "serving")
"""Sections that may hold any of the keys, as S0's other files have them; keys may also stand outside of one."""
OPTIONS: dict[str, tuple[str, type]] = {
    "engine": ("engine", str),
    "scenario": ("scenario", str),
    "model_path": ("checkpoint", str),
    "quantization": ("quantization", str),
    "tensor_parallel": ("tp", int),
    "tp": ("tp", int),
    "pipeline_parallel": ("pp", int),
    "pp": ("pp", int),
    "data_parallel": ("dp", int),
    "dp": ("dp", int),
    "expert_parallel": ("ep", int),
    "ep": ("ep", int),
    "context_length": ("context", int),
    "host": ("host", str),
    "port": ("port", int),
}
"""The option of `glm46 serve` that a key means, and what its value must be."""
HARDWARE: dict[str, type] = {"num_nodes": int, "gpus_per_node": int, "gpu_type": str}
ARCHITECTURE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}
"""Compared with the model's config.json, which decides."""
TRAINING = "it is of training, and serving does not read it: remove it"
REFUSED = {
    "zero_stage": TRAINING,
    "total_tokens": TRAINING,
    "batch_size": TRAINING,
    "learning_rate": TRAINING,
    "warmup_steps": TRAINING,
    "training": TRAINING,
    "api_key": "a key in a file is read by others: name its environment variable with --api-key-env",
}


@dataclass(frozen=True)
class ProductionSettings:
    options: dict[str, Value]
    """By option of `glm46 serve`."""
    fleet: Fleet | None
    architecture: dict[str, int]
    """By key of config.json."""

    def refuse_other_model(self, path: str, recipe: ModelRecipe) -> None:
        """Raises ValueError where the file describes another model than the one that is served."""
        for key, value in self.architecture.items():
            if getattr(recipe, key) != value:
                raise ValueError(
                    f"{path}: {key} is {value}, and the model has {getattr(recipe, key)}: correct the file"
                )


def read_production_settings(path: Path) -> ProductionSettings:
    """Raises ValueError for an unknown or refused key, a value of the wrong kind, or a key given twice."""
    if not path.is_file():
        raise ValueError(f"no file {path.absolute()}: name the settings with --config FILE.yaml")
    tree = read_yaml(str(path), path.read_bytes())
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no settings: write `key: value` lines")
    options: dict[str, Value] = {}
    hardware: dict[str, Value] = {}
    architecture: dict[str, int] = {}
    for key, value in _entries(path, tree):
        if key in OPTIONS:
            option, kind = OPTIONS[key]
            if option in options:
                raise ValueError(f"{path}: {key} repeats --{option}: keep one of them")
            options[option] = _checked(path, key, value, kind)
        elif key in HARDWARE:
            hardware[key] = _checked(path, key, value, HARDWARE[key])
        elif key in ARCHITECTURE:
            architecture[ARCHITECTURE[key]] = int(_checked(path, key, value, int))
        else:
            known = ", ".join([*OPTIONS, *HARDWARE, *ARCHITECTURE])
            raise ValueError(f"{path}: {key}: {REFUSED.get(key, f'unknown key; the keys are {known}')}")
    _rename_values(path, options)
    return ProductionSettings(options, _fleet(path, hardware) if hardware else None, architecture)


def _entries(path: Path, tree: dict) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and key in SECTIONS:
            entries += [(str(inner), below) for inner, below in value.items()]
        else:
            entries.append((str(key), value))
    for key in {key for key, _ in entries}:
        if [name for name, _ in entries].count(key) > 1:
            raise ValueError(f"{path}: {key} is given in two sections: keep one of them")
    return entries


def _checked(path: Path, key: str, value: object, kind: type) -> Value:
    if isinstance(value, bool) or not isinstance(value, kind) or (kind is int and value < 0):  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{path}: {key} is {value!r}: write {'a number' if kind is int else 'a word'}")
    assert isinstance(value, str | int), value
    return value


def _rename_values(path: Path, options: dict[str, Value]) -> None:
    """S1 writes high-throughput, balanced, low-latency."""
    if "scenario" in options:
        options["scenario"] = str(options["scenario"]).replace("-", "_")
    for option, allowed in (("scenario", get_args(ScenarioName)), ("engine", get_args(Engine))):
        if options.get(option, allowed[0]) not in allowed:
            raise ValueError(f"{path}: {option} is {options[option]!r}: write one of {', '.join(allowed)}")


def _fleet(path: Path, hardware: dict[str, Value]) -> Fleet:
    missing = [key for key in HARDWARE if key not in hardware]
    if missing:
        raise ValueError(f"{path}: hardware lacks {', '.join(missing)}")
    if hardware["gpu_type"] not in GPU_GB:
        raise ValueError(
            f"{path}: gpu_type is {hardware['gpu_type']!r}: write one of {', '.join(GPU_GB)} (A100 has 40 or 80 GB, "
            f"there is none of 48), or describe another in a fleet file with --hardware"
        )
    return fleet_of(str(hardware["gpu_type"]), int(hardware["gpus_per_node"]), int(hardware["num_nodes"]))
