"""Removes formulas from a text. Runs in executors: imports no Spark.

It removes TeX between its delimiters, TeX commands with their arguments, and arithmetic of numbers and single
letters. A word replaces each: sentences keep their length, and equal formulas are equal words. Every scan is linear
in the text: closing marks are looked for up to MAX_SPAN characters away, and what is not closed is no formula.
"""

from __future__ import annotations

import re
import zlib

MAX_SPAN = 5000
"""Characters of the longest formula."""

_TEX = re.compile(
    r"(?P<display>\$\$|\\\["
    r"|\\begin\{(?P<name>(?:equation|align|gather|eqnarray|multline|array|[bpv]?matrix|cases|tabular|tikzpicture)\*?)\})"
    r"|(?P<round>\\\()|(?P<dollar>(?<![\\\w])\$)"
    r"|(?P<command>(?<![\w:\\])\\[A-Za-z]+\*?|[_^](?=\{)|(?=\{\\(?:display|text)style))"
)
"""Where a formula begins. A command after a letter or colon is part of a path (C:\\Users)."""
_DOLLARS = re.compile(r"\$((?:[^$\\]|\\.){1,1000})\$(?!\d)", re.DOTALL)
_TEX_SIGN = re.compile(r"[\\^]|_\{")
_BRACES = re.compile(r"\\[{}]|[{}]")
_SHORT_TOKENS = re.compile(r"(?<!\S)(?:(?!\S*[^\W\d_]{2})\S+[ \t]?)+")
"""Tokens without two letters beside each other."""
_OPERATION = re.compile(r"(?<=[\w)\]% ])[=<>≤≥×÷^*/+][-= (\[<$]*[\w(]")
_WORD = re.compile(r"\w+")
STAND_IN = re.compile("“[a-z]{5}”")
"""What takes the place of a formula."""


def without_formulas(text: str) -> tuple[str, int]:
    """The text with a word for each formula, and the number of words that stood in them."""
    formulas: list[str] = []
    replaced = _without_arithmetic(_without_tex(text, formulas), formulas)
    return replaced, sum(len(_WORD.findall(formula)) for formula in formulas)


def _without_tex(text: str, formulas: list[str]) -> str:
    """Without TeX; `formulas` takes what it was. White space around a displayed formula goes: it is part of a
    sentence."""
    if "$" not in text and "\\" not in text and "_{" not in text and "^{" not in text:
        return text
    kept, place, pairs = [], 0, _brace_pairs(text)
    for mark in _TEX.finditer(text):
        start, stop = mark.start(), _tex_end(text, mark, pairs) if mark.start() >= place else 0
        if stop <= start:
            continue
        while (
            mark["command"] in ("_", "^") and start > place and (text[start - 1].isalnum() or text[start - 1] in ")]")
        ):
            start -= 1
        before = text[place:start]
        kept += [f"{before.rstrip()} " if mark["display"] else before, _stand_in(text[start:stop])]
        formulas.append(text[start:stop])
        place = stop
        if mark["display"]:
            kept.append(" ")
            place += len(text[stop : stop + 20]) - len(text[stop : stop + 20].lstrip())
    return "".join([*kept, text[place:]])


def _stand_in(formula: str) -> str:
    """A word for a formula, another one for another, in quotation marks: what ends with it ends as a sentence may."""
    number = zlib.crc32("".join(formula.split()).encode())
    return "“" + "".join(chr(ord("a") + (number >> shift) % 26) for shift in (0, 6, 12, 18, 24)) + "”"


def _tex_end(text: str, mark: re.Match[str], pairs: dict[int, int]) -> int:
    """The end of the formula that begins with a mark, 0 where it is none."""
    if mark["dollar"]:
        found = _DOLLARS.match(text, mark.start())
        if found is None or "\n\n" in found[1]:
            return 0
        is_tight = not found[1][0].isspace() and not found[1][-1].isspace()
        return found.end() if is_tight or _TEX_SIGN.search(found[1]) else 0
    if mark["command"] is not None:
        return _groups_end(text, mark.end(), pairs)
    closing = (
        f"\\end{{{mark['name']}}}"
        if mark["name"]
        else "\\)"
        if mark["round"]
        else "$$"
        if mark["display"] == "$$"
        else "\\]"
    )
    found = text.find(closing, mark.end(), mark.end() + MAX_SPAN)
    return found + len(closing) if found >= 0 else 0


def _groups_end(text: str, place: int, pairs: dict[int, int]) -> int:
    """The end of the groups in braces that follow one another from a place on."""
    while text[place : place + 1] == "{" and pairs.get(place, place + MAX_SPAN) < place + MAX_SPAN:
        place = pairs[place] + 1
    return place


def _brace_pairs(text: str) -> dict[int, int]:
    """Place of the closing brace of every opening one that has it."""
    waiting: list[int] = []
    pairs = {}
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            waiting.append(brace.start())
        elif brace[0] == "}" and waiting:
            pairs[waiting.pop()] = brace.start()
    return pairs


def _without_arithmetic(text: str, formulas: list[str]) -> str:
    """Without runs of numbers, signs and single letters that hold an operation."""

    def removed(run: re.Match[str]) -> str:
        if _OPERATION.search(run[0]) is None:
            return run[0]
        formulas.append(run[0])
        return f"{_stand_in(run[0])} "

    if _OPERATION.search(text) is None:
        return text
    return "\n".join(_SHORT_TOKENS.sub(removed, line) if _OPERATION.search(line) else line for line in text.split("\n"))
