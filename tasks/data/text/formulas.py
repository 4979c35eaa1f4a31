"""Removes formulas from a text. Runs in executors: imports no Spark.

It removes TeX between its delimiters, TeX commands with their arguments, and arithmetic of numbers and single
letters. A word replaces each: sentences keep their length, and equal formulas give equal words. Every scan is linear
in the text: closing marks are searched for up to MAX_SPAN characters away. Without a closing mark there is no formula.
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
"""Matches the beginning of a formula. A command after a letter or colon is part of a path (C:\\Users)."""
_DOLLARS = re.compile(r"\$((?:[^$\\]|\\.){1,1000})\$(?!\d)", re.DOTALL)
_TEX_SIGN = re.compile(r"[\\^]|_\{")
_BRACES = re.compile(r"\\[{}]|[{}]")
_SHORT_TOKENS = re.compile(r"(?<!\S)(?:(?!\S*[^\W\d_]{2})\S+[ \t]?)+")
"""Tokens without two adjacent letters."""
_OPERATION = re.compile(r"[=<>≤≥×÷^*/+](?<=[\w)\]% ].)[-= (\[<$]*[\w(]")
"""The sign comes first, so that a search skips the characters that are none."""
_WORD = re.compile(r"\w+")
STAND_IN = re.compile("“[a-z]{5}”")
"""Matches the word that replaces a formula."""


def without_formulas(text: str) -> tuple[str, int]:
    """The text with a word for each formula, and the number of words in the formulas."""
    formulas: list[str] = []
    replaced = _without_arithmetic(_without_tex(text, formulas), formulas)
    return replaced, sum(len(_WORD.findall(formula)) for formula in formulas)


def _without_tex(text: str, formulas: list[str]) -> str:
    """The text without TeX, which is appended to `formulas`. White space around a displayed formula is removed: the
    formula is part of a sentence."""
    if "$" not in text and "\\" not in text and "_{" not in text and "^{" not in text:
        return text
    kept, position, pairs = [], 0, _brace_pairs(text)
    for mark in _TEX.finditer(text):
        start, stop = mark.start(), _tex_end(text, mark, pairs) if mark.start() >= position else 0
        if stop <= start:
            continue
        while (
            mark["command"] in ("_", "^")
            and start > position
            and (text[start - 1].isalnum() or text[start - 1] in ")]")
        ):
            start -= 1
        before = text[position:start]
        kept += [f"{before.rstrip()} " if mark["display"] else before, _stand_in(text[start:stop])]
        formulas.append(text[start:stop])
        position = stop
        if mark["display"]:
            kept.append(" ")
            position += len(text[stop : stop + 20]) - len(text[stop : stop + 20].lstrip())
    return "".join([*kept, text[position:]])


def _stand_in(formula: str) -> str:
    """The word that replaces a formula, from a hash of it, in quotation marks: a sentence may end with it."""
    number = zlib.crc32("".join(formula.split()).encode())
    return "“" + "".join(chr(ord("a") + (number >> shift) % 26) for shift in (0, 6, 12, 18, 24)) + "”"


def _tex_end(text: str, mark: re.Match[str], pairs: dict[int, int]) -> int:
    """The end of the formula that begins with a mark; 0 where none begins."""
    if mark["dollar"]:
        dollars = _DOLLARS.match(text, mark.start())
        if dollars is None or "\n\n" in dollars[1]:
            return 0
        is_tight = not dollars[1][0].isspace() and not dollars[1][-1].isspace()
        return dollars.end() if is_tight or _TEX_SIGN.search(dollars[1]) else 0
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
    end = text.find(closing, mark.end(), mark.end() + MAX_SPAN)
    return end + len(closing) if end >= 0 else 0


def _groups_end(text: str, position: int, pairs: dict[int, int]) -> int:
    """The end of the groups in braces that follow one another from `position` on."""
    while text[position : position + 1] == "{" and pairs.get(position, position + MAX_SPAN) < position + MAX_SPAN:
        position = pairs[position] + 1
    return position


def _brace_pairs(text: str) -> dict[int, int]:
    """Position of the closing brace by position of its opening one."""
    waiting: list[int] = []
    pairs = {}
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            waiting.append(brace.start())
        elif brace[0] == "}" and waiting:
            pairs[waiting.pop()] = brace.start()
    return pairs


def _without_arithmetic(text: str, formulas: list[str]) -> str:
    """The text without runs of numbers, signs and single letters that hold an operation."""

    def removed(run: re.Match[str]) -> str:
        if _OPERATION.search(run[0]) is None:
            return run[0]
        formulas.append(run[0])
        return f"{_stand_in(run[0])} "

    if _OPERATION.search(text) is None:
        return text
    return "\n".join(_SHORT_TOKENS.sub(removed, line) if _OPERATION.search(line) else line for line in text.split("\n"))
