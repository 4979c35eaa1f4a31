"""Natural language apart from program code, formulas, markup and addresses. Runs in executors: imports no Spark."""

from __future__ import annotations

import re

MARKS = re.compile(r"[`$<>\\@~]|://|\*/|\]\(")
"""What every pattern of NOT_PROSE needs one of: most texts have none and are left as they are."""
NOT_PROSE = re.compile(
    r"""
    ^[ \t]*(?P<fence>```|~~~)[^\n]*\n.*?(?:^[ \t]*(?P=fence)|\Z)       # fenced code, also where its end was cut off
    | \$\$.{1,2000}?\$\$ | \\\[.{1,2000}?\\\] | \\\(.{1,500}?\\\)      # TeX between its delimiters
    | \\begin\{(?P<name>[a-z*]{1,20})\}.{1,4000}?\\end\{(?P=name)\}
    | \$(?=\S)[^$\n]{1,300}(?<=\S)\$(?!\d)                             # pandoc's rule: amounts of money are none
    | (?<!`)`(?!`)[^`\n]{1,60}`(?!`)                                   # not ``quoted``
    | /\*.{1,2000}?\*/
    | </?[A-Za-z][^<>\n]{0,300}>                                       # tags
    | (?<=\])\([^()\s]{1,500}\)                                        # targets of Markdown's links
    | \b(?:https?|ftp)://[^\s)>\]]{1,2000}
    | \b[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{1,63}
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
FRONT_MATTER = re.compile(r"\A---\n.{0,2000}?^---$", re.MULTILINE | re.DOTALL)
"""A page's settings, as in Markdown for web sites."""
LETTER = re.compile(r"[^\W\d_]")


def prose_of(text: str) -> str:
    """The text without what is not written to be read aloud; a blank is left in its place."""
    return NOT_PROSE.sub(" ", FRONT_MATTER.sub(" ", text)) if MARKS.search(text) or text.startswith("---\n") else text


def prose_share(text: str) -> float:
    """Letters of the prose per visible character of the whole text: 0.9 and more in books, less where signs and formulas prevail."""
    visible = sum(map(len, text.split()))
    return sum(map(str.isalpha, prose_of(text))) / visible if visible else 0.0
