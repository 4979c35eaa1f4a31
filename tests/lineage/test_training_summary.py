"""The public summary of training content against a count by hand, and against the template's sections."""

from __future__ import annotations

import re

from infra.home import Home
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.lineage.provenance import release_graph
from tasks.lineage.trace_model import trace_model
from tasks.lineage.training_summary import GAP, _host_of, training_summary
from tests.lineage.toy_release import make_release

SECTIONS = ("1. ", "2. ", "2.1 ", "2.3 ", "2.5 ", "3. ")


def test_an_address_that_is_none_has_no_host():
    stated = {"https://one.example/a": "one.example", "http://[one/": "", "http://\u2100.example/": "", "": ""}
    assert {url: _host_of(url) for url in stated} == stated


def test_the_summary_has_the_templates_sections_and_what_was_trained_on(tmp_path):
    store = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    version = make_release(store).version
    graph = release_graph(read_manifest_graph(store), version)
    lineage = trace_model(graph, version, None)
    text = training_summary(graph, lineage)
    headings = re.findall(r"^#{2,3} (.*)$", text, re.M)
    assert len(headings) == len(SECTIONS)
    assert all(heading.startswith(section) for heading, section in zip(headings, SECTIONS, strict=True))
    assert "less than 1 billion tokens (12 over 1 phases)" in text
    assert "Languages, by bytes of text: en 100.0%" in text and "Types of content, by bytes of text: web 100.0%" in text
    sections = dict(zip(headings, re.split(r"^#{2,3} .*$", text, flags=re.M)[1:], strict=True))
    given, crawled, made = (
        next(body for name, body in sections.items() if name[:3] == n) for n in ("2.1", "2.3", "2.5")
    )
    assert "| a.jsonl | CC0-1.0 | 3 | 12 |" in given
    assert (
        "Domain names with the most text, the first 1 of 2:\n\n- one.example: 14 bytes" in crawled
        and "two.example" not in text
    )
    assert "None." in made and "near_duplicate 1" in text
    assert GAP in sections[headings[0]] and GAP in given, "what only a provider knows is marked"
