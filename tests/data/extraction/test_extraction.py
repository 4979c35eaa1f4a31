"""What extraction makes of records: each markup, each reason, each bound on both of its sides."""

from __future__ import annotations

import bz2
import gzip
import json
from typing import Any
from xml.etree import ElementTree

import pytest
import trafilatura

from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.extraction.html_text import BROKEN, EXTRACTORS, NO_CONTENT, TOO_LARGE, html_to_text
from tasks.data.extraction.page_bounds import MAX_DEPTH, MAX_PARAGRAPH_PAIRS, MAX_TAGS
from tasks.data.extraction.plain_text import EMPTY, REDIRECT, TOO_SHORT, record_text
from tasks.data.extraction.wikitext import wikitext_to_text
from tasks.data.records.documents import HTML, PLAIN, WIKITEXT
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import RECIPE, RESOURCES, SHARED_DATA, compute, in_partitions, prose, rows
from tests.support.document_tables import document_row, documents_artifact

SENTENCES = "<p>" + "Sentences that belong to the article itself, with commas, and more of them. " * 6 + "</p>"
PAGE = (
    "<html><head><title>T</title></head><body><nav><ul><li><a href='/'>Home</a><li><a href='/a'>About</a></ul></nav>"
    "<article><h1>Heading</h1>{body}</article><footer>Imprint and cookies</footer></body></html>"
)
BOUNDS: dict[str, Any] = {"html_extractor": "combined", "max_markup_chars": 100_000, "min_chars": 40}


def test_long_documents_become_pieces_that_join_to_the_text(tmp_path):
    (tmp_path / "data").mkdir()
    text = "\n\n".join(prose(seed) for seed in range(40))
    (tmp_path / "data" / "book.txt").write_text(text)
    sources = list_sources(tmp_path / "data")
    records = compute(ingest_documents, tmp_path / "home", sources=sources, recipe=RECIPE.ingest, resources=RESOURCES)
    recipe = RECIPE.extract.model_copy(update={"max_document_chars": 2000})
    result = compute(extract_documents, tmp_path / "home", records=records, recipe=recipe, resources=RESOURCES)
    pieces = sorted(rows(result, "documents/*.parquet"), key=lambda row: row["piece"])
    assert len(pieces) > 10 and "".join(row["text"] for row in pieces) == text
    assert all(text[row["piece"] : row["piece"] + row["num_chars"]] == row["text"] for row in pieces)


@pytest.mark.parametrize("extractor", sorted(EXTRACTORS))
def test_every_extractor_finds_the_article_and_leaves_the_frame(extractor):
    text, reason = html_to_text(PAGE.format(body=SENTENCES + f"<p>{prose(1)}</p>"), extractor)
    assert reason == "" and text.count("belong to the article") == 6 and prose(1)[:200] in text
    assert "cookies" not in text and "About" not in text


def test_a_page_whose_content_is_for_readers_without_scripts_has_its_text():
    page = f"<html><body><div id='app'></div><noscript>{SENTENCES}</noscript></body></html>"
    text, reason = html_to_text(page, "combined")
    assert reason == "" and text.count("belong to the article") == 6


def test_lines_of_plain_text_end_as_unix_ends_them():
    for end in ("\r\n", "\r"):
        given = f"One.{end}{end}Two.{end}"
        assert record_text(given, "text", "combined", 100, 1) == ("One.\n\nTwo.\n", ""), end


def test_code_blocks_keep_their_lines():
    code = "def f(x):\n    return x + 1\n\n\nprint(f(2))"
    marked = code.replace("def", "<span class='k'>def</span>").replace("print", "<span>print</span>")
    text, _ = html_to_text(PAGE.format(body=f"{SENTENCES}<pre><code>{marked}\n</code></pre>{SENTENCES}"), "combined")
    assert code.replace("\n\n\n", "\n\n") in text


@pytest.mark.parametrize(
    ("text", "markup", "reason"),
    [
        (PAGE.format(body=SENTENCES), HTML, ""),
        (PAGE.format(body="<p>Too little.</p>"), HTML, TOO_SHORT),
        ("<html><body><script>x</script></body></html>", HTML, NO_CONTENT),
        ("\x01\x02\x03" * 40, HTML, NO_CONTENT),
        ("<!-- " + "never closed " * 40, HTML, NO_CONTENT),
        (PAGE.format(body=SENTENCES + "x" * 100_000), HTML, TOO_LARGE),
        (PAGE.format(body="<div>" * 200 + SENTENCES + "<b>x</b>" * 1500), HTML, ""),
        (PAGE.format(body="<div>" * (MAX_DEPTH + 10) + SENTENCES + "<b>x</b>" * 1500), HTML, TOO_LARGE),
        (PAGE.format(body=f"<img {' '.join(f'a{n}=1' for n in range(5000))}>" + SENTENCES), HTML, TOO_LARGE),
        ("#REDIRECT [[Elsewhere]]", WIKITEXT, REDIRECT),
        ("#WEITERLEITUNG [[Anderswo]] {{x}}", WIKITEXT, REDIRECT),
        ("{{stub}} [[Category:Short]]", WIKITEXT, NO_CONTENT),
        ("'''Word''' is too short.", WIKITEXT, TOO_SHORT),
        ("Plain < text & all.", PLAIN, ""),
        (" \n ", PLAIN, EMPTY),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_every_reason_has_a_page(text, markup, reason):
    plain, given_reason = record_text(text, markup, **BOUNDS)
    assert given_reason == reason and bool(plain) == (reason == "")
    if markup == PLAIN and not reason:
        assert plain == text


def test_a_text_that_is_far_less_than_the_page_has_is_not_taken():
    """Trafilatura's precise mode takes a short article for the page; what follows it in plain divisions is most of the
    text."""
    body = "".join(f"<div class='c{seed}'>{prose(seed)}</div>" for seed in range(2, 12))
    page = f"<html><body><article><p>{prose(1)}</p><p>{prose(0)}</p></article><div id='more'>{body}</div></body></html>"
    precise = trafilatura.extract(page, fast=True, include_comments=False, favor_precision=True) or ""
    assert prose(5)[:200] not in precise and prose(5)[:200] in html_to_text(page, "combined")[0]


@pytest.mark.parametrize("num_comments", [20, 60])
def test_comments_after_an_article_are_not_its_missing_part(num_comments):
    """No name marks them as comments, and they are most of the page."""
    article = "".join(f"<p>{prose(seed)}</p>" for seed in range(4))
    voices = "".join(
        f"<div class='v'><b>guest{seed}</b><div><p>{prose(100 + seed)}</p></div></div>" for seed in range(num_comments)
    )
    page = f"<html><body><article><h1>Heading</h1>{article}</article><div id='voices'>{voices}</div></body></html>"
    assert prose(105)[:40] in html_to_text(page, "resiliparse")[0]
    text, reason = html_to_text(page, "combined")
    assert reason == "" and all(prose(seed)[:200] in text for seed in range(4)) and prose(105)[:40] not in text


@pytest.mark.parametrize("tags", [2000, 4000])
def test_a_paragraph_of_very_many_tags_is_left_to_the_library_that_is_linear_in_them(tags):
    page = PAGE.format(body=SENTENCES + "<p>" + "<span>word</span> " * tags + "</p>")
    text, reason = html_to_text(page, "combined")
    assert reason == "" and text.count("word") == tags
    assert (text == html_to_text(page, "resiliparse")[0]) == (tags**2 > MAX_PARAGRAPH_PAIRS)


def test_removing_early_what_trafilatura_removes_later_changes_no_text():
    path = SHARED_DATA / "html" / "article_extraction.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not at hand: no shared data")
    kept = 0
    for line in gzip.decompress(path.read_bytes()).splitlines()[:20]:
        page = json.loads(line)["html"]
        precise = trafilatura.extract(page, fast=True, include_comments=False, favor_precision=True) or ""
        text = html_to_text(page, "combined")[0]
        kept += text.split() == precise.split()
        assert text.split() == precise.split() or text in [
            html_to_text(page, name)[0] for name in EXTRACTORS if name != "combined"
        ]
    assert kept >= 15


def test_too_many_tags_and_what_libraries_raise_are_reasons(monkeypatch):
    assert html_to_text("<b>" * (MAX_TAGS + 1), "trafilatura") == ("", TOO_LARGE)
    deep = [
        PAGE.format(body="<div>" * depth + SENTENCES + "<b>x</b>" * 1500) for depth in (MAX_DEPTH - 10, MAX_DEPTH + 10)
    ]
    assert [html_to_text(page, "resiliparse")[1] for page in deep] == ["", TOO_LARGE]
    assert html_to_text("<b>" * (MAX_TAGS // 1000) + SENTENCES, "resiliparse")[1] == ""

    def raises(markup: str) -> str:
        raise RecursionError(markup)

    monkeypatch.setitem(EXTRACTORS, "combined", raises)
    assert html_to_text(PAGE.format(body=SENTENCES), "combined") == ("", BROKEN)


def test_wikitext_keeps_prose_headings_lists_formulas_and_drops_the_rest():
    markup = (
        "{{Infobox|name={{PAGENAME}}|x={{y}}}}\n[[File:A.jpg|thumb|A [[caption]] with {{x}}]]\n"
        "'''Albedo''' ({{IPAc-en|æ}}; born {{circa}}) is ''the'' [[Reflection (physics)|reflected]] [[light]]s of "
        "{{convert|5|km|mi}}."
        "<ref name=a>Some {{cite|book}}</ref><ref name=a /> See [http://example.org the page] and "
        "[http://example.org].<!-- hidden -->\n"
        "{| class=x\n| cell || {{y}}\n|-\n| [[z]]\n|}\n== History ==\n=== Early ===\nIt &amp; more.\n* one\n** two\n# "
        "three\n:indented\n"
        "<math>a_{1}^{{2}}</math> and <nowiki>[[raw]]</nowiki>\n<pre>\nx = [[1]]\n  y\n</pre>\n== References "
        "==\n{{reflist}}\n"
        "[[Category:Light]]\n[[de:Albedo]]\n__NOTOC__"
    )
    assert wikitext_to_text(markup) == (
        "Albedo (born ) is the reflected lights of 5 km. See the page and .\n\nHistory\n\nEarly\n\n"
        "It & more.\n- one\n  - two\n- three\nindented\n$a_{1}^{{2}}$ and [[raw]]\n\nx = [[1]]\n  y"
    )


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (
            "1990{{ndash}}1995, 5{{nbsp}}km; here{{snd}}there; ''Foo''{{'s}} end",
            "1990–1995, 5 km; here – there; Foo's end",
        ),
        ("{{Blockquote|text=Four score|sign=L}} {{quote|1=a=b}}", "Four score a=b"),
        (
            "{{convert|6|ft|2|in|m}}, {{convert|5|to|6|km|mi}}, {{cvt|100|km|mi|0}}, {{convert}}",
            "6 ft 2 in, 5 to 6 km, 100 km,",
        ),
        ("{{As of|2011}}, {{circa|1900}}", "As of 2011, c. 1900"),
        (
            "{{langx|fr|Bonjour}}, {{frac|1|2}}, {{frac|2|1|2}}, {{val|1.5|u=kg}}, {{formatnum:123}}",
            "Bonjour, 1/2, 2 1/2, 1.5 kg, 123",
        ),
        ("-{zh-hans:软件;zh-hant:軟體}- -{T}- -{A|zh-cn:甲;zh-tw:乙}-", "软件 T 甲"),
        (
            "10<sup>6</sup> ''y''<sup>3</sup> km<sup>2</sup> 10{{sup|6}}, 2{{sup|nd}} 2<sup>nd</sup> there<sup>3</sup>",
            "10^6 y^3 km^2 10^6, 2nd 2nd there3",
        ),
        ("<nowiki>2<sup>3</sup></nowiki>", "2<sup>3</sup>"),
    ],
)
def test_templates_that_stand_for_a_part_of_a_sentence_are_read(markup, text):
    assert wikitext_to_text(markup) == text


@pytest.mark.parametrize(
    "markup",
    [
        "a {{ b [[ c",
        "a }} b ]] c",
        "{| a\n b",
        "[[" * 5000 + "a",
        "{{" * 5000 + "a",
        "<pre>" * 5000 + "a",
        "<ref>a",
        "]" * 5000,
        "a <!-- b",
    ],
)
def test_unbalanced_wikitext_never_raises_and_keeps_what_is_outside(markup):
    text = wikitext_to_text(f"Before.\n\n{markup}")
    assert text.startswith("Before.")


def test_pages_of_a_dump_become_prose_without_markup():
    path = SHARED_DATA / "text" / "enwiki_sample_pages_articles.xml.bz2"
    if not path.exists():
        pytest.skip(f"{path.name} is not at hand: no shared data")
    namespace = "{http://www.mediawiki.org/xml/export-0.10/}"
    with bz2.open(path) as dump:
        pages = {
            str(page.findtext(f"{namespace}title")): page.findtext(f"{namespace}revision/{namespace}text") or ""
            for page in ElementTree.parse(dump).getroot().iter(f"{namespace}page")
        }
    extracted = {
        title: record_text(text, WIKITEXT, **BOUNDS | {"max_markup_chars": 10**7}) for title, text in pages.items()
    }
    reasons = [reason for _, reason in extracted.values()]
    assert reasons.count(REDIRECT) == 100 and reasons.count("") >= 100
    assert (
        "Anarchism is a political philosophy that advocates self-governed societies based on"
        in extracted["Anarchism"][0]
    )
    for title, (text, _) in extracted.items():
        prose_only = "".join(text.split("$")[::2])
        assert not [mark for mark in ("[[", "{|", "<ref", "'''", "\x00", "Category:") if mark in prose_only], title


def test_f1_on_hand_marked_articles_is_what_the_choice_was_made_by():
    path = SHARED_DATA / "html" / "article_extraction.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not at hand: no shared data")
    from benchmarks.data.extraction import token_f1

    pages = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[:12]]
    scores = [token_f1(page["article_body"], html_to_text(page["html"], "combined")[0])[0] for page in pages]
    assert sum(scores) / len(scores) > 0.95


def test_the_step_counts_every_record_and_stops_where_too_many_fail(tmp_path):
    good = [(PAGE.format(body=SENTENCES + f"<p>{prose(seed)}</p>"), HTML) for seed in range(16)]
    bad = [("<html><body></body></html>", HTML)] * 4
    pages = [
        document_row(text, number, markup=markup)
        for number, (text, markup) in enumerate([*good, *bad, (prose(99), PLAIN)])
    ]
    records = documents_artifact(pages, tmp_path / "records.parquet")
    recipe = RECIPE.extract.model_copy(update={"max_failed_share": 0.2})
    results = [
        compute(
            extract_documents, tmp_path / str(parts), records=records, recipe=recipe, resources=in_partitions(parts)
        )
        for parts in (1, 3)
    ]
    assert results[0].digest == results[1].digest
    assert results[0].record.num_records == 17 and results[0].record.dropped == {NO_CONTENT: 4}
    with pytest.raises(
        ValueError,
        match=r"4 of 20 pages gave no text.*max_failed_share \(0.19\).*pages.warc at byte \d+ \(no_main_content\)",
    ):
        strict = recipe.model_copy(update={"max_failed_share": 0.19})
        compute(extract_documents, tmp_path / "strict", records=records, recipe=strict, resources=RESOURCES)
