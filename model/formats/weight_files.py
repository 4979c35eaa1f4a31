"""Finds the tensors of a Hugging Face checkpoint directory: one weight file, or several with an index.

Where a directory holds both, programs differ: transformers takes the single file, vLLM the index. One of them is of an
earlier model, so the directory is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def tensor_names(checkpoint_dir: Path) -> set[str]:
    """Names of the tensors of a checkpoint, of which only the index or the header is read."""
    weight_map = _weight_map(checkpoint_dir)
    if weight_map is not None:
        return set(weight_map)
    with open_safetensors(checkpoint_dir / SINGLE_FILE) as file:
        return set(file.keys())


def tensor_files(checkpoint_dir: Path) -> dict[str, Path]:
    """The file of every tensor, as the files themselves say; an index that disagrees with them is refused."""
    weight_map = _weight_map(checkpoint_dir)
    if weight_map is None:
        with open_safetensors(checkpoint_dir / SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), checkpoint_dir / SINGLE_FILE)
    paths: dict[str, Path] = {}
    for file_name in sorted(set(weight_map.values())):
        placed = {name for name, place in weight_map.items() if place == file_name}
        with open_safetensors(checkpoint_dir / file_name) as file:
            held = set(file.keys())
        if differing := sorted(placed ^ (held & weight_map.keys())):
            problem = "does not hold" if differing[0] in placed else "holds"
            index_path = checkpoint_dir / INDEX_FILE
            raise ValueError(f"{index_path}: {file_name} {problem} {differing[0]}: copy the checkpoint again")
        paths |= dict.fromkeys(held, checkpoint_dir / file_name)
    return paths


def _weight_map(checkpoint_dir: Path) -> dict[str, str] | None:
    """The file name of every tensor that the index gives, None without an index."""
    index_path = checkpoint_dir / INDEX_FILE
    if not index_path.is_file():
        return None
    weight_map = read_json(index_path).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index_path} has no weight_map of tensors and files beside it: copy the checkpoint again")
    if (checkpoint_dir / SINGLE_FILE).is_file() and SINGLE_FILE not in weight_map.values():
        raise ValueError(
            f"{checkpoint_dir} holds {SINGLE_FILE} and {INDEX_FILE}, which names other files: remove the one that is "
            f"not this model's"
        )
    return weight_map


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Open one safetensors file; one that is missing or damaged is a ValueError naming it."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the checkpoint is incomplete, copy or write it again")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): copy or write the checkpoint again") from error


def read_json(path: Path) -> dict:
    """The object in a JSON file of a checkpoint; one that is missing or damaged is a ValueError naming it."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a directory in the Hugging Face glm4_moe layout")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged, copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: the file is damaged, copy it again")
    return content
