"""The file `MLmodel` beside a checkpoint's weights: by it `mlflow.pyfunc.load_model` opens the directory as a model that answers."""

from __future__ import annotations

import json
from pathlib import Path

FILE_NAME = "MLmodel"
LOADER_MODULE = "model.registered_model"
"""Named, not imported: how a model answers is no part of what a phase trained."""
SIGNATURE = json.dumps([{"type": "string"}])
"""One column without a name: a list of strings fits it, and a DataFrame with one column."""
MAX_NEW_TOKENS = 256


def write_mlmodel(directory: Path, *, is_chat_trained: bool) -> None:
    """Equal input, equal bytes (JSON, which is YAML): the file is content. A chat-trained model is asked with its chat template."""
    flavor = {
        "loader_module": LOADER_MODULE,
        "python_version": "3.11",
        "config": {"is_chat_trained": is_chat_trained, "enable_thinking": False, "max_new_tokens": MAX_NEW_TOKENS},
    }
    content = {"flavors": {"python_function": flavor}, "signature": {"inputs": SIGNATURE, "outputs": SIGNATURE}}
    (directory / FILE_NAME).write_text(json.dumps(content, indent=1) + "\n")
