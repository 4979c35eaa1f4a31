"""Matches globs with file names: `**` any depth, `*` and `?` within one name, `{a,b}` alternatives.

A name is read once, character by character, whatever the glob. As a regular expression a glob of many stars would try
every way to divide a name among them.
"""

from __future__ import annotations

import re

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
        """Sets of places in the tokens, as bits: where a name begins, and behind which a name may end."""
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
        places = self._start
        for character in name:
            places = self._step(places, character)
            if not places:
                return False
        return bool(places & self._ends)

    def _entered(self, place: int) -> int:
        """A place and those behind it that need no character."""
        entered = 1 << place
        while self._tokens[place] in WILD:
            place += 1
            entered |= 1 << place
        return entered

    def _step(self, places: int, character: str) -> int:
        key = (places, character)
        if key not in self._next:
            if len(self._next) == MAX_CACHED:
                self._next.clear()
            reached, rest = 0, places
            while rest:
                place = (rest & -rest).bit_length() - 1
                rest &= rest - 1
                reached |= self._after(place, character)
            self._next[key] = reached
        return self._next[key]

    def _after(self, place: int, character: str) -> int:
        token = self._tokens[place]
        if token == DEEP_SLASH:
            return 1 << place | (self._entered(place + 1) if character == "/" else 0)
        if token == DEEP or (token == STAR and character != "/"):
            return self._entered(place)
        if token == character or (token == ONE and character != "/"):
            return self._entered(place + 1)
        return 0


def _alternatives(glob: str) -> list[list[str]]:
    """The tokens of every alternative; what is written with braces is one for each choice."""
    found: list[list[str]] = [[]]
    waiting: list[tuple[list[list[str]], list[list[str]]]] = []
    """Of every open brace: what stands before it, and the alternatives before the last comma."""
    for token in re.findall(r"\*\*/?|.", glob, re.DOTALL):
        if token == "{":
            waiting.append((found, []))
            found = [[]]
        elif token in (",", "}") and waiting:
            before, chosen = waiting[-1]
            chosen += found
            found = [[]]
            if token == "}":
                waiting.pop()
                found = [[*start, *choice] for start in before for choice in chosen]
        else:
            found = [[*tokens, token] for tokens in found]
        if len(found) > MAX_ALTERNATIVES:
            return found
    if waiting:
        raise ValueError(f"glob {glob!r} has an open brace: close it with }}")
    return found
