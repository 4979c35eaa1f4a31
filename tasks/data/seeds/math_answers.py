"""Extracts final answers of mathematical solutions, and compares them as numbers, as normalised LaTeX, else by what
they mean (math_equality)."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

from tasks.data.seeds.math_equality import are_equal

ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
"""Annotations of GSM8K's calculator: `<<48/2=24>>`."""
MARK = re.compile(r"(?:####|answers?[\s*]*+(?:[:=]|(?:is|are)\b))[\s*:=]*+", re.IGNORECASE)
EMPHASIS = "* \t\r\n"
LEFT_OUT = re.compile(
    r"\\left|\\right|\\[bB]ig+[lr]?(?![a-z])|\\q?quad|\\displaystyle|(?<!\\)\\[!,;:() \[\]]|~|\\\$|\$|\\%|%"
    r"|\^\\circ|\^\{\\circ\}|°|\s+"
)
BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\s|\\?%|\^\\circ|\^\{\\circ\}|°)++(?=\d)")
GROUP = re.compile(r"\s++\d{3}(?!\d)")
"""Three digits after a blank: of one number, as in 12 000."""
DISPLAYED = re.compile(r"\s*+(?:\$\$(.*?)\$\$|\\\[(.*?)\\\])", re.DOTALL)
SENTENCE = re.compile(r"(\$[^$\n]++\$|\\\([^\n]*?\\\))\.\s")
"""Mathematics that ends a sentence."""
TEXT = re.compile(r"\\(?:text(?:normal|rm)?|mbox|mathrm)\s*+\{([^{}]*+)\}")
BOLD = re.compile(r"\\(?:textbf|mathbf|boldsymbol)\{\s*+\(?([^{}()]*+)\)?\s*+\}")
MEASURED = re.compile(
    r"((?:(?<!_)\d|\}|\\pi|\\circ|%)\$?+(?:(?:\\right)?\))?(?:\s|~|\\[,;:! ])*+)?"
    + TEXT.pattern
    + r"(\^(?:\d|\{\d\}))?"
)
"""A text after what ends a number, or without one; and the power of a unit."""
NO_UNIT = re.compile(
    r",|\b(?:or|and|if|is|are|not|than|hundred|thousand|million|billion|trillion|dozen|[ap]\.?\s?m)\b|(?<![a-z])\d"
    r"|^[\s~]*+[ei][\s~]*+$",
    re.IGNORECASE,
)
"""A text after a number that is no unit: it joins, or it is a factor, an hour, Euler's number or the imaginary one."""
GOES_ON = re.compile(r"\s*+[\w(]")
JOINING_TEXT = re.compile(r"(?:,\s*+)?\\(?:text|mbox)\{\s*+,?\s*+(?:or|and)\s*+\}")
JOINING_WORD = re.compile(r"(?:,\s*+)?(?<=[\s\d$)}])(?:or|and)(?=[\s\d$(\\])")
"""What is between two answers."""
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*+(?=\d{3}(?!\d))")
"""What LaTeX writes between groups of three digits, and never between two numbers."""
BRACKET_OR_GROUPS = re.compile(
    r"(?P<groups>(?<![\d.,])\d{1,3}(?:,\d{3})++(?!,?\d))|(?P<argument>(?<=[\w}\]^])\{)|(?P<opening>(?<!\\)[(\[]|\{|\\langle)"
    r"|(?<!\\)[)\]]|\}|\\rangle"
)
"""Groups of digits, and the brackets around them: `\\(` and `\\[` are none."""
SUBSCRIPT = re.compile(r"_(\w)(?!\w)|(?<=[\dA-F])_(\d+)")
MIXED = re.compile(
    r"(?<![\w.})^_/])(\d+)(?:\s*\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d)(?!\d))|\s+(\d+)/(\d+)(?![\d.]))"
)
"""A mixed number: `2\\frac{1}{2}` or `2 1/2`."""
FRACTION = re.compile(r"(?<![\d.}])(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|\\frac(\d)(\d))(?![\d.{])")
BOX = "\\boxed{"
BRACKETS = re.compile(r"\\boxed\{|[{}]")
BLANK = re.compile(r"\s*\\h?phantom\{[^{}]*\}\s*")
"""The content of a box to be filled in, as a problem has it."""
BETWEEN_BOXES = re.compile(r"(?:\s|~|\$|\\[()\[\],;:! ]|\\q?quad|,|and\b|\\text\{\s*,?\s*and\s*\})*+")
JOINS = re.compile(r",|and")
"""What is between boxes that state the parts of one answer."""
MAX_CHARS = 500
"""Characters of the longest number or calculation: Python converts at most 4,300 digits, and parses no deeper than its
stack."""
APPLY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def final_answer(text: str) -> str:
    """The content of the last \\boxed{...}, else what follows the last `####`, `answer:`, `answer =` or `answer is`: a
    displayed formula, one that ends a sentence, or the rest of the line; empty where there is none."""
    start = text.rfind(BOX)
    if start >= 0:
        depth = 0
        for index in range(start + len(BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len(BOX) : index].strip()
    marks = list(MARK.finditer(text))
    if not marks:
        return ""
    rest = text[marks[-1].end() :]
    if displayed := DISPLAYED.match(rest):
        return (displayed[1] or displayed[2] or "").strip()
    sentence = SENTENCE.match(rest)
    return sentence[1] if sentence else without_emphasis(rest.partition("\n")[0])


def without_emphasis(answer: str) -> str:
    """Without Markdown's asterisks around it, and the punctuation that ends it."""
    return answer.strip(EMPHASIS).rstrip(f"{EMPHASIS}.,;:")


def boxed_answers(text: str) -> list[str]:
    """The contents of all boxes that are closed, in no other box and no blank, in one pass. Those that only a comma or
    "and" separates are one answer."""
    boxes: list[str] = []
    end = 0
    opened: list[int | None] = []
    num_open = 0
    for bracket in BRACKETS.finditer(text):
        if bracket[0] != "}":
            opened.append(bracket.end() if bracket[0] == BOX else None)
            num_open += bracket[0] == BOX
        elif opened and (start := opened.pop()) is not None:
            num_open -= 1
            content = text[start : bracket.start()].strip()
            if num_open or BLANK.fullmatch(content):
                continue
            between = text[end:start].removesuffix(BOX)
            if boxes and content != boxes[-1] and JOINS.search(between) and BETWEEN_BOXES.fullmatch(between):
                content = f"{boxes.pop()}, {content}"
            boxes.append(content)
            end = bracket.end()
    return boxes


def answers_agree(answer: str, wanted: str) -> bool:
    """Whether two final answers are the same number, the same text apart from its formatting, or equal in meaning."""
    one, other = _plain(answer), _plain(wanted)
    first, second = _number(one), _number(other)
    if first is not None and second is not None:
        return first == second
    return one == other or are_equal(_readable(answer), _readable(wanted))


def false_annotations(text: str) -> list[str]:
    """Calculator annotations that are wrong; a rounded result is right if its last digit is."""
    return [f"{left}={right}" for left, right in ANNOTATION.findall(text) if not _holds(left, right)]


def without_annotations(text: str) -> str:
    return ANNOTATION.sub("", text)


def _unformatted(answer: str) -> str:
    text = re.sub(r"\\[dtc]frac", r"\\frac", answer.strip())
    text = re.sub(r"\\frac\s*(\d)\s+(\d)(?!\d)", r"\\frac\1\2", text)
    text = BOLD.sub(r"\1", re.sub(r"\\[dt]binom", r"\\binom", text))
    text = MEASURED.sub(_without_unit, JOINING_TEXT.sub(", ", text))
    text = SEPARATOR.sub("", JOINING_WORD.sub(", ", text)).replace("{,}", ",")
    text = SUBSCRIPT.sub(lambda index: f"_{{{index[1] or index[2]}}}", _ungrouped(text))
    text = MIXED.sub(_improper, text) if len(text) <= MAX_CHARS else text
    return BETWEEN_DIGITS.sub(_apart, text)


def _apart(written: re.Match[str]) -> str:
    """What is between two digits joins them only where it groups the digits of one number."""
    return "" if GROUP.match(written.string, written.start()) else " # "


def _without_unit(written: re.Match[str]) -> str:
    """A text is a unit after a number that it ends, as in `5\\text{ cm}^2`; any other is part of the answer."""
    number, text, power = (part or "" for part in written.groups())
    is_unit = number and not NO_UNIT.search(text) and not GOES_ON.match(written.string, written.end())
    return number if is_unit else f"{number}{text}{power}"


def _ungrouped(answer: str) -> str:
    """Without the commas inside numbers. Those in the brackets of a tuple, an interval or a set, as in (100,200), are
    between numbers, unless one begins with 0."""
    are_lists: list[bool] = []

    def read(part: re.Match[str]) -> str:
        if part["groups"]:
            is_number = not (are_lists and are_lists[-1]) or ",0" in part[0]
            return part[0].replace(",", "") if is_number else part[0]
        if part["argument"] or part["opening"]:
            are_lists.append(not part["argument"])
        elif are_lists:
            are_lists.pop()
        return part[0]

    return BRACKET_OR_GROUPS.sub(read, answer) if "," in answer else answer


def _improper(mixed: re.Match[str]) -> str:
    whole, top, bottom = (int(digits) for digits in mixed.groups() if digits)
    return f"{whole * bottom + top}/{bottom}" if 0 < top < bottom else mixed[0]


def _readable(answer: str) -> str:
    """In small letters, with spaces where formatting was."""
    return LEFT_OUT.sub(" ", _unformatted(answer)).rstrip(" .").lower()


def _plain(answer: str) -> str:
    return LEFT_OUT.sub("", _unformatted(answer)).rstrip(".").lower()


def _number(text: str) -> Fraction | None:
    written = FRACTION.sub(lambda match: f"{match[1] or match[3]}/{match[2] or match[4]}", text)
    if len(written) > MAX_CHARS or not re.fullmatch(r"-?(\d+(\.\d+)?|\.\d+)(/-?\d+)?", written):
        return None
    top, _, bottom = written.partition("/")
    return None if bottom and not int(bottom) else Fraction(top) / int(bottom or 1)


def _holds(left: str, right: str) -> bool:
    value, stated = _value(left), _number(_plain(right))
    if value is None or stated is None:
        return False
    digits = len(_plain(right).partition(".")[2])
    return abs(value - stated) <= Fraction(1, 2 * 10**digits) if digits else value == stated


def _value(expression: str) -> Fraction | None:
    """The value of + - * / and brackets over numbers; None for anything else."""
    text = expression.replace("$", "").replace(",", "").replace("x", "*").strip()
    if len(text) > MAX_CHARS:
        return None
    try:
        return _evaluate(ast.parse(re.sub(r"(\d+(?:\.\d+)?|\.\d+)%", r"(\1/100)", text), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in APPLY:
        return APPLY[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return _evaluate(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return Fraction(str(node.value))
    raise TypeError(ast.dump(node))
