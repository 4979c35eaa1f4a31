"""What extraction does around trafilatura: the same elements selected faster, the same bounds for any page, code and
formulas kept."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import trafilatura.xpaths
from lxml.html import document_fromstring

from tasks.data.extraction import page_rules
from tasks.data.extraction.html_text import html_to_text
from tasks.data.extraction.kept_content import keep_content, with_lettered_code, without_letters
from tasks.data.extraction.page_bounds import MAX_CELLS, MAX_COPIED_CHARS, MAX_ROW_CELLS, is_bounded, is_costly
from tests.data.extraction.test_extraction import PAGE, SENTENCES
from tests.support.data_inputs import SHARED_DATA, prose


def _shared_pages(name: str) -> list[str]:
    path = SHARED_DATA / "html" / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not at hand: no shared data")
    return [json.loads(line)["html"] for line in gzip.decompress(path.read_bytes()).splitlines()]


def _check_marks(tree):
    """Every expression finds in the marked tree what trafilatura's own finds in it."""
    page_rules.mark(tree)
    num_selected = 0
    for name in page_rules.LISTS:
        for expression in getattr(trafilatura.xpaths, name):
            expected = expression.original(tree)
            # of the body expressions trafilatura takes the first element
            assert (
                (expression(tree)[:1], name) == (expected[:1], name)
                if name == "BODY_XPATH"
                else expression(tree) == expected
            )
            num_selected += len(expected)
    return num_selected


def test_marked_expressions_find_what_the_libraries_own_find():
    trees = [document_fromstring(page.encode()) for page in _shared_pages("extraction_segments")[:40]]
    assert sum(map(_check_marks, trees)) > 2000


def test_every_condition_of_an_expression_has_a_mark():
    """One element for each alternative of each condition, made from its own pattern, and for each order of two
    attributes."""
    rules, watched = page_rules._rules()
    elements = []
    for names, conditions in rules.items():
        for _, literal, pattern in conditions:
            values = {
                literal,
                pattern.pattern.strip("^"),
                re.sub(r"\(\?:([^|)]*)[^)]*\)", r"\1", pattern.pattern).strip("^"),
                f"x {literal} y",
            }
            elements += [(name, value) for name in names for value in values if "<" not in value and '"' not in value]
    assert {name for name, _ in elements} == watched
    both = [
        f'<div id="{one}" class="{other}"></div><div class="{other}" id="{one}"></div>'
        for one in ("link", "x")
        for other in ("cookie", "link b", "y")
    ]
    body = "".join(
        f'<div {name}="{value}">a</div><ul {name}="{value}"><li>b</ul><a {name}="{value}">c</a>'
        for name, value in elements
    )
    tree = document_fromstring(f"<html><body MARKS='ABCDEFGHIJKLMNOP'>{body}{''.join(both)}</body></html>")
    assert _check_marks(tree) > len(elements) / 2


def test_a_tree_without_marks_is_asked_as_the_library_asks():
    tree = document_fromstring("<html><body><div class='entry-content'><p>a</p></div></body></html>")
    (selected,) = trafilatura.xpaths.BODY_XPATH[0](tree)
    assert selected.get("class") == "entry-content" and selected.get(page_rules.MARKS) is None


@pytest.mark.parametrize(
    ("body", "is_too_much"),
    [
        (
            "<table><tr>" + "<td>a</td>" * 100 + "</tr>" + "<tr><td>b</td></tr>" * (MAX_CELLS // 100 - 20) + "</table>",
            False,
        ),
        ("<table><tr>" + "<td>a</td>" * 100 + "</tr>" + "<tr><td>b</td></tr>" * (MAX_CELLS // 100) + "</table>", True),
        ("<table><tr>" + "<td colspan=0100>a</td>" * (MAX_CELLS // 100 + 1) + "</tr></table>", True),
        ("<table>" + "<tr><td rowspan=99999>a</td></tr>" * (MAX_CELLS // 100 + 1) + "</table>", True),
        ("<table><tr>" + "<td>a</td>" * (MAX_ROW_CELLS + 1) + "</tr></table>", True),
    ],
    ids=["rows", "more rows", "columns", "spanned rows", "a long row"],
)
def test_what_trafilatura_would_blow_up_is_left_to_resiliparse(body, is_too_much):
    """45,000 rows of one cell became 13 MB of bars and 700 MB of memory."""
    page = PAGE.format(body=SENTENCES + body)
    assert is_bounded(page) and is_costly(page, document_fromstring(page)) is is_too_much
    if is_too_much:
        text, reason = html_to_text(page, "combined")
        assert reason == "" and len(text) < 2 * len(page) and text == html_to_text(page, "resiliparse")[0]


def test_a_text_in_too_many_elements_is_too_large():
    """resiliparse copies it once for each of them; lxml gives up at 256."""
    text = "x" * (MAX_COPIED_CHARS // 1000)
    assert not is_bounded("<div>" * 1001 + text + "</div>" * 1001)
    assert is_bounded("<div>" * 980 + text + "</div>" * 980) and is_bounded("<p>" * 1000 + text)
    assert is_bounded("<div>" * 1000 + "</div>" * 998 + 100 * text)


def test_many_formulas_in_a_paragraph_are_not_copied_with_each():
    tree = document_fromstring("<html><body><p>" + "<math><mi>x</mi></math> and " * 3000 + "</p></body></html>")
    keep_content(tree)
    spans = list(tree.iter("span"))
    assert len(spans) == 3000 and {(span.text, span.tail) for span in spans} == {("\\(x\\)", " and ")}


def test_code_blocks_that_are_never_closed_are_passed_once():
    """A pattern from <pre> to </pre> went to the end of the page from each of them."""
    lettered = with_lettered_code("<pre>" * 1000 + "x y\n\n" * 1000 + "</pre>")
    assert without_letters(lettered, "") == "<pre>" * 1000 + "\n" + "x y\n\n" * 999 + "x y\n</pre>"
    assert with_lettered_code("<pre>" * 10 + "x y") == "<pre>" * 10 + "x y"


@pytest.mark.parametrize("block", ["<pre><code></code></pre>", "<pre>\n<b>\n</b></pre>", "<pre> </pre>"])
def test_an_empty_code_block_costs_nothing_else(block):
    text, reason = html_to_text(PAGE.format(body=f"<p>{prose(1)}</p>{block}<p>{prose(2)}</p>"), "combined")
    assert reason == "" and prose(1)[:200] in text and prose(2)[:200] in text


CODE = "if x:\n    y = [1]\n\n\ty()"


@pytest.mark.parametrize(
    "around",
    [
        "<pre>{}</pre>",
        "<pre><code>\n{}\n</code></pre>",
        "<ul><li>Do this:<pre>{}</pre></li></ul>",
        "<ul><li>Do this:<pre><code>{}</code></pre> and go on</li></ul>",
        "<blockquote><pre>{}</pre></blockquote>",
        "<figure class='highlight'><pre>{}</pre></figure>",
        "<PRE class='highlight'><span></span>{}</PRE>",
        "<table><tr><td class='gutter'><pre>1</pre></td><td class='code'><pre>{}</pre></td></tr></table>",
    ],
    ids=["bare", "in code", "in a list", "in an item", "in a quote", "in a figure", "highlighted", "in a table"],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "<br>", "<br/>\n"])
def test_code_keeps_its_lines_and_indentation_wherever_it_stands(around, line_end):
    page = PAGE.format(
        body=SENTENCES + around.format(CODE.replace("\n", line_end).replace("if", "<b>if</b>")) + SENTENCES
    )
    text, _ = html_to_text(page, "combined")
    assert f"\n{CODE}\n" in text and not {"\u2e4d", "\u2e4e", "\u2e4f"} & set(text)


def test_a_page_with_the_letters_that_stand_for_white_space_keeps_them():
    text, _ = html_to_text(
        PAGE.format(body=f"{SENTENCES}<p>The mark \u2e4d and \u2e4e.</p><pre>a = 1</pre>"), "combined"
    )
    assert "The mark \u2e4d and \u2e4e." in text and "a = 1" in text


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("<script type='math/tex'>a < b</script>", "\\(a < b\\)"),
        ("<script type='math/tex; mode=display'>a^2</script>", "\\[a^2\\]"),
        ("<math><mi>x</mi><annotation encoding='application/x-tex'>x_1</annotation></math>", "\\(x_1\\)"),
        ("<math alttext='x^2' display='block'><mi>x</mi></math>", "\\[x^2\\]"),
        ("<math><mi>a</mi><mo>+</mo><mi>b</mi></math>", "\\(a+b\\)"),
        (
            "<math><mfrac><mi>a</mi><mrow><mi>b</mi><mo>+</mo><mn>1</mn></mrow></mfrac><mo>=</mo><msqrt><msup><mi>x</mi>"
            "<mn>10</mn></msup></msqrt></math>",
            r"\(\frac{a}{b+1}=\sqrt{x^{10}}\)",
        ),
        (
            "<math><munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>0</mn></mrow><mi>n</mi></munderover>"
            "<mover><mi>v</mi><mo>→</mo></mover><mfrac><mi>a</mi></mfrac></math>",
            r"\(∑_{i=0}^{n}\vec{v}a\)",
        ),
        (
            "<math><mfenced><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>0</mn></mtd></mtr><mtr><mtd><mn>0</mn></mtd>"
            "<mtd><mn>1</mn></mtd></mtr></mtable></mfenced></math>",
            r"\((\begin{matrix}1 & 0 \\ 0 & 1\end{matrix})\)",
        ),
        (
            "<span class='MathJax_Preview'>x2</span><span class='MathJax'><span>x2</span></span>"
            "<script type='math/tex'>x^2</script>",
            "\\(x^2\\)",
        ),
        (
            "<span class='mwe-math-element'><span class='mwe-math-mathml-inline' style='display: none;'>"
            "<math alttext='E'><mi>E</mi></math></span>"
            "<img alt='E' class='mwe-math-fallback-image-inline' src='e.svg'></span>",
            "\\(E\\)",
        ),
        (
            "<span class='katex'><span class='katex-mathml'><math><mi>x</mi>"
            "<annotation encoding='application/x-tex'>x</annotation></math></span>"
            "<span class='katex-html' aria-hidden='true'>x</span></span>",
            "\\(x\\)",
        ),
        (
            "<mjx-container><mjx-math aria-hidden='true'>x</mjx-math><mjx-assistive-mml><math><mi>x</mi></math>"
            "</mjx-assistive-mml></mjx-container>",
            "\\(x\\)",
        ),
        ("<img class='latex' alt='x^2' src='a.png'>", "\\(x^2\\)"),
        ("<img class='ql-img-inline-formula quicklatex-auto-format' alt='x^2' src='a.png'>", "\\(x^2\\)"),
        ("<img src='https://latex.codecogs.com/gif.image?x^2' alt='x^2'>", "\\(x^2\\)"),
        ("<script type='text/latex'>a+b</script>", "\\(a+b\\)"),
        (
            "<mml:math><mml:msup><mml:mi>x</mml:mi><mml:mn>2</mml:mn></mml:msup><mml:mo>=</mml:mo>"
            "<mml:mfrac><mml:mn>1</mml:mn><mml:mn>2</mml:mn></mml:mfrac></mml:math>",
            r"\(x^{2}=\frac{1}{2}\)",
        ),
        (
            "<span class='math'><math alttext='y'><mi>y</mi></math>, <math alttext='z'><mi>z</mi></math></span>",
            "\\(y\\), \\(z\\)",
        ),
        ("<span class='text'>so <math alttext='y'><mi>y</mi></math></span>", "so \\(y\\)"),
        ("<img class='text' alt='A tree' src='a.png'>", ""),
        ("<img alt='Blue gloves' src='//shop.example/latex-gloves.jpg'>", ""),
        ("<time datetime='2020-01-01'>1 January</time>", "1 January"),
    ],
)
def test_formulas_and_dates_stay_in_their_sentences(formula, expected):
    text, _ = html_to_text(PAGE.format(body=f"{SENTENCES}<p>Before {formula} after it.</p>{SENTENCES}"), "combined")
    assert f"\nBefore {expected} after it.\n".replace("  ", " ") in text


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("<p><a name='b'></a>A short line.</p>", "A short line."),
        ("<p><span id='b'></span>A short line.</p>", "A short line."),
        ("<p>Open the menu <i class='icon-gear'></i> and then choose.</p>", "Open the menu and then choose."),
        ("<ul><li><i class='fa'></i> Free shipping</li><li><a id='z'></a>Thirty days</li></ul>", "- Free shipping"),
        ("<table><tr><td><b></b>one word</td><td>two</td></tr></table>", "| one word | two |"),
        ("<div class='highlight'><pre><span></span>$ make install\nok\n</pre></div>", "$ make install\nok"),
    ],
)
def test_the_text_after_an_empty_element_stays(block, expected):
    text, _ = html_to_text(PAGE.format(body=f"{SENTENCES}{block}{SENTENCES}"), "combined")
    assert f"\n{expected}\n" in text


def test_powers_are_written_as_such_and_ordinals_and_references_are_not():
    line = (
        "10<sup>6</sup> cells, 10<sup>−3</sup> m, <i>x</i><sup>2</sup>, 3 km<sup>2</sup>, (a+b)<sup>n</sup>, the "
        "2<sup>nd</sup> and 1<sup>e</sup> of them<sup>3</sup> there<sup><a href='#f'>4</a></sup>."
    )
    text, _ = html_to_text(PAGE.format(body=f"{SENTENCES}<p>{line}</p>{SENTENCES}"), "combined")
    assert "\n10^6 cells, 10^−3 m, x^2, 3 km^2, (a+b)^n, the 2nd and 1e of them3 there4.\n" in text


def test_the_shapes_of_drawings_are_not_elements_that_stay_open():
    icon = "<svg><path d='M1'/><circle r='1'/></svg>"
    body = "".join(f"<p>{icon}Sentence {number} of the article, with a drawing before it.</p>" for number in range(800))
    text, reason = html_to_text(PAGE.format(body=body), "combined")
    assert not reason and text.count("of the article, with a drawing") == 800


def test_a_date_that_stands_alone_is_a_byline():
    text, _ = html_to_text(
        PAGE.format(body=f"<p><time>1 January</time></p><div><time>2 March</time> by A</div>{SENTENCES}"), "combined"
    )
    assert "January" not in text and "March" not in text


@pytest.mark.parametrize(
    ("mark", "is_removed"),
    [
        ("<h2>Walking<a class='headerlink' href='#walking'>¶</a></h2><p>MORE</p>", "¶"),
        ("<h2>Walking<a href='/page#walking'>#</a></h2><p>MORE</p>", "#"),
        ("<h2>History<span class='mw-editsection'>[<a>edit</a>]</span></h2><p>MORE</p>", "edit"),
        ("<pre><span class='lineno'>71 </span>MORE\n<span class='lineno'>72 </span>again</pre>", "71"),
        ("<table><tr><td class='linenos'><pre>71\n72</pre></td><td><pre>MORE\nagain</pre></td></tr></table>", "71"),
        ("<p>MORE</p><p hidden>Nobody reads this line.</p>", "Nobody"),
        ("<p>MORE</p><template><p>Nobody reads this line.</p></template>", "Nobody"),
    ],
)
def test_what_is_no_text_of_a_page_is_removed(mark, is_removed):
    text, _ = html_to_text(PAGE.format(body=f"{SENTENCES}{mark}{SENTENCES}"), "combined")
    assert "MORE" in text and is_removed not in text


@pytest.mark.parametrize(
    "mark",
    [
        "<p>The sign <a href='#sign'>x</a> is 71.</p>",
        "<pre class='line-numbers'>71</pre>",
        "<div role='tabpanel' hidden><pre>yarn add 71</pre></div>",
        "<p hidden='until-found'>The answer is 71.</p>",
        f"<div hidden>{SENTENCES * 4}<p>The answer is 71.</p></div>",
    ],
)
def test_what_only_looks_like_such_a_mark_stays(mark):
    assert "71" in html_to_text(PAGE.format(body=f"{SENTENCES}{mark}{SENTENCES}"), "combined")[0]


def test_lines_of_code_that_are_elements_stay_lines():
    for block in (
        "<pre><ol><li>if a:</li><li>    run(a)</li><li></li><li>stop()</li></ol></pre>",
        "<pre><code><div>if a:</div><div>    run(a)</div>\n<div></div>\n<div>stop()</div>\n</code></pre>",
    ):
        text, _ = html_to_text(PAGE.format(body=f"{SENTENCES}{block}{SENTENCES}"), "combined")
        assert "\nif a:\n    run(a)\n\nstop()\n" in text


def test_a_page_whose_body_holds_its_paragraphs_keeps_its_headings_and_lists():
    one, two, three, four = (prose(seed, 30).strip() for seed in range(1, 5))
    page = f"<html><body><h1>Rules</h1><p>{one}<h2>Two</h2><ul><li>{two}<li>{three}</ul><p>{four}"
    text, _ = html_to_text(page, "combined")
    found = [text.find(part) for part in ("Rules", one, "Two", two, three, four)]
    assert -1 not in found and found == sorted(found)
