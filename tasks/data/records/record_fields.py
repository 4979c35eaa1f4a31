"""Fields that records of conversations, preference pairs and prompts share."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

SYSTEMS = ("system", "system_prompt", "custom_instructions")
"""What a system says, beside the turns; the last one is SmolTalk2's."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Pictures, films and sounds that belong to the text, as LLaVA, ms-swift, LLaMA-Factory and verl have them."""
TURNS = ("messages", "conversations", "conversation", "history", "prompt", "completion", "context", "chosen")
TURNS += ("rejected", "rejected_messages", "conversation_a", "conversation_b", "trajectory")
"""Fields that may hold a list of turns."""


def with_turns(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the turns that a field of TURNS holds as text, which is all that a table of comma-separated
    values can hold: as JSON, or as Python writes a list, which pandas does."""
    written = {name: _turns(record[name]) for name in TURNS if isinstance(record.get(name), str)}
    return {**record, **{name: value for name, value in written.items() if value}}


def _turns(text: str) -> list[dict[str, Any]]:
    """None of any other text than that of a list of objects which say who speaks. Half of a surrogate pair, which no
    column holds, becomes "?"."""
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            turns = json.loads(json.dumps(read(text.strip()), ensure_ascii=False).encode(errors="replace"))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return turns if all(isinstance(turn, dict) and {"role", "from"} & {*turn} for turn in turns) else []
    return []


def media_of(record: Mapping[str, Any]) -> str:
    """The first field of a record with something that no text holds; empty where it has none. A text cannot be learned
    without it: "What is in this picture?"."""
    return next((name for name in MEDIA if name in record and not _is_empty(record[name])), "")


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
