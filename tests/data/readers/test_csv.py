"""CSV files: what Python's own reader reads, and a reason for every row that is none."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from pathlib import Path

import numpy as np
import pytest

from tasks.data.readers.csv_lines import csv_lines
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import RECIPE, RESOURCES, compute, prose

CELLS = [
    "",
    "plain",
    "a, b; c | d",
    'says "no"',
    "two\nlines",
    "and\r\nthese",
    "tab\there",
    "Köln 東京 🙂",
    " spaces ",
    "007",
]


def lines_of(data: bytes, name: str = "x.csv", bound: int = 10_000) -> list[tuple[int, dict | None, str]]:
    return [(line.offset, line.record, line.reason) for line in csv_lines(name, HashingReader(io.BytesIO(data)), bound)]


def written(rows: list[list[str]], **dialect: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue().encode()


@pytest.mark.parametrize("terminator", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("name", "delimiter"), [("x.csv", ","), ("x.csv", ";"), ("x.csv", "|"), ("x.csv", "\t"), ("x.tsv.gz", "\t")]
)
def test_every_cell_is_read_as_it_was_written_and_the_offset_is_its_rows_first_byte(name, delimiter, terminator):
    draw = np.random.default_rng(46)
    names = ["id", "text", "note"]
    rows = [[CELLS[number] for number in draw.integers(len(CELLS), size=3)] for _ in range(200)]
    parts = [written([row], delimiter=delimiter, lineterminator=terminator) for row in [names, *rows]]
    data = b"".join(parts)
    read = lines_of(gzip.compress(data) if name.endswith(".gz") else data, name)
    starts = np.cumsum([len(part) for part in parts])[:-1]
    assert read == [(start, dict(zip(names, row, strict=True)), "") for start, row in zip(starts, rows, strict=True)]


def test_a_byte_order_mark_blank_lines_and_a_last_line_without_end_are_no_matter():
    read = lines_of("\ufefftext,id\n\none,1\n\n\ntwo,2".encode())
    assert [record for _, record, _ in read] == [{"text": "one", "id": "1"}, {"text": "two", "id": "2"}]
    assert [record for _, record, _ in lines_of(b"\n  \ntext,id\none,1\n")] == [{"text": "one", "id": "1"}]
    assert lines_of(b"") == lines_of(b"\n \n") == lines_of(b"text\n") == []


def test_a_quote_that_is_text_in_a_tsv_merges_no_rows_in_silence():
    data = b'id\ttext\n1\t"To be or not to be\n2\tplain\n3\the left."\n4\tlast\n5\t"one\nword"\n'
    assert [(record, reason) for _, record, reason in lines_of(data, "x.tsv")] == [
        (None, "broken_csv"),
        ({"id": "4", "text": "last"}, ""),
        ({"id": "5", "text": "one\nword"}, ""),
    ]


def test_a_row_that_is_none_has_a_reason_and_its_neighbours_stay():
    data = (
        b'text,id\nfine,1\nshort\nlong,2,3\n"quoted"wrongly,4\nbytes \xff\xfe,5\n' + b"x" * 50_000 + b",6\nfine too,7\n"
    )
    read = lines_of(data)
    assert [reason for _, _, reason in read] == [
        "",
        "broken_csv",
        "broken_csv",
        "broken_csv",
        "not_utf8",
        "record_too_long",
        "",
    ]
    assert [record["text"] for _, record, _ in read if record] == ["fine", "fine too"]
    assert all(
        data[offset:].startswith(start)
        for (offset, _, _), start in zip(read, (b"fine,", b"short", b"long"), strict=False)
    )


def test_a_quote_that_is_never_closed_says_what_it_cost():
    data = b'text,id\nfine,1\n"never closed,2\n' + b"row,3\n" * 100
    (first, last) = csv_lines("x.csv", HashingReader(io.BytesIO(data)), 10_000)
    assert first.record == {"text": "fine", "id": "1"}
    assert (last.reason, last.detail) == (
        "broken_csv",
        f"unexpected end of data; {len(data) - last.offset} bytes are left out",
    )


def test_every_row_before_a_damage_is_kept():
    rows = [[f"row {number}", str(number)] for number in range(5000)]
    data = gzip.compress(written([["text", "id"], *rows]), mtime=0)
    *read, (_, _, last) = lines_of(data[: len(data) // 2], "x.csv.gz")
    assert last == "truncated_gzip" and len(read) > 100
    assert [record for _, record, _ in read] == [{"text": text, "id": key} for text, key in rows[: len(read)]]


def test_a_csv_trains_where_it_is_named_and_a_wrong_first_row_stops_the_run(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [[prose(seed), f"https://example.org/{seed}", "de"] for seed in range(20)]
    (data / "news.csv").write_bytes(written([["body", "url", "lang"], *rows]))
    (data / "a.txt").write_text(prose(99))
    assert [file.name for file in list_sources(data).files] == ["a.txt"], "a table of numbers is no text"

    def ingested(entry: str):
        (data / "glm46-data.yaml").write_text(f"version: 1\nentries:\n  - {{files: news.csv, {entry}}}\n")
        sources = list_sources(data)
        name = hashlib.sha256(entry.encode() + (data / "news.csv").read_bytes()).hexdigest()
        return compute(ingest_documents, tmp_path / name, sources=sources, recipe=RECIPE.ingest, resources=RESOURCES)

    record = ingested("role: pretrain, format: csv, text: body").record
    assert (record.num_documents, record.rejected) == (20, {})
    with pytest.raises(
        ValueError, match=r"news\.csv has role pretrain, but its ending names no format: add `format: .*csv"
    ):
        ingested("role: pretrain")
    with pytest.raises(
        ValueError,
        match=r"source news\.csv: none of the columns text, content is in news\.csv, which has body, url, lang: ",
    ):
        ingested("role: pretrain, format: csv")
    (data / "news.csv").write_bytes(written([["body", "url", "url"], *rows]))
    with pytest.raises(ValueError, match=r"news\.csv: its first row names 'url' more than once"):
        ingested("role: pretrain, format: csv, text: body")


def test_a_file_named_by_itself_is_read_and_a_role_of_records_needs_no_format(tmp_path):
    (tmp_path / "x.csv").write_bytes(written([["text"], [prose(1)]]))
    assert [(file.name, file.format) for file in list_sources(tmp_path / "x.csv").files] == [("x.csv", "csv")]
    for role in ("sft", "preference", "prompts", "evaluation"):
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "glm46-data.yaml").write_text(
            f"version: 1\nentries:\n  - {{files: x.csv, role: {role}}}\n  - {{files: a.txt, role: pretrain}}\n"
        )
        assert {file.name: file.format for file in list_sources(Path(tmp_path)).files}["x.csv"] == "csv"
