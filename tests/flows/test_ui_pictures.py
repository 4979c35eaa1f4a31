"""Artifacts of Prefect's UI: their keys stay the same from run to run, and their pictures are whole SVG files."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import load_scale
from flows.show import ui_artifacts
from flows.show.say_left_out import say_unread
from flows.show.show_run import show_data, show_phases
from infra.home import Home
from infra.storage.open_store import open_store
from tests.support.report_fakes import STEPS, reported_phases
from tests.support.reported_data import reported_data

RUN: Any = SimpleNamespace(scale=SimpleNamespace(scale="toy"))


@pytest.fixture
def shown(monkeypatch):
    """What is written, by key."""
    artifacts: dict[str, Any] = {}
    monkeypatch.setattr(
        ui_artifacts, "create_table_artifact", lambda table, key, description: artifacts.update({key: table})
    )
    monkeypatch.setattr(
        ui_artifacts, "create_markdown_artifact", lambda markdown, key, description: artifacts.update({key: markdown})
    )
    return artifacts


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(None, Home(tmp_path_factory.mktemp("pictures")))


def drawn(markdown: str) -> list[str]:
    """Texts of the picture in a Markdown artifact."""
    encoded = re.fullmatch(r"!\[[^]]*\]\(data:image/svg\+xml;base64,([^)]*)\)", markdown)
    assert encoded is not None
    root = ElementTree.fromstring(base64.b64decode(encoded[1]))
    return [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_funnel_is_a_table_and_a_picture(shown, store):
    data = reported_data(store)
    show_data(RUN, data)
    assert set(shown) == {"toy-data", "toy-funnel"}
    texts = drawn(shown["toy-funnel"])
    assert "deduplicate" in texts and f"{data.ingested.record.num_documents:,}" in texts


def test_a_run_says_which_data_nothing_trains_on(store, monkeypatch):
    scale, data, said = load_scale("micro").model_copy(update={"scale": "toy"}), reported_data(store), list[str]()
    amounts = data.documents.shards.record.tokens_by_domain
    monkeypatch.setitem(amounts, "medical", 700)
    monkeypatch.setitem(amounts, "issue", 0)
    run: Any = SimpleNamespace(scale=scale, log=SimpleNamespace(say=said.append))
    say_unread(run, data)
    left_out, unread, unasked = said
    assert left_out.startswith("5 of ") and "ingest.max_source_bytes (1,200,000)" in left_out
    assert "no phase of scale toy reads the 700 tokens of documents of domain medical" in unread
    assert "the 20 prompts of domain math" in unasked, "micro's policy asks only synthetic ones"

    said.clear()
    run.scale = scale.model_copy(update={"phases": scale.phases[:1]})
    monkeypatch.setattr("tasks.unread_data._num_preference_files", lambda prepared: 2)
    say_unread(run, data)
    assert "reads the 285 conversations: give chat a share" in said[-2]
    assert "reads the 2 files of role preference: add a phase with objective dpo or reward" in said[-1]


def test_expert_load_and_answers_of_all_phases_are_shown(shown, store):
    data, phases = reported_data(store), reported_phases(store, tuple(STEPS))
    show_phases(RUN, data, phases)
    assert set(shown) == {"toy-expert-load", "toy-answers"}
    assert "layer 1" in drawn(shown["toy-expert-load"])
    first = shown["toy-answers"][0]
    assert next(iter(first)) == "question" and f"after {phases.last.name}" in first
    assert re.search(r"\(\d of \d right\)$", first[f"after {phases.last.name}"])


def test_phases_without_experts_in_their_log_have_no_picture_of_them(shown, store, monkeypatch):
    monkeypatch.setattr("tasks.report.report_training.LOAD", "no_such_metric_")
    show_phases(RUN, reported_data(store), reported_phases(store, tuple(STEPS)))
    assert set(shown) == {"toy-answers"}
