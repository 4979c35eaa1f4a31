"""Bodies of archived responses: gzip of several members, and UTF-16 without a byte order mark."""

from __future__ import annotations

import gzip
import time

import pytest

from tasks.data.readers.http_payloads import HttpResponse, PayloadError, decode_body, decode_text

PARTS = [b"<html><p>one" * 9000, b"", b"<p>two", b"<p>three" * 5000]
MEMBERS = [gzip.compress(part, mtime=0) for part in PARTS]
WHOLE = b"".join(PARTS)


def decoded(body: bytes, bound: int = 1_000_000, *, is_cut: bool = False) -> bytes:
    return decode_body(HttpResponse(200, {"content-encoding": "gzip"}, body), bound, is_cut=is_cut)


def test_every_member_of_a_gzip_body_is_read_and_what_is_no_member_is_left_out():
    assert decoded(b"".join(MEMBERS)) == gzip.decompress(b"".join(MEMBERS)) == WHOLE
    assert decoded(b"".join(MEMBERS) + b"\0\0 padding") == WHOLE


def test_the_bound_holds_for_all_members_together():
    assert decoded(b"".join(MEMBERS), len(WHOLE)) == WHOLE
    for body in (b"".join(MEMBERS), MEMBERS[0] + MEMBERS[3]):
        with pytest.raises(PayloadError, match="record_too_long"):
            decoded(body, len(gzip.decompress(body)) - 1)


def test_a_cut_member_is_refused_and_kept_where_the_crawler_cut_the_page():
    body = b"".join(MEMBERS)[:-9]
    with pytest.raises(PayloadError, match="broken_encoding"):
        decoded(body)
    given = decoded(body, is_cut=True)
    assert given.startswith(WHOLE[:-5000]) and WHOLE.startswith(given)


def test_a_body_of_many_members_is_read_in_time_that_grows_with_its_length():
    began = time.process_time()
    assert decoded(MEMBERS[1] * 100_000) == b""
    assert time.process_time() - began < 10


PAGE = "<html><body><p>Hello world</p></body></html>"


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("text/html; charset=utf-16le", PAGE.encode("utf-16-le"), PAGE),
        ("text/html; charset=utf-16", PAGE.encode("utf-16-le"), PAGE),
        ("text/html; charset=UTF-16BE", PAGE.encode("utf-16-be"), PAGE),
        ("text/html; charset=utf-8", b"one\0two", "one\0two"),
        ("text/html", b"one\0two", "one\0two"),
        ("text/html", b'<meta charset="utf-16">one\0', '<meta charset="utf-16">one\0'),
        ("text/html", '<meta charset="utf-16">é '.encode("latin-1"), '<meta charset="utf-16">é '),
    ],
)
def test_utf_16_is_read_as_the_header_says_and_a_page_that_names_it_in_ascii_is_not_in_it(content_type, body, text):
    assert decode_text(body, content_type) == text
