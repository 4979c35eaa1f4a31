"""What ingestion reads, refuses and names."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tasks.data.documents import document_id
from tasks.data.ingest_documents import ingest_documents, sampling_bounds
from tasks.data.list_sources import list_sources
from tests.data_inputs import RECIPE, RESOURCES, SHARED_DATA, compute, in_partitions, prose, rows, write_jsonl

INGEST = RECIPE.ingest.model_copy(update={"max_source_bytes": 10**9})
LENIENT = INGEST.model_copy(update={"max_rejected_share": 1.0})


WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en">
  <siteinfo><base>https://en.wikipedia.org/wiki/Main_Page</base></siteinfo>
  <page><title>A &amp; B</title><ns>0</ns><id>1</id><revision><id>9</id><timestamp>2024-01-01T00:00:00Z</timestamp>
    <contributor><username>x</username><id>7</id></contributor><text>An ''article'' &lt;b&gt;.</text></revision></page>
  <page><title>Old name</title><ns>0</ns><id>2</id><redirect title="A &amp; B" /><revision><text>#REDIRECT [[A]]</text></revision></page>
  <page><title>Talk:A</title><ns>1</ns><id>3</id><revision><text>Talk.</text></revision></page>
</mediawiki>
"""


def ingest(directory: Path, root: Path, recipe=INGEST, resources=RESOURCES):
    return compute(ingest_documents, root, sources=list_sources(directory), recipe=recipe, resources=resources)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Every format, in one directory with roles."""
    directory = tmp_path_factory.mktemp("mixed")
    write_jsonl(directory / "a.jsonl", [{"text": "first", "url": "u1", "license": "MIT"}, {"text": "second", "lang": "fr"}])
    write_jsonl(directory / "b.jsonl.gz", [{"body": "zipped line"}])
    write_jsonl(directory / "commits.jsonl.gz", [{"message": "Fix", "patch": "- a\n+ b", "repo": "x/y", "commit": "c0ffee"}])
    write_jsonl(directory / "files.jsonl.gz", [{"repo": "x/y", "commit": "c0ffee", "path": "m.py", "content": "print(1)\n"}])
    write_jsonl(directory / "bench.jsonl", [{"question": "How many?", "choices": ["one", "two"], "answer": 1, "meta": {"subject": "s"}}])
    (directory / "t.txt").write_text("\ufeffplain text\n")
    (directory / "t2.txt.gz").write_bytes(gzip.compress(b"zipped text"))
    with zipfile.ZipFile(directory / "many.zip", "w") as archive:
        archive.writestr("x/eins.txt", "Alle Menschen")
        archive.writestr("x/deux.txt", "Tous les êtres")
    (directory / "wiki.xml.bz2").write_bytes(bz2.compress(WIKI.encode()))
    (directory / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n"
        "  - {files: bench.jsonl, role: evaluation}\n"
        "  - {files: b.jsonl.gz, role: pretrain, text: body}\n"
        "  - {files: commits.jsonl.gz, role: pretrain, domain: code, format: commits, text: [message, patch]}\n"
        "  - {files: files.jsonl.gz, role: pretrain, domain: code, format: repository_files}\n"
        "  - {files: many.zip, role: pretrain, domain: multilingual, format: zip_text}\n"
        "  - {files: wiki.xml.bz2, role: pretrain, format: mediawiki}\n"
        "  - {files: '*', role: pretrain, lang: en, licence: CC0}\n"
    )
    return directory


def test_every_format_is_read_with_its_place_url_licence_and_language(mixed, tmp_path):
    result = ingest(mixed, tmp_path)
    found = {row["text"]: row for row in rows(result, "documents/*.parquet")}
    assert set(found) == {
        "first", "second", "zipped line", "Fix\n\n- a\n+ b", "print(1)\n", "plain text\n", "zipped text", "Alle Menschen", "Tous les êtres",
        "An ''article'' <b>.",
    }  # fmt: skip
    first, second = found["first"], found["second"]
    assert (first["url"], first["licence"], first["lang"]) == ("u1", "MIT", "en")
    assert (second["licence"], second["lang"]) == ("CC0", "fr")
    with open(mixed / "a.jsonl", "rb") as file:
        file.seek(second["offset"])
        assert json.loads(file.readline())["text"] == "second"
    assert found["print(1)\n"]["url"] == "https://github.com/x/y/blob/c0ffee/m.py" and found["print(1)\n"]["domain"] == "code"
    assert found["Alle Menschen"]["source"] == "many.zip!x/eins.txt"
    assert all(row["id"] == document_id(row["source"], row["offset"], row["piece"]) for row in found.values())
    (protected,) = rows(result, "evaluation/*.parquet")
    question = {"question": "How many?", "choices": ["one", "two"], "answer": 1, "meta": {"subject": "s"}}
    assert protected["markup"] == "json" and json.loads(protected["text"]) == question
    article = found["An ''article'' <b>."]
    assert (article["url"], article["licence"], article["markup"]) == ("https://en.wikipedia.org/wiki/A_%26_B", "CC-BY-SA-4.0", "wikitext")
    assert WIKI.encode()[article["offset"] :].startswith(b"<page><title>A &amp;")
    assert result.record.rejected == {"other_namespace": 1, "redirect": 1}
    assert result.record.num_documents == 10 and result.record.num_bytes == sum(len(text.encode()) for text in found)


def test_bad_input_is_kept_aside_with_reason_source_and_offset(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "good.jsonl", [{"text": prose(seed)} for seed in range(30)])
    (data / "latin.txt").write_bytes("Stra\xdfe".encode("latin-1"))
    lines = [
        b'{"text": "ok"}',
        b'{"text": "bro',
        b'{"title": "x"}',
        b'{"text": "  "}',
        b'["no object"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
    ]
    (data / "lines.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    whole = gzip.compress(b"".join(b'{"text": "line %d"}\n' % number for number in range(20000)))
    (data / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (data / "none.txt").write_bytes(b"")
    (data / "blank.txt").write_bytes(b" \n")
    (data / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    result = ingest(data, tmp_path / "home", LENIENT)
    found = sorted((row["source"], row["offset"], row["reason"]) for row in rows(result, "rejected.parquet"))
    cut = [row for row in found if row[0].startswith("cut")]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    assert [row for row in found if row not in cut] == [
        ("blank.txt", 0, "empty"), ("latin.txt", 0, "not_utf8"), ("lines.jsonl", starts[1], "broken_json"),
        ("lines.jsonl", starts[2], "no_text"), ("lines.jsonl", starts[3], "empty"),
        ("lines.jsonl", starts[4], "broken_json"), ("lines.jsonl", starts[5], "not_utf8"),
        ("lines.jsonl", starts[6], "not_utf8"), ("none.txt", 0, "empty_file"),
    ]  # fmt: skip
    assert [(name, reason) for name, _, reason in cut] == [("cut.jsonl.gz", "truncated_gzip"), ("cut.txt.gz", "truncated_gzip")]
    read = [row for row in rows(result, "documents/*.parquet") if row["source"] == "cut.jsonl.gz"]
    assert len(read) > 100 and {row["text"] for row in read} == {f"line {number}" for number in range(len(read))}


def test_the_ceiling_on_rejected_records_holds_on_both_sides_and_names_the_files(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "good.jsonl", [{"text": prose(seed)} for seed in range(9)])
    (data / "latin.txt").write_bytes("Stra\xdfe".encode("latin-1"))
    assert ingest(data, tmp_path / "on", INGEST.model_copy(update={"max_rejected_share": 0.1})).record.rejected == {"not_utf8": 1}
    with pytest.raises(ValueError, match=r"1 of 10 records are unreadable \(not_utf8 1\).*\(0\.09\).*latin\.txt at byte 0: not_utf8"):
        ingest(data, tmp_path / "above", INGEST.model_copy(update={"max_rejected_share": 0.09}))


def test_a_corpus_of_nothing_but_blanks_is_an_error(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"the corpus is empty: no document in 1 sources.*blank\.txt at byte 0: empty"):
        ingest(tmp_path / "data", tmp_path / "home", LENIENT)


def test_a_file_that_changed_since_the_listing_stops_the_run(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("before")
    listing = list_sources(tmp_path / "data")
    (tmp_path / "data" / "a.txt").write_text("after")
    with pytest.raises(ValueError, match=r"source a\.txt changed while it was read"):
        compute(ingest_documents, tmp_path / "home", sources=listing, recipe=INGEST, resources=RESOURCES)


def test_every_listed_file_is_kept_by_name_digest_and_role_whatever_its_role(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "chats.jsonl", [{"instruction": "q", "output": "a"}])
    (data / "one.txt").write_text("A text to train on.\n")
    entries = "  - {files: '*.txt', role: pretrain}\n  - {files: '*.jsonl', role: sft, licence: CC0}\n"
    (data / "glm46-data.yaml").write_text(f"version: 1\nentries:\n{entries}")
    found = rows(ingest(data, tmp_path / "store"), "sources.parquet")
    digests = {name: hashlib.sha256((data / name).read_bytes()).hexdigest() for name in ("chats.jsonl", "one.txt")}
    assert [(row["name"], row["role"], row["licence"]) for row in found] == [("chats.jsonl", "sft", "CC0"), ("one.txt", "pretrain", "")]
    assert {row["name"]: row["sha256"] for row in found} == digests


def test_ingestion_is_the_same_for_any_partition_count(mixed, tmp_path):
    assert len({ingest(mixed, tmp_path / str(count), resources=in_partitions(count)).digest for count in (1, 2, 7)}) == 1


def test_the_budget_is_shared_out_evenly_and_small_domains_keep_all(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(300):
        (data / f"m{number}.py").write_text(f"x = {number}  # {prose(number, 60)}")
    write_jsonl(data / "web.jsonl", [{"text": prose(seed, 60)} for seed in range(20)])
    files = list(list_sources(data).files)
    sizes = {domain: sum(file.num_text_bytes for file in files if file.domain == domain) for domain in ("web", "code")}
    budget = sizes["web"] + sizes["code"] // 3
    assert sampling_bounds(files, budget)["web"] == 1 << 32
    result = ingest(data, tmp_path / "home", INGEST.model_copy(update={"max_source_bytes": budget}))
    assert result.record.documents_by_domain["web"] == 20
    assert 70 < result.record.documents_by_domain["code"] < 130
    assert result.record.documents_by_domain["code"] + result.record.num_unsampled_documents == 300


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="../shared/data is not there")
def test_the_shared_data_is_read_in_all_its_domains(tmp_path):
    result = ingest(SHARED_DATA, tmp_path, RECIPE.ingest)
    assert set(result.record.documents_by_domain) == {"web", "multilingual", "code", "commit"}
    assert result.record.num_evaluation_documents > 10000
    assert set(result.record.rejected) <= {"empty", "empty_file", "redirect", "other_namespace"}
    assert result.record.rejected["redirect"] == 99
    assert 0.5 < result.record.num_bytes / RECIPE.ingest.max_source_bytes < 2
