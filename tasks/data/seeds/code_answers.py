"""Extracts the program of an answer: its blocks of Python, else the whole text."""

from __future__ import annotations

import re

BLOCK = re.compile(r"```(?:python)?[^\n]*\n(.*?)```", re.DOTALL)


def program_of(text: str) -> str:
    """Blocks that an answer opens and closes, one after the other; the text itself where it has none."""
    blocks = BLOCK.findall(text)
    return "\n".join(blocks) if blocks else text
