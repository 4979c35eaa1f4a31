"""Web archives: read like the reference library reads them, with their addresses, and past every damage."""

from __future__ import annotations

import gzip
import io
import json
import time
import tracemalloc
import zlib

import pyarrow as pa
import pytest
from warcio.archiveiterator import ArchiveIterator

from tasks.data.readers.archive_records import archive_records
from tasks.data.readers.http_payloads import HttpResponse, PayloadError, decode_body, decode_text, parse_response
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.web_archives import archive_pages
from tests.support.data_inputs import SHARED_DATA

ARCHIVES = SHARED_DATA / "warc"
REAL = pytest.mark.skipif(not ARCHIVES.is_dir(), reason="../shared/data is not there")
BOUND = 50_000_000
OPEN = [
    path.name
    for path in sorted(ARCHIVES.glob("*.warc*"))
    if "bad-non-chunked" not in path.name and "wrong-chunks" not in path.name
]
"""Those that the reference library reads."""


def warc(
    url: str, body: str | bytes, *, http: str = "HTTP/1.1 200 OK\r\nContent-Type: text/html", length: int | None = None
) -> bytes:
    """A response record."""
    data = body.encode() if isinstance(body, str) else body
    block = http.encode() + b"\r\n\r\n" + data
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nContent-Type: application/http; "
        f"msgtype=response\r\n"
    )
    return (
        head.encode()
        + f"Content-Length: {len(block) if length is None else length}\r\n\r\n".encode()
        + block
        + b"\r\n\r\n"
    )


def pages(data: bytes, name: str = "x.warc.gz", bound: int = BOUND):
    return list(archive_pages(name, HashingReader(io.BytesIO(data)), bound))


def outcomes(data: bytes, **given) -> list[tuple[str, str]]:
    """(url or the detail's first word, reason) of every document and rejection."""
    return [(page.url or page.detail.split(" ")[0], page.reason) for page in pages(data, **given)]


@REAL
@pytest.mark.parametrize("name", OPEN)
def test_real_archives_give_the_bodies_and_offsets_that_the_reference_library_gives(name):
    expected = {}
    with open(ARCHIVES / name, "rb") as file:
        iterator = ArchiveIterator(file)
        for record in iterator:
            body = record.content_stream().read()
            expected[record.rec_headers.get_header("WARC-Record-ID")] = (iterator.get_record_offset(), body)
    with open(ARCHIVES / name, "rb") as file:
        for record in archive_records(name, HashingReader(file), BOUND):
            offset, body = expected.pop(record.headers[b"warc-record-id"].decode())
            assert (record.inside or record.member) == offset
            if record.headers[b"warc-type"] == b"response" and not record.reason:
                assert decode_body(parse_response(record.block), BOUND, is_cut=False) == body
    assert not expected


@REAL
def test_an_offset_is_where_the_record_can_be_read_alone():
    data = (ARCHIVES / "dolma_sample-0000.warc.gz").read_bytes()
    read = pages(data)
    assert len(read) == 22 and all(page.markup == "html" and not page.reason for page in read)
    for page in read:
        assert f"WARC-Target-URI: <{page.url}>\r\n".encode() in zlib.decompressobj(31).decompress(data[page.offset :])


@REAL
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("warcio_example-bad-non-chunked.warc.gz", [("warcio_example-bad-non-chunked.warc.gz!0", 1197, "")]),
        ("warcio_example-iana.org-chunked.warc", [("warcio_example-iana.org-chunked.warc", 405, "")]),
        ("warcio_example-trunc.warc", [("warcio_example-trunc.warc", 1197, "wrong_content_length")]),
        ("warcio_example-wrong-chunks.warc.gz", [("warcio_example-wrong-chunks.warc.gz", 0, "")]),
        ("warcio_example.warc", [("warcio_example.warc", 1197, "")]),
        ("warcio_example.warc.gz", [("warcio_example.warc.gz", 784, "")]),
        ("warcio_post-test.warc.gz", [("warcio_post-test.warc.gz", offset, "not_text") for offset in (0, 1196, 2395)]),
        ("whirlwind.warc.gz", [("whirlwind.warc.gz", 1023, "")]),
        ("whirlwind.warc.wet", [("whirlwind.warc.wet", 635, "")]),
        ("whirlwind.warc.wat", [("whirlwind.warc.wat", 545, "no_text")]),
    ],
)
def test_every_real_edge_case_is_read_or_has_its_reason_and_address(name, expected):
    read = pages((ARCHIVES / name).read_bytes(), name)
    assert [(page.source, page.offset, page.reason) for page in read] == expected
    assert all(page.url.startswith("http") for page in read if not page.reason)


def test_a_long_line_that_is_almost_a_header_is_read_once():
    """Tried at every space, a line of 22 KB took 9 seconds."""
    content = (
        b"filedesc://x.arc 127.0.0.1 20091121004501 text/plain 1\n\n\n" + (b"a:" + b" 1 11111111" * 20_000 + b" \n") * 4
    )
    began = time.process_time()
    assert pages(content, "x.arc")[-1].reason
    assert time.process_time() - began < 5


@REAL
def test_a_page_and_its_plain_text_have_one_address():
    (page,), (text,) = (pages((ARCHIVES / f"whirlwind.warc.{form}").read_bytes()) for form in ("gz", "wet"))
    assert page.url == text.url and (page.markup, text.markup) == ("html", "")
    assert "Biquipedia, a enciclopedia libre" in page.text and text.text.startswith("Escopete - ")


@REAL
@pytest.mark.parametrize("is_gzip", [False, True])
def test_an_arc_file_is_read_with_the_character_set_of_each_page(is_gzip):
    with gzip.open(ARCHIVES / "commoncrawl_2010_pages.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    content = b"1 0 CommonCrawl\nURL IP-address Archive-date Content-type Archive-length\n"
    members = [b"filedesc://x.arc.gz 127.0.0.1 20091121004501 text/plain %d\n" % len(content) + content + b"\n"]
    for row in rows:
        block = row["http_headers"].strip().encode("latin-1") + b"\r\n\r\n" + row["body_latin1"].encode("latin-1")
        members.append(
            f"{row['url']} 10.0.0.1 {row['crawl_time']} {row['mime']} {len(block)}\n".encode() + block + b"\n"
        )
    data = b"".join(map(gzip.compress, members)) if is_gzip else b"".join(members)
    read = pages(data, "x.arc.gz")
    assert [page.url for page in read] == [row["url"] for row in rows] and not [page for page in read if page.reason]
    for page, row in zip(read, rows, strict=True):
        assert page.text.isascii() or page.text.count("\ufffd") < 0.001 * len(page.text)
        stored = zlib.decompressobj(31).decompress(data[page.offset :]) if is_gzip else data[page.offset :]
        assert stored.startswith(row["url"].encode())


def test_what_is_no_page_of_text_has_a_reason_and_what_is_no_document_is_passed_by():
    other = (
        b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Target-URI: %s\r\nContent-Type: %s\r\nContent-Length: 4\r\n\r\nbody\r\n\r\n"
    )
    data = b"".join(
        [
            warc("http://a/ok", "<p>text"),
            warc("http://a/gone", "x", http="HTTP/1.1 404 Not Found\r\nContent-Type: text/html"),
            warc("http://a/moved", "x", http="HTTP/1.1 301 Moved\r\nLocation: /"),
            warc("http://a/blank", " \n"),
            warc("http://a/png", b"\x89PNG", http="HTTP/1.1 200 OK\r\nContent-Type: image/png"),
            warc(
                "http://a/plain",
                "text",
                http="HTTP/1.1 200 OK\nContent-Type: text/plain; charset=utf-8".replace("\n", "\r\n"),
            ),
            warc("http://a/untyped", "<!doctype html><html>x", http="HTTP/1.0 200 OK"),
            warc("http://a/odd", "x", http="hello"),
            other % (b"request", b"http://a/ok", b"application/http"),
            other % (b"metadata", b"http://a/ok", b"application/warc-fields"),
            other % (b"revisit", b"http://a/ok", b"application/http"),
            other % (b"response", b"dns:a", b"text/dns"),
            other % (b"resource", b"metadata://gnu.org/wget.log", b"text/plain"),
            other % (b"resource", b"file:///a", b"text/plain"),
        ]
    )
    assert outcomes(data) == [
        ("http://a/ok", ""),
        ("http://a/gone", "http_status"),
        ("http://a/moved", "http_status"),
        ("http://a/blank", "empty"),
        ("http://a/png", "not_text"),
        ("http://a/plain", ""),
        ("http://a/untyped", ""),
        ("http://a/odd", "broken_http"),
        ("file:///a", ""),
    ]


URLS = [f"http://a/{number}" for number in range(6)]
RECORDS = [warc(url, f"<p>{url} " + "word " * 500) for url in URLS]


@pytest.mark.parametrize(
    ("change", "reason"), [(change, "wrong_content_length") for change in (-7, 9, 4000, 10**6, 10**9)]
)
@pytest.mark.parametrize("is_gzip", [False, True])
def test_a_wrong_length_costs_one_record(change, reason, is_gzip):
    right = int(RECORDS[2].split(b"Content-Length: ")[1].split(b"\r\n")[0])
    wrong = warc(URLS[2], f"<p>{URLS[2]} " + "word " * 500, length=right + change)
    members = [*RECORDS[:2], wrong, *RECORDS[3:]]
    data = b"".join(map(gzip.compress, members)) if is_gzip else b"".join(members)
    assert outcomes(data) == [(url, reason if url == URLS[2] else "") for url in URLS]
    offset = sum(len(gzip.compress(member) if is_gzip else member) for member in members[:2])
    assert next(page.offset for page in pages(data) if page.reason) == offset


def test_a_cut_file_names_its_last_record_and_keeps_the_rest():
    plain = b"".join(RECORDS)
    assert outcomes(plain[:-1500]) == [*((url, "") for url in URLS[:5]), (URLS[5], "truncated_record")]
    zipped = b"".join(map(gzip.compress, RECORDS))
    read = pages(zipped[:-40])
    assert [page.reason for page in read] == [""] * 5 + ["truncated_gzip"] and read[5].offset == len(zipped) - len(
        gzip.compress(RECORDS[5])
    )


def test_a_damaged_member_costs_one_record():
    members = [bytearray(gzip.compress(record)) for record in RECORDS]
    members[3][60:64] = b"\xff\xff\xff\xff"
    read = pages(b"".join(members))
    assert [page.reason for page in read] == ["", "", "", "truncated_gzip", "", ""]
    assert read[3].offset == sum(map(len, members[:3]))


def test_records_that_share_a_member_have_addresses_of_their_own():
    read = pages(gzip.compress(b"".join(RECORDS[:3])) + gzip.compress(b"".join(RECORDS[3:])))
    assert [page.url for page in read] == URLS and len({(page.source, page.offset) for page in read}) == 6
    second = len(gzip.compress(b"".join(RECORDS[:3])))
    assert [(page.source, page.offset) for page in read[:2]] == [("x.warc.gz", 0), ("x.warc.gz!0", len(RECORDS[0]))]
    assert [(page.source, page.offset) for page in read[3:5]] == [
        ("x.warc.gz", second),
        (f"x.warc.gz!{second}", len(RECORDS[3])),
    ]


def test_a_record_above_the_bound_is_passed_over_without_being_held():
    data = b"".join(
        gzip.compress(record) for record in (RECORDS[0], warc("http://a/long", b"x" * 80_000_000), RECORDS[1])
    )
    tracemalloc.start()
    assert outcomes(data, bound=1_000_000) == [(URLS[0], ""), ("http://a/long", "record_too_long"), (URLS[1], "")]
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_junk_is_one_rejection_and_an_empty_archive_none():
    assert outcomes(b"\x00\x01binary junk" * 1000, name="x.warc") == [("neither", "broken_record")]
    assert outcomes(b"junk\r\n" + RECORDS[0], name="x.warc") == [("neither", "broken_record"), (URLS[0], "")]
    assert pages(b"") == []


TEXT = b"<html>" + b"Some text to be coded. " * 200
CHUNKED = b"".join(
    b"%x;x=y\r\n%s\r\n" % (len(TEXT[start : start + 999]), TEXT[start : start + 999])
    for start in range(0, len(TEXT), 999)
)
ZIPPED = gzip.compress(TEXT, mtime=0)
RAW_DEFLATE = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("headers", "body", "reason"),
    [
        ({"transfer-encoding": "chunked"}, CHUNKED + b"0\r\n\r\n", ""),
        ({"transfer-encoding": "chunked"}, TEXT, ""),
        ({"transfer-encoding": "chunked"}, CHUNKED, "broken_chunks"),
        ({"transfer-encoding": "chunked"}, CHUNKED[:-500], "broken_chunks"),
        ({"content-encoding": "gzip"}, ZIPPED, ""),
        ({"content-encoding": "gzip"}, TEXT, ""),
        ({"content-encoding": "gzip"}, ZIPPED[:-20], "broken_encoding"),
        (
            {"content-encoding": "gzip", "transfer-encoding": "chunked"},
            b"%x\r\n%s\r\n0\r\n" % (len(ZIPPED), ZIPPED),
            "",
        ),
        ({"content-encoding": "deflate"}, zlib.compress(TEXT), ""),
        ({"content-encoding": "deflate"}, RAW_DEFLATE.compress(TEXT) + RAW_DEFLATE.flush(), ""),
        ({"content-encoding": "br"}, pa.compress(TEXT, "brotli", asbytes=True), ""),
        ({"content-encoding": "br"}, pa.compress(TEXT, "brotli", asbytes=True)[:-9], "broken_encoding"),
        ({"content-encoding": "zstd"}, pa.compress(TEXT, "zstd", asbytes=True), ""),
        ({"content-encoding": "gzip"}, gzip.compress(b"x" * 6000, mtime=0), "record_too_long"),
        ({"content-encoding": "compress"}, TEXT, "unknown_encoding"),
    ],
)
def test_codings_are_undone_or_refused_by_name(headers, body, reason):
    response = HttpResponse(200, headers, body)
    if reason:
        with pytest.raises(PayloadError) as caught:
            decode_body(response, 5000, is_cut=False)
        assert caught.value.reason == reason
    else:
        assert decode_body(response, 5000, is_cut=False) in (TEXT, body)
        assert b"Some text to be coded." in decode_body(response, 5000, is_cut=False)


def test_a_page_that_its_crawler_cut_keeps_what_is_there():
    whole = gzip.compress(TEXT * 5)
    assert decode_body(HttpResponse(200, {"content-encoding": "gzip"}, whole[:-30]), BOUND, is_cut=True).startswith(
        b"<html>Some"
    )
    assert (
        decode_body(HttpResponse(200, {"transfer-encoding": "chunked"}, CHUNKED[:-502]), BOUND, is_cut=True)
        == TEXT[:-500]
    )


RUSSIAN, GERMAN, JAPANESE = (
    "Привет, мир! Как у вас дела сегодня? " * 5,
    "Größe, Straße und „Käse“ " * 5,
    "これは日本語のページです。文字コードを調べます。" * 5,
)
SHIFT_JIS, EUC_JP = f'<meta charset="shift_jis">{JAPANESE}', f'<?xml version="1.0" encoding="euc-jp"?>{JAPANESE}'


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("text/html; charset=windows-1251", RUSSIAN.encode("cp1251"), RUSSIAN),
        ("text/html; charset=iso-8859-1", GERMAN.encode("cp1252"), GERMAN),
        ("text/html", SHIFT_JIS.encode("shift_jis"), SHIFT_JIS),
        ("text/html", EUC_JP.encode("euc-jp"), EUC_JP),
        ("text/html; charset=iso-8859-1", b"\xef\xbb\xbf" + GERMAN.encode(), GERMAN),
        ("text/html", b"\xff\xfe" + GERMAN.encode("utf-16-le"), GERMAN),
        ("text/html", GERMAN.encode(), GERMAN),
        ("text/html; charset=utf-8", RUSSIAN.encode("cp1251"), RUSSIAN),
        ("text/html", RUSSIAN.encode("koi8-r"), RUSSIAN),
        ("text/html; charset=unheard-of", GERMAN.encode(), GERMAN),
        ("text/html; charset=windows-1251", GERMAN.encode(), GERMAN),
        ("text/html", b'<meta charset="gb18030">' + JAPANESE.encode(), f'<meta charset="gb18030">{JAPANESE}'),
        ("text/html; charset=iso-8859-1", EUC_JP.encode("euc-jp"), EUC_JP),
        (
            "text/html; charset=windows-1251",
            b'<meta charset="gb2312">' + RUSSIAN.encode("cp1251"),
            f'<meta charset="gb2312">{RUSSIAN}',
        ),
        ("text/html; charset=iso-2022-jp", JAPANESE.encode("iso-2022-jp"), JAPANESE),
        ("text/html", b"\x1b[1mbold\x1b[0m", "\x1b[1mbold\x1b[0m"),
    ],
)
def test_character_sets(content_type, body, text):
    assert decode_text(body, content_type) == text


def test_one_broken_byte_costs_one_character_and_noise_the_page():
    broken = (RUSSIAN * 20).encode() + b"\xff" + (RUSSIAN * 20).encode()
    assert decode_text(broken, "text/html; charset=utf-8") == RUSSIAN * 20 + "\ufffd" + RUSSIAN * 20
    noise = bytes(range(128, 256)) * 20
    with pytest.raises(PayloadError, match="unknown_charset"):
        decode_text(noise, "text/html; charset=utf-8")
