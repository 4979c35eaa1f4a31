"""Finds the chat template of a Hugging Face checkpoint directory: a file of its own, or a key of tokenizer_config.json,
where older versions of transformers write it."""

from __future__ import annotations

from pathlib import Path

from model.formats.weight_files import read_json

TEMPLATE_FILE, TOKENIZER_CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
DEFAULT = "default"
"""Name of the template that answers where a directory has several."""


def checkpoint_template(checkpoint_dir: Path) -> str | None:
    """The template, None where the directory has none. The file wins, as in transformers."""
    path = checkpoint_dir / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not (checkpoint_dir / TOKENIZER_CONFIG_FILE).is_file():
        return None
    given = read_json(checkpoint_dir / TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get(DEFAULT)
    return given if isinstance(given, str) and given else None
