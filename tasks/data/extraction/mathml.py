"""Writes MathML as TeX: fractions, roots, indices and rows keep their layout, symbols stay as they are. Runs in
executors: imports no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.html import HtmlElement

_FORMS = {
    "mfrac": r"\frac{{{}}}{{{}}}",
    "mroot": r"\sqrt[{1}]{{{0}}}",
    "msup": "{}^{{{}}}",
    "mover": "{}^{{{}}}",
    "msub": "{}_{{{}}}",
    "munder": "{}_{{{}}}",
    "msubsup": "{}_{{{}}}^{{{}}}",
    "munderover": "{}_{{{}}}^{{{}}}",
}
"""TeX of the elements whose children have places; an element with another number of children is a row."""
_NUM_CHILDREN = {"msubsup": 3, "munderover": 3}
_ACCENTS = {"¯": "bar", "‾": "bar", "^": "hat", "ˆ": "hat", "~": "tilde", "˜": "tilde", "→": "vec", "˙": "dot"}
_ROW_END = r" \\ "
_UNSEEN = str.maketrans("", "", "\u2061\u2062\u2063\u2064")
"""Function application and invisible times, comma and plus."""


def mathml_to_tex(element: HtmlElement) -> str:
    """TeX of an element without its tail. The depth of a page is bounded before (page_bounds.py)."""
    tag = str(element.tag)
    if tag.startswith("annotation"):
        return ""
    parts = [mathml_to_tex(child) for child in element]
    if tag in _FORMS and len(parts) == _NUM_CHILDREN.get(tag, 2):
        if tag == "mover" and parts[1] in _ACCENTS:
            return rf"\{_ACCENTS[parts[1]]}{{{parts[0]}}}"
        return _FORMS[tag].format(*parts)
    if tag == "mfenced":
        inside = f"{element.get('separators', ',')[:1]} ".join(parts)
        return f"{element.get('open', '(')}{inside}{element.get('close', ')')}"
    if tag == "mtable":
        return rf"\begin{{matrix}}{_ROW_END.join(parts)}\end{{matrix}}"
    if tag in ("mtr", "mlabeledtr"):
        return " & ".join(parts)
    inside = (element.text or "") + "".join(
        part + (child.tail or "") for part, child in zip(parts, element, strict=True)
    )
    inside = inside.translate(_UNSEEN).strip() if tag != "mtext" else inside
    return rf"\sqrt{{{inside}}}" if tag == "msqrt" else " " if tag == "mspace" else inside
