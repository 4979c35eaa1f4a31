"""Removes code and markup from a text. Runs in executors: imports no Spark.

It removes fenced blocks (Markdown), literal blocks and code directives (reStructuredText), doctests, elements and
comments of markup, tags, inline code, targets of links, and runs of lines that look like statements of a program.
What is opened and not closed hides nothing. Every scan is linear in the text: closing marks are looked for up to
MAX_SPAN characters away.
"""

from __future__ import annotations

import re

MAX_SPAN = 5000
"""Characters of the longest comment or element: marks further apart belong to two."""
MAX_STATEMENT, MAX_INLINE = 400, 200
"""Characters of the longest line that is looked at as a statement, and of inline code."""
BLOCK_MARKS = ("```", "~~~", "::", ">>> ")
MARKUP_MARKS = ("<", "`", "{", "[", ":\n", ":: ", ".. _")
STATEMENT_ENDS = tuple("{}()[];:") + tuple(f"{end} " for end in "{}();")
STATEMENT_STARTS = ("import ", "from ", "using ", "package ", "#include", "require ", "use ", "$ ", "//", "/*", "@")
"""Most lines of prose have none of these and are not looked at further."""

_FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})([^`]*)")
_DIRECTIVE = re.compile(
    r"\.\. (?:[\w-]+:)?(?:code|code-block|sourcecode|math|doctest|testcode|testoutput|parsed-literal|literalinclude|productionlist)::"  # noqa: E501
)
_STATEMENT = re.compile(
    r"[ \t]*(?:"
    r"[})\]]+[;,)]*"
    r"|(?:.*[\w)\]\"'>,;][ \t]*)?[{}]"
    r"|.*(?:\w\(|[$=@]|->|::|\w\.\w).*[\w)\]\"'];"
    r"|[\w.\[\]'\"$]+(?:[ \t]\w+)?[ \t]*[-+*/|&:]?=[ \t]*\S.*"
    r"|(?:await )?[\w.$]*\w\(.*\)[;:,]?"
    r"|(?:import|from|using|package|#include|require|use)[ \t][\w.*{}<>\"'/:]+(?:[ \t](?:import|from|as)[ \t].+)?;?"
    r"|(?:async |export |pub )?(?:def|class|function|fn|func|struct|interface)[ \t]\w+.*[({:]"
    r"|(?:if|for|while|elif|with|switch|catch)\b.*(?:\w\(|[=<>\[]).*:"
    r"|\$ [a-z].*|//.*|/\*.*|@\w+(?:\(.*\))?"
    r")[ \t]*"
)
_WORDS = re.compile(r"(?:[^\W\d_]{2,},? ){5}")
"""Words in a row, as sentences have and statements have not."""
_OPENING = re.compile(
    r"<(?P<tag>pre|code|script|style|math)\b|(?P<comment><!--)|(?P<jsx>\{/\*)|\[(?P<bb>asy|code)\]|(?<!`)(?P<ticks>`{1,2})(?![`\s])"
)
_MARKUP = re.compile(
    r"(?m)^[ \t]*(?:\.\. (?:[\w-]+(?::[\w-]+)?::|_[^:\n]{1,80}:.*)|:[A-Za-z][\w -]{0,40}:)"
    r"|</?[A-Za-z][\w.]{0,30}(?:\s[^<>]{0,500})?/?>|[ ]\{#[\w.-]{1,80}\}|(?<=\])\([^()\s]{1,500}\)"
)
"""Directives, targets and fields of reStructuredText, tags, anchors of headings, targets of links."""
_ASCII_WORD = re.compile(r"[A-Za-z0-9]")


def without_code(text: str) -> str:
    """Lines of code become empty lines, code and markup within a line a space."""
    lines = text.split("\n")
    if any(mark in text for mark in BLOCK_MARKS):
        _clear_blocks(lines)
    _clear_statements(lines)
    return _without_markup("\n".join(lines))


def _clear_blocks(lines: list[str]) -> None:
    """Empty the lines of fenced and literal blocks and of doctests."""
    unclosed: set[str] = set()
    place = 0
    while place < len(lines):
        stripped, start, stop = lines[place].strip(), place, place
        fence = _FENCE.match(lines[place])
        if fence is not None and fence[1] not in unclosed:
            stop = _closing_fence(lines, place + 1, fence[1])
            unclosed |= {fence[1]} if stop == place else set()
        elif _DIRECTIVE.match(stripped):
            stop = _indented_end(lines, place)
        elif stripped.endswith("::") and not stripped.startswith(".."):
            stop = _indented_end(lines, place)
            start += 1  # the line before a literal block is prose
        elif stripped.startswith(">>> "):
            stop = next((after for after in range(place, len(lines)) if not lines[after].strip()), len(lines))
        lines[start:stop] = [""] * max(stop - start, 0)
        place = max(stop, place + 1)


def _closing_fence(lines: list[str], start: int, mark: str) -> int:
    """The line after the one that closes a fence; start - 1 where none does."""
    for place in range(start, len(lines)):
        found = _FENCE.match(lines[place])
        if found is not None and found[1].startswith(mark) and not found[2].strip():
            return place + 1
    return start - 1


def _indented_end(lines: list[str], start: int) -> int:
    """The line after the block that is indented more than the line `start`; `start` where a less indented line
    follows."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    stop = start
    for place in range(start + 1, len(lines)):
        line = lines[place]
        if line.strip():
            if len(line) - len(line.lstrip()) <= indent:
                break
            stop = place + 1
    return stop


def _clear_statements(lines: list[str]) -> None:
    """Empty runs of lines of which the first, the last and half of all look like statements of a program, and none like
    prose."""
    looks = [_is_statement(line) for line in lines]
    place = 0
    while place < len(lines):
        first = last = place
        balance = 0
        while looks[first] and place < len(lines) and balance >= 0:
            if looks[place]:
                balance, last = balance + 1, place
            elif lines[place].strip():
                balance -= 1 if _WORDS.search(lines[place]) is None else balance + 1
            place += 1
        if last > first:
            lines[first : last + 1] = [""] * (last + 1 - first)
        place = last + 1


def _is_statement(line: str) -> bool:
    may_be = line.endswith(STATEMENT_ENDS) or "=" in line or line.lstrip().startswith(STATEMENT_STARTS)
    return may_be and len(line) <= MAX_STATEMENT and _STATEMENT.fullmatch(line) is not None


def _without_markup(text: str) -> str:
    """Without elements of code, comments, inline code and what _MARKUP names."""
    if not any(mark in text for mark in MARKUP_MARKS):
        return text
    kept, place = [], 0
    last: dict[str, int] = {}
    for opening in _OPENING.finditer(text):
        closing, start = _closing_of(opening), opening.end()
        if closing not in last:
            last[closing] = text.rfind(closing)
        found = (
            text.find(closing, start, start + MAX_SPAN) if opening.start() >= place and last[closing] >= start else -1
        )
        is_quotation = opening["ticks"] and (
            found - start > MAX_INLINE or _ASCII_WORD.match(text, found + len(closing))
        )  # `word'
        if found >= 0 and not is_quotation:
            kept += [text[place : opening.start()], " "]
            place = found + len(closing)
    return _MARKUP.sub(" ", "".join([*kept, text[place:]]))


def _closing_of(opening: re.Match[str]) -> str:
    if opening["tag"]:
        return f"</{opening['tag']}>"
    if opening["bb"]:
        return f"[/{opening['bb']}]"
    return "-->" if opening["comment"] else "*/}" if opening["jsx"] else opening["ticks"]
