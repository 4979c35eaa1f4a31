"""What ingestion reads, refuses and names."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import subprocess
import tracemalloc
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.chats.chat_records import _empty, _line_rows, source_rows
from tasks.data.readers.seen_keys import SeenKeys
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.source_records import LOST, _source_rows, read_sources
from tasks.data.readers.table_records import parquet_records, record_of
from tasks.data.readers.text_records import text_records, zip_records
from tasks.data.readers.wiki_dumps import wiki_pages
from tasks.data.records.documents import document_id
from tasks.data.sources.ingest_documents import ingest_documents, sampling_bounds
from tasks.data.sources.list_sources import list_sources
from tasks.data.sources.source_digests import BLOCK_BYTES
from tasks.data.sources.source_frame import SOURCE_COLUMNS
from tests.support.data_inputs import RECIPE, RESOURCES, SHARED_DATA, compute, in_partitions, prose, rows, write_jsonl

INGEST = RECIPE.ingest.model_copy(update={"max_source_bytes": 10**9})
LENIENT = INGEST.model_copy(update={"max_rejected_share": 1.0})


RESPONSE = (
    b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/page\r\nContent-Type: application/http\r\n"
    b"Content-Length: %d\r\n\r\n%s\r\n\r\n"
)
BLOCKS = [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>crawled", b"HTTP/1.1 500 Error\r\n\r\n"]
WARC = b"".join(RESPONSE % (len(block), block) for block in BLOCKS).replace(
    b"Content-Length", b"Content-Type: application/http\r\nContent-Length"
)
WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en">
  <siteinfo><base>https://en.wikipedia.org/wiki/Main_Page</base></siteinfo>
  <page><title>A &amp; B</title><ns>0</ns><id>1</id><revision><id>9</id><timestamp>2024-01-01T00:00:00Z</timestamp>
    <contributor><username>x</username><id>7</id></contributor><text>An ''article'' &lt;b&gt;.</text></revision></page>
  <page><title>Old name</title><ns>0</ns><id>2</id><redirect title="A &amp; B" /><revision><text>#REDIRECT [[A]]</text></revision></page>
  <page><title>Talk:A</title><ns>1</ns><id>3</id><revision><text>Talk.</text></revision></page>
</mediawiki>
"""  # noqa: E501


def ingest(directory: Path, root: Path, recipe=INGEST, resources=RESOURCES):
    return compute(ingest_documents, root, sources=list_sources(directory), recipe=recipe, resources=resources)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Every format, in one directory with roles."""
    directory = tmp_path_factory.mktemp("mixed")
    write_jsonl(
        directory / "a.jsonl", [{"text": "first", "url": "u1", "license": "MIT"}, {"text": "second", "lang": "fr"}]
    )
    write_jsonl(directory / "b.jsonl.gz", [{"body": "zipped line"}])
    write_jsonl(
        directory / "commits.jsonl.gz", [{"message": "Fix", "patch": "- a\n+ b", "repo": "x/y", "commit": "c0ffee"}]
    )
    write_jsonl(
        directory / "files.jsonl.gz", [{"repo": "x/y", "commit": "c0ffee", "path": "m.py", "content": "print(1)\n"}]
    )
    write_jsonl(
        directory / "bench.jsonl",
        [{"question": "How many?", "choices": ["one", "two"], "answer": 1, "meta": {"subject": "s"}}],
    )
    (directory / "t.txt").write_text("\ufeffplain text\n")
    (directory / "t2.txt.gz").write_bytes(gzip.compress(b"zipped text"))
    (directory / "z.jsonl.zst").write_bytes(
        b"".join(pa.compress(b'{"text": "frame %d"}\n' % n, "zstd", asbytes=True) for n in (1, 2))
    )
    (directory / "page.html").write_bytes('<meta charset="windows-1251"><p>Привет</p>'.encode("cp1251"))
    write_jsonl(directory / "pages.jsonl", [{"id": 1, "html": "<p>page", "url": "u2"}, {"id": 1, "html": "<p>again"}])
    columns = {
        "id": [7, 8],
        "body": ["row one", None],
        "extra": [1.0, 2.0],
        "license": ["CC0", "MIT"],
        "url": ["u3", ""],
    }
    pq.write_table(pa.table(columns), directory / "rows.parquet")
    (directory / "crawl.warc.gz").write_bytes(gzip.compress(WARC))
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
        "  - {files: pages.jsonl, role: pretrain, format: html_jsonl}\n"
        "  - {files: rows.parquet, role: pretrain, text: body}\n"
        "  - {files: '*', role: pretrain, lang: en, licence: CC0}\n"
    )
    return directory


def test_every_format_is_read_with_its_address_url_licence_and_language(mixed, tmp_path):
    result = ingest(mixed, tmp_path, LENIENT)
    documents = {row["text"]: row for row in rows(result, "documents/*.parquet")}
    assert set(documents) == {
        "first",
        "second",
        "zipped line",
        "Fix\n\n- a\n+ b",
        "print(1)\n",
        "plain text\n",
        "zipped text",
        "Alle Menschen",
        "Tous les êtres",
        "An ''article'' <b>.",
        "frame 1",
        "frame 2",
        '<meta charset="windows-1251"><p>Привет</p>',
        "<p>page",
        "row one",
        "<p>crawled",
    }
    first, second = documents["first"], documents["second"]
    assert (first["url"], first["licence"], first["lang"]) == ("u1", "MIT", "en")
    assert (second["licence"], second["lang"]) == ("CC0", "fr")
    with open(mixed / "a.jsonl", "rb") as file:
        file.seek(second["offset"])
        assert json.loads(file.readline())["text"] == "second"
    source_file = documents["print(1)\n"]
    assert (source_file["url"], source_file["domain"]) == ("https://github.com/x/y/blob/c0ffee/m.py", "code")
    assert documents["Alle Menschen"]["source"] == "many.zip!x/eins.txt"
    assert all(row["id"] == document_id(row["source"], row["offset"], row["piece"]) for row in documents.values())
    (protected,) = rows(result, "evaluation/*.parquet")
    question = {"question": "How many?", "choices": ["one", "two"], "answer": 1, "meta": {"subject": "s"}}
    assert protected["markup"] == "json" and json.loads(protected["text"]) == question
    article = documents["An ''article'' <b>."]
    assert (article["url"], article["licence"], article["markup"]) == (
        "https://en.wikipedia.org/wiki/A_%26_B",
        "CC-BY-SA-4.0",
        "wikitext",
    )
    assert WIKI.encode()[article["offset"] :].startswith(b"<page><title>A &amp;")
    assert {
        documents[text]["markup"] for text in ("<p>page", "<p>crawled", '<meta charset="windows-1251"><p>Привет</p>')
    } == {"html"}
    assert (documents["<p>crawled"]["url"], documents["row one"]["url"], documents["row one"]["licence"]) == (
        "http://a/page",
        "u3",
        "CC0",
    )
    assert result.record.rejected == {
        "duplicate_id": 1,
        "http_status": 1,
        "no_text": 1,
        "other_namespace": 1,
        "redirect": 1,
    }
    assert result.record.num_documents == 16 and result.record.num_bytes == sum(
        len(text.encode()) for text in documents
    )


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
    rejected = sorted((row["source"], row["offset"], row["reason"]) for row in rows(result, "rejected.parquet"))
    cut = [row for row in rejected if row[0].startswith("cut")]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    assert [row for row in rejected if row not in cut] == [
        ("blank.txt", 0, "empty"),
        ("latin.txt", 0, "not_utf8"),
        ("lines.jsonl", starts[1], "broken_json"),
        ("lines.jsonl", starts[2], "no_text"),
        ("lines.jsonl", starts[3], "empty"),
        ("lines.jsonl", starts[4], "broken_json"),
        ("lines.jsonl", starts[5], "not_utf8"),
        ("lines.jsonl", starts[6], "not_utf8"),
        ("none.txt", 0, "empty_file"),
    ]
    assert [(name, reason) for name, _, reason in cut] == [
        ("cut.jsonl.gz", "truncated_gzip"),
        ("cut.txt.gz", "truncated_gzip"),
    ]
    read = [row for row in rows(result, "documents/*.parquet") if row["source"] == "cut.jsonl.gz"]
    assert len(read) > 100 and {row["text"] for row in read} == {f"line {number}" for number in range(len(read))}


def test_the_ceiling_on_rejected_records_holds_on_both_sides_and_names_the_files(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "good.jsonl", [{"text": prose(seed)} for seed in range(9)])
    (data / "latin.txt").write_bytes("Stra\xdfe".encode("latin-1"))
    assert ingest(data, tmp_path / "on", INGEST.model_copy(update={"max_rejected_share": 0.1})).record.rejected == {
        "not_utf8": 1
    }
    with pytest.raises(
        ValueError, match=r"1 of 10 records are unreadable \(not_utf8 1\).*\(0\.09\).*latin\.txt at byte 0: not_utf8"
    ):
        ingest(data, tmp_path / "above", INGEST.model_copy(update={"max_rejected_share": 0.09}))


def test_records_without_a_text_field_name_the_fix_in_the_manifest(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    write_jsonl(tmp_path / "data" / "chats.jsonl", [chat])
    with pytest.raises(ValueError, match=r"no_text .*fields are messages.*glm46-data\.yaml.*role \(sft for conv"):
        ingest(tmp_path / "data", tmp_path / "out")


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
    sources = rows(ingest(data, tmp_path / "store"), "sources.parquet")
    digests = {name: hashlib.sha256((data / name).read_bytes()).hexdigest() for name in ("chats.jsonl", "one.txt")}
    assert [(row["name"], row["role"], row["licence"]) for row in sources] == [
        ("chats.jsonl", "sft", "CC0"),
        ("one.txt", "pretrain", ""),
    ]
    assert {row["name"]: row["sha256"] for row in sources} == digests


def test_ingestion_is_the_same_for_any_partition_count(mixed, tmp_path):
    assert len({ingest(mixed, tmp_path / str(count), LENIENT, in_partitions(count)).digest for count in (1, 2, 7)}) == 1


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


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_that_is_too_long_for_a_record_takes_no_part_of_the_bound(tmp_path, ending):
    """It is rejected; counted as text, it would lower the rate of all other records."""
    data, huge = tmp_path / "data", BLOCK_BYTES + 9
    data.mkdir()
    lines = [json.dumps({"text": prose(seed, 60)}).encode() + b"\n" for seed in range(40)]
    whole = b"".join([*lines[:20], b'{"text": "' + b"x" * huge + b'"}\n', *lines[20:]])
    (data / f"a.jsonl{ending}").write_bytes(gzip.compress(whole) if ending else whole)
    (listed,) = list_sources(data, max_record_bytes=huge // 2).files
    assert listed.num_text_bytes == sum(map(len, lines))
    assert list_sources(data, max_record_bytes=2 * huge).files[0].num_text_bytes == len(whole)
    assert sampling_bounds([listed], 2 * sum(map(len, lines)))["web"] == 1 << 32


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="../shared/data is not there")
def test_the_shared_data_is_read_in_all_its_domains(tmp_path):
    result = ingest(SHARED_DATA, tmp_path, RECIPE.ingest)
    assert set(result.record.documents_by_domain) == {"web", "multilingual", "code", "commit"}
    assert result.record.num_evaluation_documents > 10000
    assert set(result.record.rejected) <= {"empty", "empty_file", "redirect", "other_namespace"}
    assert result.record.rejected["redirect"] == 99
    assert 0.5 < result.record.num_bytes / RECIPE.ingest.max_source_bytes < 2


def read(source: dict, data: bytes, tmp_path, bound: int = 10_000) -> list[tuple[int, str, str]]:
    """(offset, text, reason) of the rows of one file, read as executors read it."""
    path = tmp_path / Path(source["name"]).name
    path.write_bytes(data)
    empty = {
        "role": "pretrain",
        "domain": "web",
        "lang": "",
        "licence": "",
        "collection": "",
        "text": [],
        "repository": "",
        "repository_path": "",
    }
    given = {**empty, "path": str(path), "sha256": hashlib.sha256(data).hexdigest(), **source}
    return [(row.offset, row.text, row.reason) for row in _source_rows(given, 1 << 32, bound)]


LONG = b'{"text": "' + b"x" * 60_000_000 + b'"}\n'


@pytest.mark.parametrize("ending", ["", ".gz", ".zst", ".bz2"])
def test_a_line_above_the_bound_is_passed_over_without_being_held(tmp_path, ending):
    data = b'{"text": "before"}\n' + LONG + b'{"text": "behind"}\n'
    pack = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
        ".bz2": bz2.compress,
    }[ending]
    packed = pack(data)
    tracemalloc.start()
    records = read({"name": f"x.jsonl{ending}", "format": "jsonl"}, packed, tmp_path, 1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 15_000_000
    tracemalloc.stop()
    assert records == [(0, "before", ""), (19, "", "record_too_long"), (19 + len(LONG), "behind", "")]


def test_a_line_is_held_against_the_bound_on_both_sides(tmp_path):
    lines = b'{"text": "12345"}\n{"text": "123456"}\n'
    records = read({"name": "x.jsonl", "format": "jsonl"}, lines, tmp_path, len(b'{"text": "12345"}'))
    assert [reason for _, _, reason in records] == ["", "record_too_long"]


def test_a_long_text_is_cut_at_line_ends_and_joined_it_is_the_file(tmp_path):
    data = "".join(f"Zeile {number} mit Umläuten\n" for number in range(500)).encode()
    records = list(text_records("x.txt", HashingReader(io.BytesIO(data)), 1000))
    assert "".join(record.text for record in records).encode() == data and all(
        len(record.text.encode()) <= 1000 for record in records
    )
    assert all(data[record.offset :].startswith(record.text.encode()) for record in records) and len(records) > 10
    cut = list(text_records("x.txt", HashingReader(io.BytesIO(b"a\n" + b"y" * 5000 + b"\nz")), 1000))
    assert [(record.offset, record.text, record.reason) for record in cut] == [
        (0, "a\n", ""),
        (2, None, "record_too_long"),
        (5003, "z", ""),
    ]
    assert [record.reason for record in text_records("x.txt", HashingReader(io.BytesIO(b"y" * 1000)), 1000)] == [""]


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_cut_like_the_same_text_in_utf8(codec):
    text = "".join(f"Zeile {number}: Größe\n" for number in range(2000))
    mark = "" if codec == "utf-16" else "\ufeff"
    for bound in (1000, len(text.encode())):
        read = [
            list(text_records("x.txt", HashingReader(io.BytesIO(data)), bound))
            for data in (text.encode(), (mark + text).encode(codec))
        ]
        assert read[0] == read[1] and {record.reason for record in read[1]} == {""}
    broken = (mark + text).encode(codec) + b"\x00"
    assert [record.reason for record in text_records("x.txt", HashingReader(io.BytesIO(broken)), 10**6)] == ["not_utf8"]


@pytest.mark.parametrize(
    ("line", "codec", "is_read"),
    [
        ("# -*- coding: latin-1 -*-", "latin-1", True),
        ("#!/usr/bin/python\n# vim: set fileencoding=koi8-r :", "koi8-r", True),
        ("\n\n# coding: latin-1", "latin-1", False),
        ("x = 1  # coding: latin-1", "latin-1", False),
        ("# coding: utf-8", "latin-1", False),
        ("# coding: nothing", "latin-1", False),
        ("# coding: utf-16", "latin-1", False),
    ],
)
def test_source_code_is_decoded_as_its_first_lines_declare(line, codec, is_read):
    text = f"{line}\nprint('{'é' if codec == 'latin-1' else 'ж'}')\n"
    (record,) = text_records("x.py", HashingReader(io.BytesIO(text.encode(codec))), 10**6)
    assert (record.text, record.reason) == ((text, "") if is_read else (None, "not_utf8"))


@pytest.mark.parametrize(("bound", "reason"), [(400, ""), (399, "record_too_long")])
def test_a_utf16_member_of_an_archive_is_as_long_as_its_utf8(tmp_path, bound, reason):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", ("x" * 400).encode("utf-16"))
    (record,) = zip_records("x.zip", str(tmp_path / "x.zip"), "", bound)
    assert (record.text, record.reason) == ("x" * 400 if not reason else None, reason)


@pytest.mark.parametrize(
    ("name", "form", "data", "expected"),
    [
        ("x.txt", "text", b"\x00\x01\x02 junk", "binary"),
        ("x.txt", "text", b"\xde\xad\xbe\xef" * 50, "not_utf8"),
        ("x.txt", "text", "Größe".encode("utf-16"), ""),
        ("x.txt.zst", "text", pa.compress(b"line\n" * 999, "zstd", asbytes=True)[:-4], "truncated_zstd"),
        ("x.txt.bz2", "text", bz2.compress(b"line\n" * 999)[:-4], "truncated_bz2"),
        ("x.txt.gz", "text", b"no gzip at all", "truncated_gzip"),
        ("x.html", "html", b"<p>" + b"x" * 20_000, "record_too_long"),
        ("x.html", "html", b"", "empty_file"),
        ("x.html", "html", bytes(range(128, 256)) * 20, "unknown_charset"),
        ("x.zip", "zip_text", b"PK no zip", "broken_zip"),
        ("x.parquet", "parquet", b"PAR1 no parquet PAR1", "broken_parquet"),
        ("x.parquet", "parquet", b"", "broken_parquet"),
        ("x.xml", "mediawiki", WIKI.encode()[:-60], "broken_xml"),
        ("x.xml", "mediawiki", b'<!DOCTYPE m [<!ENTITY a "b">]><mediawiki/>', "broken_xml"),
        ("x.xml.bz2", "mediawiki", bz2.compress(WIKI.encode())[:-9], "truncated_bz2"),
        ("x.jsonl", "jsonl", b"[" * 100_000, "record_too_long"),
        ("x.jsonl", "jsonl", b"[" * 9_000 + b"\n", "broken_json"),
    ],
)
def test_damage_has_a_reason(tmp_path, name, form, data, expected):
    assert [reason for _, _, reason in read({"name": name, "format": form}, data, tmp_path) if reason != LOST][
        -1
    ] == expected


def test_a_damaged_member_of_a_zip_costs_itself_alone(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in "abc":
            archive.writestr(f"{name}.txt", f"text of {name} " * 100)
        archive.writestr("long.txt", "x" * 20_000)
    data = bytearray(buffer.getvalue())
    data[data.index(b"text of b") + 200] ^= 1
    assert [reason for _, _, reason in read({"name": "x.zip", "format": "zip_text"}, bytes(data), tmp_path)] == [
        "",
        "broken_zip",
        "",
        "record_too_long",
    ]


def test_parquet_is_read_by_groups_with_the_row_as_offset_and_a_missing_column_is_named(tmp_path):
    columns = {"text": [f"row {number}" for number in range(1000)] + ["x" * 20_000, "  "], "id": [*range(1000), 5, 6]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=70)
    data = (tmp_path / "x.parquet").read_bytes()
    records = read({"name": "x.parquet", "format": "parquet"}, data, tmp_path)
    assert records[:1000] == [(number, f"row {number}", "") for number in range(1000)]
    assert [(offset, reason) for offset, _, reason in records[1000:]] == [(1000, "record_too_long"), (1001, "empty")]
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "good.jsonl", [{"text": prose(seed)} for seed in range(30)])
    (tmp_path / "data" / "x.parquet").write_bytes(data)
    (tmp_path / "data" / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: '*.parquet', role: pretrain, text: body}\n  - {files: '*', role: pretrain}\n"
    )
    with pytest.raises(
        ValueError,
        match=r"source x\.parquet: column 'body' \(the entry's `text`\) is in x\.parquet, which has text, id",
    ):
        ingest(tmp_path / "data", tmp_path / "home", LENIENT)


def test_of_two_records_with_one_id_the_first_stays(tmp_path):
    data = (
        b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n{"id": "a", "text": "three"}\n{"text": '
        b'"four"}\n{"text": "five"}\n'
    )
    records = read({"name": "x.jsonl", "format": "jsonl"}, data, tmp_path)
    assert [(text, reason) for _, text, reason in records] == [
        ("one", ""),
        ("two", ""),
        ("", "duplicate_id"),
        ("four", ""),
        ("five", ""),
    ]
    protected = read({"name": "x.jsonl", "format": "jsonl", "role": "evaluation"}, data, tmp_path)
    assert [reason for _, _, reason in protected] == [""] * 5


def test_ids_are_remembered_in_a_few_bytes_each(monkeypatch):
    monkeypatch.setattr("tasks.data.readers.seen_keys.NUM_LOOSE", 100)
    seen = SeenKeys()
    assert all(seen.add(str(number)) for number in range(1050)) and not any(
        seen.add(str(number)) for number in range(1050)
    )


def test_a_dump_is_read_page_by_page_in_bounded_memory():
    page = "<page><title>T%d</title><ns>0</ns><id>%d</id><revision><text>%s</text></revision></page>\n"
    body = "".join(page % (number, number, "word &lt;b&gt; " * 6_000) for number in range(40))
    data = bz2.compress(f"<mediawiki>{body}{page % (99, 99, 'x' * 4_000_000)}</mediawiki>".encode())
    tracemalloc.start()
    reasons = [record.reason for record in wiki_pages("x.xml.bz2", HashingReader(io.BytesIO(data)), "en", 300_000)]
    assert reasons == [""] * 40 + ["record_too_long"] and tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()


def read_listing(listing) -> list[dict]:
    """What executors make of all files of a listing, without a session: its workers have the environment in which it
    was started."""
    files = [file for file in listing.files if file.role in ("pretrain", "evaluation")]
    sources = [
        {**{name: getattr(file, name) for name in SOURCE_COLUMNS}, "text": list(file.text), "max_commits": 0}
        for file in files
    ]
    batches = read_sources(
        iter([pa.RecordBatch.from_pylist(sources)]), sampling_bounds(files, 10**9), LENIENT.max_record_bytes
    )
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_bucket_gives_the_rows_of_the_same_directory(mixed, s3_server):
    import boto3

    for path in sorted(mixed.iterdir()):
        boto3.client("s3").upload_file(str(path), "glm46", f"mixed/{path.name}")
    listing = list_sources("s3://glm46/mixed")
    assert read_listing(listing) == read_listing(list_sources(mixed)) != []
    boto3.client("s3").put_object(Bucket="glm46", Key="mixed/a.jsonl", Body=b'{"text": "other"}\n')
    assert [row["source"] for row in read_listing(listing) if row["stream"] == "changed"] == ["a.jsonl"]


def test_a_git_tree_gives_files_and_commits(tmp_path):
    tree = tmp_path / "data" / "tool"
    tree.mkdir(parents=True)
    (tree / "a.py").write_text("import b\n")
    (tree / "b.py").write_text("x = 1\n")
    for command in (["init"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e@x.org", "commit", "-m", "Begin"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True, capture_output=True)
    manifest = "version: 1\nentries:\n  - {files: 'tool/**', role: pretrain, format: git, commits: 9}\n"
    (tmp_path / "data" / "glm46-data.yaml").write_text(manifest)
    result = ingest(tmp_path / "data", tmp_path / "home")
    assert result.record.documents_by_domain == {"code": 2, "commit": 1}
    documents = {row["path"]: row for row in rows(result, "documents/*.parquet")}
    assert {(row["repository"], row["text"]) for path, row in documents.items() if path} == {
        ("tool", "import b\n"),
        ("tool", "x = 1\n"),
    }
    assert documents[""]["text"].startswith("Begin\n\ndiff --git a/a.py b/a.py\n")


def test_a_string_of_parquet_that_is_not_utf8_costs_its_row(tmp_path):
    broken = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": broken, "n": [1, 2, 3]}), tmp_path / "made.parquet")
    data = (tmp_path / "made.parquet").read_bytes()
    records = read({"name": "x.parquet", "format": "parquet"}, data, tmp_path)
    assert records == [(0, "good", ""), (1, "", "not_utf8"), (2, "fine", "")]


@pytest.mark.parametrize(
    "record", [{"text": "\ud800"}, {"text": "words", "url": "\udc00"}, {"\udc00": "words", "text": "more"}]
)
def test_half_of_a_surrogate_pair_costs_its_record_wherever_it_stands(tmp_path, record):
    good = {"text": "a pair \U0001f600"}
    data = f"{json.dumps(record)}\n{json.dumps(good)}\n".encode()
    records = read({"name": "x.jsonl", "format": "jsonl"}, data, tmp_path)
    assert [(text, reason) for _, text, reason in records] == [("", "not_utf8"), ("a pair \U0001f600", "")]


def test_a_date_that_python_has_no_value_for_costs_its_row(tmp_path):
    dates = pa.array([0, 3 * 10**17, 0], pa.timestamp("us"))
    pq.write_table(pa.table({"question": ["one", "two", "three"], "asked": dates}), tmp_path / "made.parquet")
    data = (tmp_path / "made.parquet").read_bytes()
    records = read({"name": "x.parquet", "format": "parquet", "role": "evaluation"}, data, tmp_path)
    assert [reason for _, _, reason in records] == ["", "broken_parquet", ""]


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        ({"text": 5}, "text is int, not a string: write it as one"),
        ({"content": None, "id": 1}, "text and content null; fields are content, id"),
        ({"body": "words"}, "text and content not there; fields are body"),
    ],
)
def test_a_record_without_text_says_what_it_has_instead(record, detail):
    source = {"name": "x.jsonl", "format": "jsonl", "role": "pretrain", "text": [], "domain": "web"}
    assert record_of(source, 7, record).detail == detail


@pytest.mark.parametrize(
    ("record", "origin"),
    [
        ({"source_url": "a"}, ("a", "", "", "")),
        ({"u": "a", "license": ["MIT", "Apache-2.0"]}, ("a", "MIT, Apache-2.0", "", "")),
        ({"metadata": {"url": "a"}, "license": []}, ("a", "", "", "")),
        ({"meta": {"url": 5, "uri": "a"}, "metadata": "x"}, ("a", "", "", "")),
        ({"repo_name": "o/n", "path": "a.py", "lang": "Python"}, ("", "", "o/n", "a.py")),
        ({"max_stars_repo_name": "o/n", "max_stars_repo_path": "b.py"}, ("", "", "o/n", "b.py")),
        ({"max_stars_repo_licenses": ["MIT"], "repo": None}, ("", "MIT", "", "")),
    ],
)
def test_the_fields_of_published_sets_say_where_a_document_is_from(record, origin, tmp_path):
    path, record = tmp_path / "x.parquet", {"text": "words", **record}
    pq.write_table(pa.Table.from_pylist([record]), path)
    source = {"name": "x.jsonl", "format": "jsonl", "role": "pretrain", "text": [], "domain": "code"}
    (row,) = parquet_records({**source, "path": str(path), "sha256": ""}, 10**6)
    for read in (record_of(source, 7, record), row):
        assert (read.url, read.licence, read.repository, read.path, read.lang) == (*origin, None)


def test_a_row_of_parquet_has_the_text_that_its_line_of_json_has(tmp_path):
    pq.write_table(pa.table({"text": [None, "one"], "content": ["two", "three"]}), tmp_path / "made.parquet")
    data = (tmp_path / "made.parquet").read_bytes()
    assert read({"name": "x.parquet", "format": "parquet"}, data, tmp_path) == [(0, "two", ""), (1, "one", "")]
    pq.write_table(pa.Table.from_arrays([pa.array(["one"])] * 2, names=["text", "text"]), tmp_path / "made.parquet")
    data = (tmp_path / "made.parquet").read_bytes()
    ((_, _, reason),) = read({"name": "x.parquet", "format": "parquet"}, data, tmp_path)
    assert reason == "broken_parquet"


def test_conversations_in_parquet_are_those_of_json_lines(tmp_path):
    records = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]} for n in range(3)
    ]
    write_jsonl(tmp_path / "x.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    conversations = []
    for form in ("jsonl", "parquet"):
        path = tmp_path / f"x.{form}"
        source = {
            "name": "x",
            "path": str(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "format": form,
        }
        rows_of_file = source_rows({**source, "collection": "", "licence": "", "kind": ""}, _line_rows, _empty)
        conversations.append([(row["stream"], row["messages"], row["tools"]) for row in rows_of_file])
    assert conversations[0] == conversations[1] and len(conversations[0]) == 3
