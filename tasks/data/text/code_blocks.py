"""Removes code and markup from a text. Runs in executors: imports no Spark.

It removes fenced blocks (Markdown), literal blocks and code directives (reStructuredText), doctests, elements and
comments of markup, tags, inline code, targets of links, and runs of lines that look like statements of a program.
An opening mark without a closing one removes nothing. Every scan is linear in the text: closing marks are searched for
up to MAX_SPAN characters away.
"""

from __future__ import annotations

import re

MAX_SPAN = 5000
"""Characters of the longest comment or element: marks further apart do not belong together."""
MAX_STATEMENT, MAX_INLINE = 400, 200
"""Characters of the longest line that can be a statement, and of the longest inline code."""
BLOCK_MARKS = ("```", "~~~", "::", ">>> ")
MARKUP_MARKS = ("<", "`", "{", "[", ":\n", ":: ", ".. _")
STATEMENT_ENDS = tuple("{}()[];:") + tuple(f"{end} " for end in "{}();")
STATEMENT_STARTS = ("import ", "from ", "using ", "package ", "#include", "require ", "use ", "$ ", "//", "/*", "@")
"""Most lines of prose have none of these and are not examined further."""

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
"""Five words in a row: sentences have them, statements do not."""
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
    """The text with an empty line for each line of code, and a space for code and markup within a line."""
    lines = text.split("\n")
    if any(mark in text for mark in BLOCK_MARKS):
        _clear_blocks(lines)
    _clear_statements(lines)
    return _without_markup("\n".join(lines))


def _clear_blocks(lines: list[str]) -> None:
    """Empty the lines of fenced and literal blocks and of doctests."""
    unclosed: set[str] = set()
    index = 0
    while index < len(lines):
        stripped, start, stop = lines[index].strip(), index, index
        fence = _FENCE.match(lines[index])
        if fence is not None and fence[1] not in unclosed:
            stop = _closing_fence(lines, index + 1, fence[1])
            unclosed |= {fence[1]} if stop == index else set()
        elif _DIRECTIVE.match(stripped):
            stop = _indented_end(lines, index)
        elif stripped.endswith("::") and not stripped.startswith(".."):
            stop = _indented_end(lines, index)
            start += 1  # the line before a literal block is prose
        elif stripped.startswith(">>> "):
            stop = next((after for after in range(index, len(lines)) if not lines[after].strip()), len(lines))
        lines[start:stop] = [""] * max(stop - start, 0)
        index = max(stop, index + 1)


def _closing_fence(lines: list[str], start: int, mark: str) -> int:
    """The line after the one that closes a fence; start - 1 where none does."""
    for index in range(start, len(lines)):
        fence = _FENCE.match(lines[index])
        if fence is not None and fence[1].startswith(mark) and not fence[2].strip():
            return index + 1
    return start - 1


def _indented_end(lines: list[str], start: int) -> int:
    """The line after the block that is indented more than the line `start`; `start` where a less indented line
    follows."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    stop = start
    for index in range(start + 1, len(lines)):
        line = lines[index]
        if line.strip():
            if len(line) - len(line.lstrip()) <= indent:
                break
            stop = index + 1
    return stop


def _clear_statements(lines: list[str]) -> None:
    """Empty runs of lines whose first line, last line and half of all lines look like statements; no line is prose."""
    looks = [_is_statement(line) for line in lines]
    index = 0
    while index < len(lines):
        first = last = index
        balance = 0
        while looks[first] and index < len(lines) and balance >= 0:
            if looks[index]:
                balance, last = balance + 1, index
            elif lines[index].strip():
                balance -= 1 if _WORDS.search(lines[index]) is None else balance + 1
            index += 1
        if last > first:
            lines[first : last + 1] = [""] * (last + 1 - first)
        index = last + 1


def _is_statement(line: str) -> bool:
    may_be = line.endswith(STATEMENT_ENDS) or "=" in line or line.lstrip().startswith(STATEMENT_STARTS)
    return may_be and len(line) <= MAX_STATEMENT and _STATEMENT.fullmatch(line) is not None


def _without_markup(text: str) -> str:
    """The text without elements of code, comments, inline code and matches of _MARKUP."""
    if not any(mark in text for mark in MARKUP_MARKS):
        return text
    kept, position = [], 0
    last: dict[str, int] = {}
    for opening in _OPENING.finditer(text):
        closing, start = _closing_of(opening), opening.end()
        if closing not in last:
            last[closing] = text.rfind(closing)
        end = (
            text.find(closing, start, start + MAX_SPAN)
            if opening.start() >= position and last[closing] >= start
            else -1
        )
        is_quotation = opening["ticks"] and (
            end - start > MAX_INLINE or _ASCII_WORD.match(text, end + len(closing))
        )  # `word'
        if end >= 0 and not is_quotation:
            kept += [text[position : opening.start()], " "]
            position = end + len(closing)
    return _MARKUP.sub(" ", "".join([*kept, text[position:]]))


def _closing_of(opening: re.Match[str]) -> str:
    if opening["tag"]:
        return f"</{opening['tag']}>"
    if opening["bb"]:
        return f"[/{opening['bb']}]"
    return "-->" if opening["comment"] else "*/}" if opening["jsx"] else opening["ticks"]
