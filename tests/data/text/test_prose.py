"""The prose of a text: what is code, a formula or a wrapped line; good technical text passes full's bounds, bad text
does not."""

from __future__ import annotations

import gzip
import json
import textwrap
import time
import unicodedata

import pytest

from configs.load import load_scale
from tasks.data.filtering.heuristics import flat_bounds, name_reasons
from tasks.data.records.documents import cut_pieces
from tasks.data.scoring.document_scores import LanguageModelFiles, Scorers, _scores
from tasks.data.scoring.language_id import identify_languages
from tasks.data.text.prose_text import prose_of
from tests.support.data_inputs import SHARED_DATA, prose

FULL = flat_bounds(load_scale("full").data.recipe.filter.heuristics)


def visible(text: str) -> str:
    return " ".join(prose_of(text).text.split())


CODE = {
    "fence": ("Run it:\n\n```js\nconst a = {b: 1};\n```\n\nThen stop.", "Run it: Then stop."),
    "fence in a fence": ("Write\n\n````\n```\n{x}\n```\n````\n\nso.", "Write so."),
    "open fence": ("Run it:\n\n```js\nThe rest is words.", "Run it: ```js The rest is words."),
    "tildes in a quotation": ("> ~~~\n> {x: 1}\n> ~~~\nEnd.", "End."),
    "literal block": ("Call it so::\n\n    f({1: 2})\n\n    g()\n\nIt ends.", "Call it so:: It ends."),
    "directive": (".. code-block:: python\n   :linenos:\n\n   x = {}\n\nIt ends.", "It ends."),
    "note": (".. note:: This is prose.\n\n   So is this.", "This is prose. So is this."),
    "doctest": ("Try:\n\n>>> a = {1}\n>>> a\n{1}\n\nIt ends.", "Try: It ends."),
    "statements": (
        "It reads\nimport os\n\nfor name in os.listdir('.'):\n    print(name)\nand it ends here.",
        "It reads and it ends here.",
    ),
    "prose between statements": ("a = load()\nwe look at it for a while and then go on\nb.f();", None),
    "semicolons of prose": ("First, the nation grows;\nsecond, the budget (of 1960) balances;\nthird, it ends.", None),
    "inline code": ("Use `a{b}` and ``c `d` e`` here.", "Use and here."),
    "quotation marks": ("He said `so' and `no' to that.", None),
    "tags": ('<Intro>\n\nA page <b class="x">with</b> tags {/*x*/}\n\n</Intro>', "A page with tags"),
    "anchor and link": ("## Title here {#title}\n\nSee [the guide](/learn/x-y).", "Title here See [the guide] ."),
    "drawing": ("A circle:\n\n[asy]\ndraw((0,0)--(1,1));\n[/asy]\n\nIts area.", "A circle: Its area."),
}


@pytest.mark.parametrize("name", CODE)
def test_code_and_markup_are_no_prose(name):
    text, expected = CODE[name]
    assert visible(text) == (" ".join(text.split()) if expected is None else expected)


FORMULAS = {
    "Let $a_{n} = \\frac{1}{2}$ be": 1,
    "It is \\(x^2\\), then": 1,
    "so that\n\n\\[ x = 1 \\]\n\nholds": 1,
    "$$\\sum_i x_i$$": 1,
    "\\begin{align*} a &= b \\\\ c &= d \\end{align*}": 1,
    "undelimited \\frac{a}{b} and x^{2}": 2,
    "{\\displaystyle x^{2}+y} is": 1,
    "He sold 48/2 = <<48/2=24>>24 clips": 1,
    "costs $\\$5$ each": 1,
    "if x + 3 = 5, then": 1,
    "from $5 to $10 a piece": 0,
    "between $3 and $4, or $5.": 0,
    "C:\\Users\\name\\file": 0,
    "1939 - 1945": 0,
    "- 3 apples": 0,
    "a price of $5": 0,
    "this is \\[ not closed": 0,
    "and/or him/her": 0,
}


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_become_words_and_prices_paths_and_years_stay(text):
    prose = prose_of(text)
    assert prose.text.count("“") == FORMULAS[text] and (prose.num_formula_words > 0) == (FORMULAS[text] > 0)
    assert FORMULAS[text] or prose.text.split() == text.split()


def test_equal_formulas_are_equal_words_and_others_are_not():
    one, two, three = (
        prose_of(text).text for text in ("$a^2$", "\\(a^2\\)".replace("\\(", "$").replace("\\)", "$"), "$b^2$")
    )
    assert one == two != three


PARAGRAPHS = {
    "en": " ".join(prose(1, 90).split()),
    "de": "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett verwandelt. " * 4,
    "ru": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 5,
}


@pytest.mark.parametrize("width", [50, 72, 100])
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_wrapped_paragraphs_are_one_line_again(language, width):
    whole = [" ".join(PARAGRAPHS[language].split()), " ".join(PARAGRAPHS[language].split()[::-1])]
    wrapped = "\n\n".join(
        textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False) for paragraph in whole
    )
    assert prose_of(wrapped).text.split("\n\n") == whole


def test_wrapped_chinese_is_one_line_again():
    whole = "委员会星期四开会，决定在年底之前开放新的大桥，并且请所有的市民一起来参加这个盛大的仪式。" * 4
    wrapped = "\n".join(whole[start : start + 30] for start in range(0, len(whole), 30))
    assert prose_of(wrapped).text.replace(" ", "") == whole


KEPT_LINES = {
    "verse": "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
    "Rough winds do shake the darling buds of May,\nAnd summer's lease hath all too short a date;",
    "navigation": "Home\nAbout us\nProducts and services\nContact\nTerms of use of this web site\nPrivacy",
    "list": "- one item that is as long as a line of prose may be here\n- two item that is as long as a line of prose "
    "may be here",
    "long lines": "\n".join([prose(2, 40).strip().replace("\n", " ")] * 2),
}


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("vi", "Người dân ở đây sống chủ yếu bằng nghề nông. Các làng của họ đẹp và là nơi được nhiều khách đến thăm."),
        ("ko", "이 나라의 수도는 서울이며 많은 사람들이 그 도시에서 살고 있다. 한국의 역사는 길고 이어진다."),
    ],
)
def test_decomposed_letters_are_those_of_stop_words(language, text):
    bounds = FULL | {"min_words": 1, "min_sentences": 1, "max_short_line_share": 1.0}
    texts = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    assert name_reasons(texts, [language] * 2, ["web"] * 2, bounds) == ["", ""]


@pytest.mark.parametrize("name", KEPT_LINES)
def test_lines_that_were_not_wrapped_stay(name):
    assert prose_of(KEPT_LINES[name]).text == KEPT_LINES[name]


def test_no_text_takes_time_that_grows_with_its_square():
    opened = [
        "```a\n",
        "<pre>",
        "<!--",
        "`a ",
        "$a ",
        "$$ ",
        "\\[ ",
        "\\a{",
        "a_{",
        "1 + ",
        "a=",
        "::\n",
        "<a ",
        "[a](b",
        "f(;\n",
        "{",
        "#",
    ]
    for mark in opened:
        started = time.process_time()
        prose_of(mark * (100_000 // len(mark)))
        assert time.process_time() - started < 3, mark


PAGE = """---
title: State
---

<Intro>

A component often has to remember what somebody typed. In the library that memory is called state, and this page shows how it is declared.

</Intro>

## Declare it {/*declare-it*/}

Call `useState` at the top of your component. It gives you the value and a function that changes it, and you may name both as you like.

```js
function Counter() {
  const [count, setCount] = useState(0);
  return <button onClick={() => setCount(count + 1)}>{count}</button>;
}
```

* [`useState`](/reference/useState) declares a variable that you can change at once.
* [`useReducer`](/reference/useReducer) declares one whose changes are described by a function of its own.

The dictionary literal {1: 2} in a sentence does not make the page a program, and neither do the braces of the next example.

```js
export default { name: 'Counter' };
```
"""  # noqa: E501
PROPOSAL = """PEP: 9999
Title: A new literal

Abstract
========

This proposal adds a literal for ordered mappings.  It is read from
left to right, and what comes first stays first, which the present
syntax does not promise in every implementation of the language.

Rationale
=========

Programs that write configuration files need an order that people can
predict.  Today they build a list of pairs and convert it::

    pairs = [("b", 1), ("a", 2)]
    config = {key: value for key, value in pairs}

That is longer than what it says, and it is easy to forget one of the
brackets.  The new literal is shorter, and it is the same in all of
the implementations that were asked about it.
"""
PROOF = """Let $p$ be a prime with $p \\equiv 1 \\pmod{4}$. We show that $p = a^2 + b^2$ for some integers $a$ and $b$.

Since $-1$ is a square modulo $p$, there is an $x$ with $x^2 \\equiv -1 \\pmod{p}$. Consider all numbers of the form $u + xv$, where
$0 \\le u, v < \\sqrt{p}$. There are more than $p$ pairs, so two of them give the same residue:
\\[ u_1 + x v_1 \\equiv u_2 + x v_2 \\pmod{p}. \\]
With $a = u_1 - u_2$ and $b = v_1 - v_2$ we have $a^2 \\equiv -b^2$, and hence $p$ divides $a^2 + b^2$, which is less than $2p$."""  # noqa: E501
PROBLEM = "Compute $\\dbinom{8}{4}$.\n\n$\\dbinom{8}{4} = \\frac{8!}{4!4!} = \\boxed{70}.$"
STORY = (
    "Anna sold 48 clips to her friends in April, and then she sold half as many in May. How many clips did she sell "
    "altogether?\n"
    "Anna sold 48/2 = <<48/2=24>>24 clips in May.\nAnna sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"
)
BOOK = "\n\n".join(
    textwrap.fill("Er sah, dass es die Frau mit der Lampe war, die nicht zu den anderen in das Haus ging. " * 6, 68)
    for _ in "a"
)
BOOK += "\n\n" + textwrap.fill(
    "Der Weg war lang und die Nacht war kalt, aber mit dem Licht in der Hand ist das nicht so schlimm. " * 2, 68
)
GOOD = {
    "documentation": (PAGE, "en", "web"),
    "reStructuredText": (PROPOSAL, "en", "web"),
    "a proof": (PROOF, "en", "math"),
    "a proof on a page": (PROOF, "en", "web"),
    "a short problem": (PROBLEM, "en", "math"),
    "a story with arithmetic": (STORY, "en", "math"),
    "a small file": ("from .core import run\n", "", "code"),
    "a one-line commit": ("Fix a typo", "", "commit"),
}
LOOP = "The answer to the question is that the value of $x$ is 3. " * 12
LINKS = "\n".join(f"* [The Page of Number {name}](/pages/{name})" for name in prose(7, 60).split())
GIBBERISH = " ".join(f"{word} ${word}^2$" for word in prose(8, 80).replace(".", "").split())
NUMBERS = "Table of values\n" + " ".join(str(number) for number in range(1000, 1120))
NOTICE = (
    "We use cookies to be of help to you. Read our privacy policy.\n"
    + "By the terms of use that is agreed to.\n"
    + PROBLEM
)
BARE_CODE = "The program:\n\n" + "\n".join(
    f"var a{number} = function() {{ return b[{number}]; }};" for number in range(90)
)
BAD = {
    "a loop": (LOOP, "en", "math", {"frequent_2gram", "frequent_3gram", "frequent_4gram", "repeated_5grams"}),
    "links, mathematics": (LINKS, "en", "math", {"too_many_bullet_lines"}),
    "links": (LINKS, "en", "web", {"too_many_bullet_lines"}),
    "gibberish": (GIBBERISH, "en", "math", {"too_few_stop_words"}),
    "numbers": (NUMBERS, "en", "math", {"too_few_alphabetic_words"}),
    "notices": (NOTICE, "en", "math", {"policy_lines"}),
    "two words": ("Solve $x$", "en", "math", {"too_few_words"}),
    "repeated lines": ((PROOF + "\n") * 2, "en", "math", {"repeated_lines", "repeated_line_characters"}),
    "a short page": (STORY.split("?")[0], "en", "web", {"too_few_words"}),
    "a script": (BARE_CODE, "en", "web", {"too_few_words"}),
    "a script, repeated": (PAGE.split("```")[0] * 3, "en", "web", {"repeated_lines", "repeated_line_characters"}),
    "lorem ipsum": (PAGE + "Lorem ipsum dolor sit amet.", "en", "web", {"lorem_ipsum"}),
    "nothing": ("...", "", "code", {"too_few_words"}),
}


@pytest.mark.parametrize("name", GOOD)
def test_technical_text_passes_the_bounds_of_full(name):
    text, language, domain = GOOD[name]
    assert name_reasons([text], [language], [domain], FULL) == [""]


@pytest.mark.parametrize("name", BAD)
def test_bad_text_of_the_same_domains_does_not(name):
    text, language, domain, reasons = BAD[name]
    assert name_reasons([text], [language], [domain], FULL)[0] in reasons


KEPT_SHARES = {
    "text/peps": ("text", "web", 0.9),
    "text/gutenberg_en": ("text", "web", 0.95),
    "multilingual/gutenberg_de_fr_es": ("text", "web", 0.95),
    "text/wikipedia_plain_sample": ("text", "web", 0.8),
    "multilingual/react_docs": ("text", "web", 0.8),
    "text/rust_book": ("text", "web", 0.9),
    "math/math_with_solutions": ("problem solution", "math", 0.95),
    "math/math_train_answers": ("problem", "math", 0.85),
    "math/gsm8k_train": ("question answer", "math", 0.9),
    "math/aime_1983_2023": ("problem solution", "math", 0.95),
    "code/python_repos": ("content", "code", 0.98),
    "text/us_presidential_speeches": ("text", "web", 0.95),
}


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("name", KEPT_SHARES)
def test_good_text_is_kept_at_the_bounds_of_full(name):
    """At most 60 documents of each; where no other is meant, a document here is what people wrote and edited."""
    fields, domain, least = KEPT_SHARES[name]
    with gzip.open(SHARED_DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    chosen = records[:: max(len(records) // 60, 1)]
    texts = [cut_pieces("\n".join(record[field] for field in fields.split()), 100_000)[0][1] for record in chosen]
    languages, _ = identify_languages([prose_of(text).natural for text in texts], 2000, "")
    reasons = name_reasons(texts, languages, [domain] * len(texts), FULL)
    assert reasons.count("") >= least * len(texts), reasons


def test_the_language_of_documentation_and_mathematics_is_that_of_its_prose():
    """Of React's pages in five languages, 13 to 69 % were uncertain by their code."""
    code = (
        "\n```js\n"
        + "\n".join(f"const [value{n}, setValue{n}] = useState(getInitialValue({n}));" for n in range(12))
        + "\n```\n"
    )
    page = (
        f"Le comité s'est réuni jeudi.{code}Il a décidé que le nouveau pont devait être ouvert avant la fin de l'année."
    )
    texts = [page, "Find $\\frac{x}{y}$ and $x^2$ if $y=3$."]
    scores = _scores(texts, Scorers(2000, "", (), LanguageModelFiles(3, {})))
    assert scores["language"] == ["fr", "en"] and min(scores["language_score"]) > 0.8
    _, with_code = identify_languages(texts, 2000, "")
    assert max(with_code) < 0.7
