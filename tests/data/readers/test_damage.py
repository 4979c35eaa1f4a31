"""Damaged sources: everything before a damage is kept, what is lost is counted, and a failing disk is no damage."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import tracemalloc
import unicodedata
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.readers.source_bytes import CODECS, GARBLED, HashingReader, blocks, decompressed
from tasks.data.readers.source_records import LOST, _source_rows
from tasks.data.readers.table_records import parquet_lines
from tasks.data.records.documents import content_digest, document_id
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.data.readers.test_archives import warc
from tests.support.data_inputs import RECIPE, RESOURCES, compute, prose, write_jsonl

BOUND = 1_000_000
INGEST = RECIPE.ingest.model_copy(update={"max_source_bytes": 10**9, "max_rejected_share": 0.2})
PACK = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=1),
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def words_of(number: int) -> str:
    """Words that are another text for each number, and that compress to half."""
    return f"{number} {np.random.default_rng(number).bytes(200).hex(' ', 4)}"


LINES = [json.dumps({"id": number, "text": words_of(number)}).encode() + b"\n" for number in range(3000)]


def rows_of(name: str, form: str, data: bytes | None, tmp_path: Path, bound: int = BOUND) -> list[dict]:
    """The rows of one file, as executors read it."""
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    source = {
        "path": str(path),
        "sha256": hashlib.sha256(data or b"").hexdigest(),
        "name": name,
        "format": form,
        "role": "pretrain",
    }
    source |= {
        "domain": "web",
        "lang": "",
        "licence": "",
        "collection": "",
        "text": [],
        "repository": "",
        "repository_path": "",
    }
    return [row._asdict() for row in _source_rows(source, 1 << 32, bound)]


def outcomes(rows: list[dict]) -> list[tuple[int, str]]:
    return [(row["offset"], row["reason"]) for row in rows]


def readable(data: bytes, ending: str) -> bytes:
    """What a decompressor gives that is fed byte by byte."""
    inflate = {".gz": lambda: zlib.decompressobj(31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}[
        ending
    ]()
    recovered = []
    for at in range(len(data)):
        try:
            recovered.append(inflate.decompress(data[at : at + 1]))
        except (zlib.error, lzma.LZMAError, OSError):
            break
    return b"".join(recovered)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "flip", "checksum"])
@pytest.mark.parametrize("size", [300, 200_000])
def test_every_byte_before_a_damage_is_given(ending, damage, size):
    whole = b"".join(LINES)[:size]
    data = bytearray(PACK[ending](whole))
    at = np.random.default_rng(size).integers(len(data) // 3, len(data))
    if damage == "cut":
        del data[at:]
    else:
        data[at if damage == "flip" else -6] ^= 0x55
    file, recovered = HashingReader(io.BytesIO(bytes(data))), b""
    with pytest.raises(GARBLED):
        for block in blocks(decompressed(f"x{ending}", file)):
            recovered += block
    expected = readable(bytes(data), ending)
    assert recovered[: len(expected)] == expected
    assert file.broken_at is not None and (damage != "cut" or file.broken_at == len(data))


def test_every_block_before_a_damage_of_zstd_is_given():
    whole = b"".join(LINES)
    frames = [PACK[".zst"](whole[start : start + 300_000]) for start in range(0, len(whole), 300_000)]
    broken = [*frames[:2], b"\xff" + frames[2][1:], *frames[3:]]
    # A block of 128 KiB is decoded whole or not at all.
    for data, size in ((b"".join(broken), 600_000), (b"".join(frames[:2]) + frames[2][:-40], 600_000 + 2 * 2**17)):
        file, recovered = HashingReader(io.BytesIO(data)), b""
        with pytest.raises(GARBLED):
            for block in blocks(decompressed("x.zst", file)):
                recovered += block
        assert (
            recovered == whole[:size]
            and abs((file.broken_at or 0) - (sum(map(len, frames[:2])) if size == 600_000 else len(data))) < 8
        )


def test_a_web_archive_that_brings_a_dictionary_is_refused_by_name():
    frame = b"\x28\xb5\x2f\xfd\x21\x07\x01\x09\0\0a"  # one byte, compressed with the dictionary 7
    file = HashingReader(io.BytesIO(b"\x5d\x2a\x4d\x18\x04\0\0\0dict" + frame))
    with pytest.raises(GARBLED, match="need the dictionary in its first frame, which is not read: unpack it"):
        list(blocks(decompressed("x.warc.zst", file)))


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_all_lines_before_a_break_are_documents_and_the_rest_one_rejection(tmp_path, ending):
    data = PACK[ending](b"".join(LINES))
    data = data[: len(data) * 3 // 4]
    rows = rows_of(f"x.jsonl{ending}", "jsonl", data, tmp_path)
    whole = readable(data, ending).count(b"\n") if ending != ".zst" else len(rows) - 1
    assert [row["text"] for row in rows[:-1]] == [json.loads(line)["text"] for line in LINES[:whole]] and whole > 1000
    assert outcomes(rows[-1:]) == [(sum(map(len, LINES[:whole])), f"truncated_{CODECS[ending]}")]


def test_a_text_keeps_its_lines_before_a_break(tmp_path):
    text = "".join(f"Line {number} of a long text, {words_of(number)}\n" for number in range(500))
    data = gzip.compress(text.encode())[:9000]
    kept, broken = rows_of("x.txt.gz", "text", data, tmp_path)
    assert text.startswith(kept["text"]) and kept["text"].endswith("\n")
    assert broken["offset"] == len(kept["text"].encode()) and broken["reason"] == "truncated_gzip"
    assert outcomes(rows_of("y.txt.gz", "text", gzip.compress(b"one line")[:-9], tmp_path)) == [(0, "truncated_gzip")]


def test_a_crawl_in_one_gzip_member_keeps_its_records_before_a_break(tmp_path):
    records = [warc(f"http://a/{number}", f"<p>{words_of(number)}") for number in range(200)]
    data = gzip.compress(b"".join(records))
    data = data[: len(data) // 2]
    rows = rows_of("x.warc.gz", "web_archive", data, tmp_path)
    ends = np.cumsum(list(map(len, records)))
    num_whole = int((ends - 4 <= len(readable(data, ".gz"))).sum())
    assert [row["url"] for row in rows[:-1]] == [f"http://a/{number}" for number in range(num_whole)] and num_whole > 50
    assert [row["reason"] for row in rows[-1:]] == ["truncated_gzip"] and rows[-1]["offset"] == ends[num_whole - 1]
    assert len({(row["source"], row["offset"]) for row in rows}) == len(rows)


def test_of_a_member_with_a_wrong_checksum_the_only_record_is_refused_and_others_are_kept(tmp_path):
    alone = [bytearray(gzip.compress(warc(f"http://a/{number}", "<p>" + words_of(number)))) for number in range(3)]
    alone[1][-6] ^= 1
    assert [row["reason"] for row in rows_of("x.warc.gz", "web_archive", b"".join(alone), tmp_path)] == [
        "",
        "truncated_gzip",
        "",
    ]
    joined = bytearray(
        gzip.compress(b"".join(warc(f"http://a/{number}", "<p>" + words_of(number)) for number in range(3)))
    )
    joined[-6] ^= 1
    rows = [row for row in rows_of("y.warc.gz", "web_archive", bytes(joined), tmp_path) if row["stream"] != LOST]
    assert [row["reason"] for row in rows] == ["", "", "", "truncated_gzip"] and len(
        {row["offset"] for row in rows}
    ) == 4


@pytest.mark.parametrize("ending", [".bz2", ".zst"])
def test_archives_of_other_compressions_have_the_addresses_of_decompressed_bytes(tmp_path, ending):
    records = [warc(f"http://a/{number}", f"<p>{words_of(number)}") for number in range(40)]
    data = PACK[ending](b"".join(records))
    rows = rows_of(f"x.warc{ending}", "web_archive", data, tmp_path)
    assert [row["offset"] for row in rows] == [0, *np.cumsum(list(map(len, records)))[:-1]] and {
        row["reason"] for row in rows
    } == {""}
    cut = rows_of(f"y.warc{ending}", "web_archive", data[:-30], tmp_path)
    assert [row["reason"] for row in cut][-1].startswith("truncated_") and len(cut) <= 41


PAGE = "<page><title>T{0}</title><ns>0</ns><id>{0}</id><revision><text>{1}</text></revision></page>\n"


@pytest.mark.parametrize("broken", ["a < b", "x</b>y", "\x00", "&nosuch;", "\udcff", "<b>"])
def test_behind_what_is_no_xml_a_dump_goes_on_at_the_next_page(tmp_path, broken):
    # The parser is given a megabyte at a time: a break in the middle of one, and pages behind it in the next.
    bodies = [words_of(number) + " ä" for number in range(2400)]
    bodies[700] = broken
    pages = [PAGE.format(number, body).encode("utf-8", "surrogateescape") for number, body in enumerate(bodies)]
    head = b'<mediawiki xml:lang="en"><siteinfo><base>https://en.wikipedia.org/wiki/Main</base></siteinfo>\n'
    data = head + b"".join(pages) + b"</mediawiki>"
    starts = len(head) + np.concatenate([[0], np.cumsum(list(map(len, pages)))[:-1]])
    rows = rows_of("x.xml", "mediawiki", data, tmp_path)
    assert outcomes(rows) == [(start, "broken_xml" if number == 700 else "") for number, start in enumerate(starts)]
    assert all(
        row["text"] == bodies[number] and row["lang"] == "en" and row["url"]
        for number, row in enumerate(rows)
        if number != 700
    )


def test_a_damaged_row_group_costs_its_rows_and_each_is_counted(tmp_path):
    texts = [words_of(number) for number in range(90)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "made", row_group_size=30, use_dictionary=False)
    data = bytearray((tmp_path / "made").read_bytes())
    column = pq.ParquetFile(tmp_path / "made").metadata.row_group(1).column(0)
    data[column.data_page_offset : column.data_page_offset + 30] = b"\xff" * 30
    rows = rows_of("x.parquet", "parquet", bytes(data), tmp_path)
    assert outcomes(rows) == [(number, "broken_parquet" if 30 <= number < 60 else "") for number in range(90)]


@pytest.mark.parametrize("form", ["jsonl", "web_archive", "mediawiki", "text", "html", "zip_text"])
def test_an_empty_file_is_counted(tmp_path, form):
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    data = {"mediawiki": b"<mediawiki/>", "zip_text": buffer.getvalue()}.get(form, b"")
    assert [row["reason"] for row in rows_of("x", form, data, tmp_path)] == ["empty_file"]
    assert form not in ("jsonl", "text") or outcomes(rows_of("x.gz", form, gzip.compress(b""), tmp_path)) == [
        (0, "empty_file")
    ]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_two_members_with_one_name_the_first_stays(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for text in ("one", "two"):
            archive.writestr("a.txt", text)
    rows = rows_of("x.zip", "zip_text", buffer.getvalue(), tmp_path)
    assert [(row["text"], row["reason"]) for row in rows] == [("one", ""), ("", "duplicate_id")]


@pytest.mark.parametrize(
    ("form", "name"), [("jsonl", "x.jsonl"), ("jsonl", "x.jsonl.gz"), ("text", "x.txt.zst"), ("mediawiki", "x.xml.bz2")]
)
def test_a_failing_disk_is_no_damage_of_the_data(tmp_path, form, name):
    (tmp_path / name).symlink_to("/proc/self/mem")  # every read of its first page is an input/output error
    rows = rows_of(name, form, None, tmp_path)
    assert [(row["stream"], row["detail"]) for row in rows] == [
        ("unreadable", f"{tmp_path / name}: Input/output error")
    ]


def test_what_stands_behind_a_damage_is_counted_and_stops_the_run(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "good.jsonl", [{"text": words_of(seed)} for seed in range(200)])
    members = [gzip.compress(b"".join(LINES[start : start + 100])) for start in range(0, len(LINES), 100)]
    members[2] = b"\xff" + members[2]
    packed = b"".join(members)
    (data / "bad.jsonl.gz").write_bytes(packed)
    sources = list_sources(data)
    with pytest.raises(
        ValueError,
        match=r"of \d+ bytes come after a damage .*max_rejected_share \(0.2\).*"
        r": bad\.jsonl\.gz at byte \d+: truncated_gzip \(.+\)\. Fetch",
    ):
        compute(ingest_documents, tmp_path / "home", sources=sources, recipe=INGEST, resources=RESOURCES)
    lenient = INGEST.model_copy(update={"max_rejected_share": 1.0})
    record = compute(ingest_documents, tmp_path / "home", sources=sources, recipe=lenient, resources=RESOURCES).record
    assert (
        record.num_lost_bytes == len(packed) - sum(map(len, members[:2])) - 2
        and record.num_documents == 400
        and record.rejected["truncated_gzip"] == 1
    )


def test_a_source_that_cannot_be_read_is_one_message(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "a.jsonl", [{"text": prose(seed)} for seed in range(20)])
    sources = list_sources(data)
    (data / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"source a\.jsonl cannot be read \(1 in all\): .*No such file.*mend the disk"):
        compute(ingest_documents, tmp_path / "home", sources=sources, recipe=INGEST, resources=RESOURCES)


def test_every_document_can_be_read_again_at_its_offset(tmp_path):
    """Each format's record is read back by hand from (source, offset)."""
    lines = [{"text": f"Zeile {number} mit Ümläuten"} for number in range(50)]
    joined = b"\xef\xbb\xbf" + b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\r\n" for line in lines)
    bodies = [f"Seite {number} ÄÖÜ" for number in range(50)]
    pages = (
        b"<mediawiki>"
        + b"".join(PAGE.format(number, body).encode() for number, body in enumerate(bodies))
        + b"</mediawiki>"
    )
    members = [gzip.compress(warc(f"http://a/{number}", f"<p>{body}")) for number, body in enumerate(bodies)]
    parts = [gzip.compress(joined[start : start + 700]) for start in range(0, len(joined), 700)]
    for form, name, data in (
        ("jsonl", "x.jsonl", joined),
        ("jsonl", "x.jsonl.gz", b"".join(parts)),
        ("web_archive", "x.warc.gz", b"".join(members)),
        ("mediawiki", "x.xml.bz2", bz2.compress(pages[:900]) + bz2.compress(pages[900:])),
        ("text", "x.txt", "".join(f"{body}\n" for body in bodies).encode()),
    ):
        rows = rows_of(name, form, data, tmp_path, 300 if form == "text" else BOUND)
        assert {row["stream"] for row in rows} == {"document"} and len({row["id"] for row in rows}) == len(rows) >= 3
        for row in rows:
            assert row["id"] == document_id(name, row["offset"], 0)
            if form == "web_archive":
                assert row["text"].encode() in zlib.decompressobj(31).decompress(data[row["offset"] :])
                continue
            plain = (
                gzip.decompress(data)
                if name.endswith(".gz")
                else bz2.decompress(data)
                if name.endswith(".bz2")
                else data
            )
            there = plain[row["offset"] :]
            record = there.splitlines()[0].decode("utf-8-sig") if form != "text" else there[: row["num_bytes"]].decode()
            stored = json.loads(record)["text"] if form == "jsonl" else record
            assert row["text"] in stored and (form == "mediawiki" or stored == row["text"])


def test_a_digest_of_words_is_taken_in_parts_and_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr("tasks.data.records.documents.DIGESTED_CHARS", 3)
    generator = np.random.default_rng(46)
    signs = list("ab \u0301\u2000\u2001\u0085\u1100\u1161\u11a8\n\u00a0e\u0323\x1c\u3000")
    for size in generator.integers(0, 40, size=2000):
        text = "".join(generator.choice(signs, size=size))
        naive = " ".join(unicodedata.normalize("NFC", text).split())
        assert content_digest(text) == hashlib.sha256(naive.encode()).hexdigest()


def test_a_long_text_of_short_words_is_digested_in_little_memory():
    text = "ab " * 1_500_000
    tracemalloc.start()
    content_digest(text)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000  # its words at once: more than 100 MB
    tracemalloc.stop()


def test_a_row_group_is_read_in_less_memory_than_it_has(tmp_path):
    noise = [np.random.default_rng(number).bytes(5000).hex() for number in range(6000)]
    pq.write_table(
        pa.table({"text": noise}),
        tmp_path / "x.parquet",
        compression="none",
        use_dictionary=False,
        row_group_size=10**6,
    )
    before = pa.total_allocated_bytes()
    held = [
        pa.total_allocated_bytes()
        for _ in parquet_lines("x", str(tmp_path / "x.parquet"), "", BOUND, lambda names: (names, ""))
    ]
    assert len(held) == 6000 and max(held) - before < 20_000_000 < (tmp_path / "x.parquet").stat().st_size // 2
