"""Fields that records of conversations, preference pairs and prompts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SYSTEMS = ("system", "system_prompt")
"""What a system says, beside the turns."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Pictures, films and sounds that belong to the text, as LLaVA, ms-swift, LLaMA-Factory and verl have them."""


def media_of(record: Mapping[str, Any]) -> str:
    """The first field of a record with something that no text holds; empty where it has none. A text cannot be learned
    without it: "What is in this picture?"."""
    return next((name for name in MEDIA if name in record and not _is_empty(record[name])), "")


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
