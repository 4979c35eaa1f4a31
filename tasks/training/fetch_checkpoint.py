"""Fetches a checkpoint from the Hugging Face Hub: `hf://owner/name[@revision]` becomes a directory of its cache.

The cache is that of the Hub's own tools (HF_HOME): what they fetched is not fetched again, and what was cut off
continues. Small files come first, and weights only where their config.json is of the scale's architecture.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from configs.files.atomic_files import link_or_copy
from tasks.data.readers.source_bytes import HUGGING_FACE
from tasks.training.import_checkpoint import SUFFIXES, checkpoint_files, refuse_other_config
from tasks.training.state.trained_checkpoint import WEIGHTS_SUFFIX

if TYPE_CHECKING:
    from configs.schema import ModelRecipe

_MODEL = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def fetch_checkpoint(address: str, recipe: ModelRecipe) -> Path:
    """The directory with the files of a model. Raises ValueError where the address names none, it cannot be fetched, or
    it is of another architecture."""
    return fetch_model(address, lambda path: refuse_other_config(path, recipe))


def fetch_model(address: str, check_config: Callable[[Path], object]) -> Path:
    """As fetch_checkpoint, for any model whose small files `check_config` accepts."""
    parsed = _MODEL.fullmatch(address.removeprefix(HUGGING_FACE))
    if parsed is None:
        raise ValueError(f"{address} names no model: write hf://owner/name or hf://owner/name@revision")
    small = [f"*{suffix}" for suffix in SUFFIXES if suffix != WEIGHTS_SUFFIX]
    check_config(_fetch(address, parsed[1], parsed[2], small))
    return _fetch(address, parsed[1], parsed[2], [*small, f"*{WEIGHTS_SUFFIX}"])


def _fetch(address: str, model: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        # Below the top are other formats of the same weights.
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise ValueError(
            f"{address} cannot be fetched ({why}): check the name, the network, HF_ENDPOINT, HF_TOKEN and the "
            f"room in HF_HOME, or download it and name the directory"
        ) from error


def copy_model(fetched: Path, target: Path) -> None:
    """Give a fetched model's files a directory of their own, whole or not at all: hard links to the Hub's cache, copies
    on another file system."""
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for path in checkpoint_files(fetched):
            link_or_copy(path, temporary / path.name)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
