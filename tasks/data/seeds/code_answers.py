"""Extracts the program of an answer: its blocks of Python, else the whole text."""

from __future__ import annotations

import re
import textwrap

BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def program_of(text: str) -> str:
    """Blocks of Python that an answer opens and closes, one after the other; those of no named language where it has
    none; the text itself where it has neither."""
    blocks = [(language.lower(), textwrap.dedent(code)) for language, code in BLOCK.findall(text)]
    python = [code for language, code in blocks if language in PYTHON]
    return "\n".join(python or [code for language, code in blocks if not language]) or text
