"""A generated task of an environment, and how it is solved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    question: str
    expected: str
    """From which the environment of its kind is made: the column `answer` of a prompt."""
    calls: Sequence[tuple[str, dict[str, str]]]
    """Calls (tool, arguments) that solve it, one a turn."""
    answer: str
    """The last words of one who solved it."""
    key: str
    """Equal for tasks that differ only in words."""
