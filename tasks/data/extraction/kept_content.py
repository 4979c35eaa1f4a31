r"""Keeps formulas, code and dates that extractors of articles lose. Runs in executors: imports no Spark.

trafilatura treats MathJax's sources as scripts, hidden MathML as a hidden text, a figure around code as a picture, a
date in a sentence as a byline, and the line breaks of code in lists, quotes and tables as white space; it removes an
empty element with the text after it. This module moves them to where they survive. Formulas become text (TeX between
\( and \) or \[ and \]), powers get a `^`. The white space of code becomes letters until the text is extracted.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from tasks.data.extraction.mathml import mathml_to_tex

if TYPE_CHECKING:
    from lxml.html import HtmlElement

_LINE, _SPACE, _TAB = "\u2e4d", "\u2e4e", "\u2e4f"
"""Letters that replace white space in code: marks of medieval manuscripts. In a page that has one itself, code is left
to trafilatura."""
_PRE_TAG = re.compile(r"(</?pre\b[^<>]*>)", re.IGNORECASE)
_BREAK = re.compile(r"<br\s*/?>\n?", re.IGNORECASE)
_TAG = re.compile(r"(<[^<>]*>)")
_LINE_END = re.compile(r"(?:</(?:div|li|p)>)+(?:\s*</(?:ol|ul|div)>)*\n?", re.IGNORECASE)
_LINE_TAG = re.compile(r"</?(?:div|li|p|ol|ul)\b[^<>]*>", re.IGNORECASE)
"""Elements that are the lines of a program: <pre><ol><li>, <pre><div>."""
_LETTERS = str.maketrans({"\n": _LINE, " ": _SPACE, "\t": _TAB})
_SPACES = str.maketrans({_SPACE: " ", _TAB: "\t"})
_LINE_BACK = re.compile(rf"\n? ?{_LINE}(?: ?\n| )?")
_RENDERED = re.compile(r"(?:^|[\s_-])(?:math|katex)", re.IGNORECASE)
_PICTURED = re.compile(r"(?:^|\s)(?:latex|tex|math[\w-]*|mwe-math[\w-]*|quicklatex[\w-]*)(?:\s|$)", re.IGNORECASE)
"""Classes of elements that renderers put around a formula, and of pictures whose alternative text is TeX (WordPress,
MediaWiki)."""
_PICTURED_BY = re.compile(r"//(?:[\w-]+\.)*latex\.|/latex\.php\b|/(?:mimetex|mathtex)\.cgi\b", re.IGNORECASE)
"""Addresses of such pictures: CodeCogs, WordPress, mimeTeX."""
_EMPTY_INLINE = ("a", "span", "i", "b", "em", "strong", "q")
_EMPTY_BLOCKS = (
    "div",
    "p",
    "section",
    "article",
    "blockquote",
    "li",
    "dd",
    "dt",
    "pre",
    *(f"h{n}" for n in range(1, 7)),
)
_POWER = re.compile(r"\s*[-+−–]?(?:\d+|[nkxy])\s*")
_RAISED = re.compile(r"(?:[\d)]|(?<![^\W\d_])[^\W\d_]{1,3})$")
"""What a power follows: a number, a bracket, a variable or a unit."""
_MAX_WRAPPERS = 8
_IN_SENTENCE = frozenset({"p", "li", "td", "dd", "blockquote"})


def with_lettered_code(markup: str) -> str:
    """The markup with letters for the white space in <pre>."""
    if ("<pre" not in markup and "<PRE" not in markup) or _has_letters(markup):
        return markup
    parts = _PRE_TAG.split(markup.replace("\r\n", "\n"))
    for index in range(2, len(parts) - 1, 2):
        pieces = [] if parts[index - 1].startswith("</") else _TAG.split(_with_lines(parts[index]))
        if "".join(pieces[::2]).strip():
            first, *_, last = [at for at in range(0, len(pieces), 2) if pieces[at].strip("\n")] * 2
            pieces[first], pieces[last] = pieces[first].lstrip("\n"), pieces[last].rstrip("\n")
            pieces[::2] = [
                piece.translate(_LETTERS) if first <= 2 * at <= last else "" for at, piece in enumerate(pieces[::2])
            ]
            parts[index] = f"{_LINE}{''.join(pieces)}{_LINE}"
    return "".join(parts)


def _with_lines(block: str) -> str:
    """The content of a <pre> with line ends instead of <br> and of the elements that are its lines."""
    lines = _LINE_TAG.sub("", _LINE_END.sub("\n", block)) if "</" in block else block
    return _BREAK.sub("\n", lines)


def without_letters(text: str, markup: str) -> str:
    """The text of a page with white space instead of those letters; code begins and ends a line."""
    return text if _LINE not in text or _has_letters(markup) else _LINE_BACK.sub("\n", text).translate(_SPACES)


def _has_letters(markup: str) -> bool:
    return any(letter in markup for letter in (_LINE, _SPACE, _TAB))


def keep_content(tree: HtmlElement) -> None:
    """Change a whole page so that trafilatura keeps its formulas, the code in its figures and the dates in its
    sentences."""
    _fill_empty(tree)
    for raised in tree.iter("sup"):
        if not len(raised) and _POWER.fullmatch(raised.text or "") and _RAISED.search(_text_before(raised)):
            raised.text = f"^{(raised.text or '').strip()}"
    for figure in tree.iter("figure"):
        if figure.find(".//pre") is not None:
            figure.tag = "div"
    for time in list(tree.iter("time")):
        parent = time.getparent()
        if parent is not None and parent.tag in _IN_SENTENCE and (time.tail or "").strip():
            time.tag = "span"
            time.attrib.clear()
    for script in list(tree.iter("script")):
        kind = script.get("type", "")
        if kind.startswith(("math/tex", "text/latex")) and script.text:
            _drop_preview(script)
            _replace(script, script.text, is_block="display" in kind)
    for formula in list(tree.iter("mml:math")):
        for element in formula.iter() if formula.tag == "mml:math" else ():  # not renamed with one around it
            element.tag = str(element.tag).removeprefix("mml:")
    formulas = [formula for formula in tree.iter("math") if next(formula.iterancestors("math"), None) is None]
    for element, source, display in [
        (_outermost(formula), _source(formula), formula.get("display")) for formula in formulas
    ]:
        if source:
            _replace(element, source, is_block=display == "block")
    for image in list(tree.iter("img")):
        is_formula = _PICTURED.search(image.get("class", "")) or _PICTURED_BY.search(image.get("src", ""))
        if image.get("alt") and is_formula:
            _replace(image, image.get("alt", ""), is_block=False)


def _fill_empty(tree: HtmlElement) -> None:
    """Put the text that follows an empty element into it. A link without an address, which marks a place, would count
    as a link without a text."""
    for element in tree.iter(*_EMPTY_INLINE, *_EMPTY_BLOCKS):
        if element.tag == "a":
            if element.get("href") is not None:
                continue
            element.tag = "span"
        if not len(element) and element.text is None and (element.tail or "").strip():
            tail = element.tail
            element.attrib.clear()
            element.tag = "span" if element.tag in _EMPTY_INLINE else "p"
            element.text, element.tail = tail, None


def _text_before(element: HtmlElement) -> str:
    """The text right before an element, as far as its parent or the element before it holds it."""
    before, parent = element.getprevious(), element.getparent()
    if before is None:
        return "" if parent is None else parent.text or ""
    return before.tail or "".join(before.itertext())


def _drop_preview(script: HtmlElement) -> None:
    """Remove what MathJax 2 has put before a formula's source: its preview, and the letters that show it."""
    before = script.getprevious()
    while (
        before is not None
        and before.get("class", "").startswith(("MathJax", "MJX"))
        and not (before.tail or "").strip()
    ):
        before.drop_tree()
        before = script.getprevious()


def _source(formula: HtmlElement) -> str:
    """TeX of a MathML element: its annotation or alternative text, or else its symbols in their layout."""
    for note in formula.iter("annotation"):
        if "tex" in note.get("encoding", ""):
            return note.text or ""
    return formula.get("alttext") or " ".join(mathml_to_tex(formula).split())


def _outermost(formula: HtmlElement) -> HtmlElement:
    """The renderer's element around a formula, which also holds the picture or the letters that show it."""
    outermost = formula
    for parent in islice(formula.iterancestors(), _MAX_WRAPPERS):
        is_renderer = str(parent.tag).startswith("mjx-") or (
            parent.tag == "span" and _RENDERED.search(parent.get("class", ""))
        )
        if not is_renderer or len(list(islice(parent.iter("math"), 2))) > 1:
            break
        outermost = parent
    return outermost


def _replace(element: HtmlElement, source: str, is_block: bool) -> None:
    """Make the element a span of text: text merged into its surroundings would be copied with every formula of a
    paragraph."""
    opening, closing = ("\\[", "\\]") if is_block else ("\\(", "\\)")
    tail = element.tail
    element.clear()
    element.tag, element.text, element.tail = "span", f"{opening}{' '.join(source.split())}{closing}", tail
