"""Matches globs with file names: `**` any depth, `*` and `?` within one name, `{a,b}` alternatives.

A name is read once, character by character, whatever the glob. As a regular expression a glob of many stars would try
every way to divide a name among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_ALTERNATIVES = 1000
MAX_CACHED = 10_000
STAR, DEEP, DEEP_SLASH, ONE = "*", "**", "**/", "?"
WILD = (STAR, DEEP, DEEP_SLASH)


class Glob:
    """Matches names. Raises ValueError for an open brace and for too many alternatives."""

    def __init__(self, glob: str) -> None:
        alternatives = _alternatives(glob)
        if len(alternatives) > MAX_ALTERNATIVES:
            raise ValueError(
                f"glob {glob!r} has {len(alternatives)} alternatives, at most {MAX_ALTERNATIVES} are allowed: use `*`"
            )
        self._tokens: list[str] = []
        self._start = self._ends = 0
        """Sets of token positions, as bits: those where a name begins, and those where it may end."""
        starts = []
        for tokens in alternatives:
            starts.append(len(self._tokens))
            self._tokens += [*tokens, ""]
            self._ends |= 1 << len(self._tokens) - 1
        for start in starts:
            self._start |= self._entered(start)
        self._next: dict[tuple[int, str], int] = {}

    def fullmatch(self, name: str) -> bool:
        """Whether the whole name matches."""
        positions = self._start
        for character in name:
            positions = self._step(positions, character)
            if not positions:
                return False
        return bool(positions & self._ends)

    def _entered(self, position: int) -> int:
        """The set of a position and the later ones that are reached without a character."""
        entered = 1 << position
        while self._tokens[position] in WILD:
            position += 1
            entered |= 1 << position
        return entered

    def _step(self, positions: int, character: str) -> int:
        key = (positions, character)
        if key not in self._next:
            if len(self._next) == MAX_CACHED:
                self._next.clear()
            reached, rest = 0, positions
            while rest:
                position = (rest & -rest).bit_length() - 1
                rest &= rest - 1
                reached |= self._after(position, character)
            self._next[key] = reached
        return self._next[key]

    def _after(self, position: int, character: str) -> int:
        token = self._tokens[position]
        if token == DEEP_SLASH:
            return 1 << position | (self._entered(position + 1) if character == "/" else 0)
        if token == DEEP or (token == STAR and character != "/"):
            return self._entered(position)
        if token == character or (token == ONE and character != "/"):
            return self._entered(position + 1)
        return 0


def named_by(pattern: str, names: Collection[str]) -> set[str]:
    """Those of `names` that a name or glob means. A name may hold the marks of globs."""
    return {pattern} if pattern in names else set(filter(Glob(pattern).fullmatch, names))


def _alternatives(glob: str) -> list[list[str]]:
    """The tokens of every alternative: braces give one alternative per choice."""
    alternatives: list[list[str]] = [[]]
    waiting: list[tuple[list[list[str]], list[list[str]]]] = []
    """Per open brace the alternatives before the brace, and those between it and the last comma."""
    for token in re.findall(r"\*\*/?|.", glob, re.DOTALL):
        if token == "{":
            waiting.append((alternatives, []))
            alternatives = [[]]
        elif token in (",", "}") and waiting:
            before, chosen = waiting[-1]
            chosen += alternatives
            alternatives = [[]]
            if token == "}":
                waiting.pop()
                alternatives = [[*start, *choice] for start in before for choice in chosen]
        else:
            alternatives = [[*tokens, token] for tokens in alternatives]
        if len(alternatives) > MAX_ALTERNATIVES:
            return alternatives
    if waiting:
        raise ValueError(f"glob {glob!r} has an open brace: close it with }}")
    return alternatives
