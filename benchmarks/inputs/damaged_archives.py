"""Small web archives, each with one damage in its third of six pages, or of another format."""

from __future__ import annotations

import gzip
from collections.abc import Callable

URLS = tuple(f"http://a/{number}" for number in range(6))
BODY = "<p>{} " + "word " * 500
DAMAGED = 2


def _block(url: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n{BODY.format(url)}".encode()


def record(url: str, change: int = 0) -> bytes:
    """A response record whose Content-Length is wrong by so many bytes."""
    block = _block(url)
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block) + change}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def _members(damage: Callable[[bytes], bytes], pack: Callable[[bytes], bytes] = bytes) -> bytes:
    return b"".join(
        damage(pack(record(url))) if number == DAMAGED else pack(record(url)) for number, url in enumerate(URLS)
    )


def _with_length(change: int) -> bytes:
    return b"".join(record(url, change if number == DAMAGED else 0) for number, url in enumerate(URLS))


def _flipped(data: bytes, at: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 0x55
    return bytes(damaged)


def _arc() -> bytes:
    content = b"1 0 CommonCrawl\nURL IP-address Archive-date Content-type Archive-length\n"
    records = [b"filedesc://x.arc 127.0.0.1 20091121004501 text/plain %d\n" % len(content) + content + b"\n"]
    for url in URLS:
        block = _block(url)
        records.append(f"{url} 10.0.0.1 20091121004501 text/html {len(block)}\n".encode() + block + b"\n")
    return b"".join(records)


def damaged_archives() -> dict[str, tuple[bytes, int]]:
    """(archive, pages that are whole in it) by the damage's name."""
    num_others = len(URLS) - 1
    return {
        "none": (_members(bytes), len(URLS)),
        "length missing": (_members(lambda data: data.replace(b"Content-Length", b"X-Length")), num_others),
        "length 7 too small": (_with_length(-7), num_others),
        "length 9 too large": (_with_length(9), num_others),
        "length 1,000,000 too large": (_with_length(10**6), num_others),
        "gzip member: a byte flipped": (_members(lambda data: _flipped(data, 60), gzip.compress), num_others),
        "gzip member: wrong checksum": (_members(lambda data: _flipped(data, -6), gzip.compress), num_others),
        "gzip member: cut": (_members(lambda data: data[:-40], gzip.compress), num_others),
        "file cut": (b"".join(map(record, URLS))[:-1500], num_others),
        "junk before the first record": (b"junk\r\n" + _members(bytes), len(URLS)),
        "an ARC file": (_arc(), len(URLS)),
    }
