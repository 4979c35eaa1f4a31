"""Numbers and archives that no sound writer makes: such a record costs only itself."""

from __future__ import annotations

import io
import zipfile

import pytest

from tasks.data.readers.text_records import zip_records
from tests.data.readers.test_archives import outcomes, pages, warc

GOOD, LAST = warc("http://a/good", "<p>one"), warc("http://a/last", "<p>two")
OUTCOMES = [("http://a/good", ""), ("http://a/last", "")]
NUMBER = "1" * 5000
"""More digits than Python reads as a number."""


@pytest.mark.parametrize("status", [b"\xb2", NUMBER.encode(), b"-200", b"20x"])
def test_a_status_that_is_no_number_costs_its_record(status):
    blank = "~" * len(status)
    odd = warc("http://a/odd", "<p>x", http=f"HTTP/1.1 {blank} OK\r\nContent-Type: text/html")
    odd = odd.replace(blank.encode(), status)
    assert outcomes(GOOD + odd + LAST) == [OUTCOMES[0], ("http://a/odd", "broken_http"), OUTCOMES[1]]


@pytest.mark.parametrize("length", [NUMBER, "1" * 19, "-5", "²"])
def test_a_length_that_is_no_number_costs_its_record(length):
    right = warc("http://a/odd", "<p>x", length=77)
    odd = right.replace(b"Content-Length: 77", f"Content-Length: {length}".encode())
    assert outcomes(GOOD + odd + LAST) == [OUTCOMES[0], ("http://a/odd", "broken_record"), OUTCOMES[1]]
    assert len(next(page.detail for page in pages(GOOD + odd + LAST) if page.reason)) < 150


@pytest.mark.parametrize("length", [NUMBER[:3000], "x5", "1" * 19])
def test_a_length_of_an_arc_record_that_is_no_number_costs_its_record(length):
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>page"
    first, odd, last = (
        f"http://a/{name} 1.2.3.4 20200101000000 text/html {size}\n".encode() + block + b"\n"
        for name, size in (("good", len(block)), ("odd", length), ("last", len(block)))
    )
    assert outcomes(first + odd + last, name="x.arc") == [OUTCOMES[0], ("neither", "broken_record"), OUTCOMES[1]]


def zipped(method: int = zipfile.ZIP_STORED, names: tuple[str, ...] = ("a.txt", "b.txt")) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in names:
            archive.writestr(name, f"text of {name} " * 50)
    return buffer.getvalue()


def reasons(data: bytes, directory) -> list[str]:
    (directory / "x.zip").write_bytes(data)
    return [record.reason for record in zip_records("x.zip", str(directory / "x.zip"), "", 1 << 20)]


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_of_any_compression_costs_only_itself(method, tmp_path):
    data = zipped(method)
    assert reasons(data, tmp_path) == ["", ""]
    for at in range(45, 52):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        assert reasons(bytes(damaged), tmp_path) == ["broken_zip", ""], at


def test_an_archive_whose_directory_cannot_be_read_is_refused(tmp_path):
    garbled = zipped(names=("é.txt",)).replace("é".encode(), b"\xe9A")
    assert reasons(garbled, tmp_path) == ["broken_zip"]
    data = bytearray(zipped())
    data[data.find(b"PK\1\2") + 6] = 200
    assert reasons(bytes(data), tmp_path) == ["broken_zip"], "a version that Python does not know"


def test_a_member_without_a_name_is_refused(tmp_path):
    data = zipped(names=("Qa.txt", "b.txt")).replace(b"Qa.txt", b"\0a.txt")
    assert reasons(data, tmp_path) == ["broken_zip", ""]
