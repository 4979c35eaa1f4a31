"""Decodes the payload of an archived HTTP response to text: transfer and content codings, character set.

Archives often hold bodies that their crawler has decoded already, under headers that still name the coding. A body
that does not begin as its coding demands is taken as it is. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import codecs
import re
import zlib
from dataclasses import dataclass

BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
UTF16 = ("utf-16-le", "utf-16-be")
CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
META_BYTES = 4096
"""Bytes searched for a page's character set: four times what HTML demands, for pages that begin with long comments."""
META_CHARSET = re.compile(rb"<(?:meta\b[^>]*?|\?xml\b[^>]*?en)c(?:harset|oding)\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
HEADER_LINE = re.compile(r"^(content-type|content-encoding|transfer-encoding)[ \t]*:[ \t]*([^\r\n]*)", re.I | re.M)
STATUS = re.compile(r"[0-9]{1,9}")
CHUNK_SIZE = re.compile(rb"\s*([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
GZIP_START, GZIP_WINDOW = b"\x1f\x8b", 31
BLOCK_BYTES = 1 << 14
"""Coded bytes that are decompressed at once."""
MAX_REPLACED_SHARE = 0.01
"""Largest share of unreadable characters in a page: above it no declared or detected character set is the right one."""


class PayloadError(Exception):
    """Why a response gives no text: (reason, detail)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class HttpResponse:
    """A response as archived."""

    status: int
    headers: dict[str, str]
    """Content type and codings by lower-case names; the first of repeated ones."""
    body: bytes


def parse_response(block: bytes) -> HttpResponse:
    """Raises PayloadError `broken_http` where the block does not begin with a status line."""
    end, width = block.find(b"\r\n\r\n"), 4
    bare = block.find(b"\n\n", 0, len(block) if end < 0 else end)
    if bare >= 0:
        end, width = bare, 2
    elif end < 0:
        end, width = len(block), 0
    head = block[:end].decode("latin-1")
    first = head.partition("\n")[0].rstrip("\r")
    fields = first.split(None, 2)
    if len(fields) < 2 or not fields[0].upper().startswith(("HTTP/", "ICY")) or not STATUS.fullmatch(fields[1]):
        raise PayloadError("broken_http", f"the response begins with {first[:40]!r}")
    headers = {name.lower(): value for name, value in reversed(HEADER_LINE.findall(head))}
    return HttpResponse(int(fields[1]), headers, block[end + width :])


def decode_body(response: HttpResponse, max_bytes: int, *, is_cut: bool) -> bytes:
    """The body without its codings; if the crawler cut it (`is_cut`), what can be decoded."""
    body = response.body
    if "chunked" in response.headers.get("transfer-encoding", "").lower():
        body = _joined_chunks(body, is_cut=is_cut)
    for coding in reversed(response.headers.get("content-encoding", "").lower().split(",")):
        body = _decoded(body, coding.strip(), max_bytes, is_cut=is_cut)
    return body


def _joined_chunks(body: bytes, *, is_cut: bool) -> bytes:
    chunks, position = [], 0
    while size := CHUNK_SIZE.match(body, position):
        length = int(size[1], 16)
        if length == 0:
            return b"".join(chunks)
        chunk = body[size.end() : size.end() + length]
        is_whole = len(chunk) == length and body[size.end() + length : size.end() + length + 1] in (b"\r", b"\n", b"")
        if not is_whole and not chunks and not is_cut:
            return body  # a body without chunks that happens to begin with a hexadecimal number
        chunks.append(chunk)
        if not is_whole:
            break
        position = size.end() + length
    if not chunks:
        return body
    if is_cut:
        return b"".join(chunks)
    raise PayloadError(
        "broken_chunks", f"chunk {len(chunks)} of the body, at its byte {position}, is not whole or not the last"
    )


def _decoded(body: bytes, coding: str, max_bytes: int, *, is_cut: bool) -> bytes:
    if coding in ("", "identity", "none", "utf-8") or not body:
        return body
    if coding in ("gzip", "x-gzip"):
        return _inflated(body, GZIP_WINDOW, coding, max_bytes, is_cut=is_cut) if body.startswith(GZIP_START) else body
    if coding == "deflate":
        is_zlib = body[0] & 15 == 8 and len(body) > 1 and int.from_bytes(body[:2], "big") % 31 == 0
        return (
            body
            if body[:1] in b"<\r\n\t "
            else _inflated(body, 15 if is_zlib else -15, coding, max_bytes, is_cut=is_cut)
        )
    if coding in ("br", "zstd"):
        return (
            body
            if body.lstrip()[:1] == b"<"
            else _arrow_decoded(body, {"br": "brotli"}.get(coding, coding), max_bytes, is_cut=is_cut)
        )
    raise PayloadError("unknown_encoding", coding)


def _inflated(body: bytes, window: int, coding: str, max_bytes: int, *, is_cut: bool) -> bytes:
    try:
        decoded, is_whole = _inflated_members(body, window, max_bytes)
    except zlib.error as error:
        raise PayloadError("broken_encoding", f"{coding}: {error}") from error
    _check_size(len(decoded), max_bytes)
    if not is_whole and not is_cut:
        raise PayloadError("broken_encoding", f"{coding}: the body ends early, after {len(decoded)} decoded bytes")
    return bytes(decoded)


def _inflated_members(body: bytes, window: int, max_bytes: int) -> tuple[bytearray, bool]:
    """(at most max_bytes + 1 decoded bytes, whether the last stream is whole) of the stream at the body's start and, in
    gzip, of the members that follow it; other bytes after it are left out."""
    decoded, position = bytearray(), 0
    while True:
        inflate = zlib.decompressobj(window)
        # In blocks: zlib copies the bytes after a member, and a body may have a million members.
        while not inflate.eof and position < len(body) and len(decoded) <= max_bytes:
            block = body[position : position + BLOCK_BYTES]
            decoded += inflate.decompress(block, max_bytes + 1 - len(decoded))
            position += len(block) - len(inflate.unused_data) - len(inflate.unconsumed_tail)
        if not inflate.eof or window != GZIP_WINDOW or not body.startswith(GZIP_START, position):
            return decoded, inflate.eof


def _arrow_decoded(body: bytes, codec: str, max_bytes: int, *, is_cut: bool) -> bytes:
    import pyarrow as pa

    decoded = bytearray()
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            while len(decoded) <= max_bytes and (block := stream.read(1 << 16)):
                decoded += block
    except OSError as error:
        if not is_cut:
            raise PayloadError("broken_encoding", f"{codec}: {error}") from error
    _check_size(len(decoded), max_bytes)
    return bytes(decoded)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise PayloadError("record_too_long", f"more than {max_bytes} bytes after decoding (ingest.max_record_bytes)")


def decode_text(body: bytes, content_type: str) -> str:
    """Decode a body by the first of these that decodes all of it: byte order mark, UTF-8, the header's character set,
    the page's own declaration, detection.

    UTF-8 comes before declared sets: no other text decodes as UTF-8, while single-byte sets decode anything. A header's
    latin-1 comes after the page's declaration, since servers send it with every file. Where none decodes all of it, the
    one with the fewest U+FFFD is taken, as in browsers. Raises PayloadError `unknown_charset` above MAX_REPLACED_SHARE.
    """
    for mark, encoding in BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(encoding, errors="replace")
    is_ascii = body.isascii()
    if is_ascii and b"\x1b" not in body and b"\0" not in body:
        # ISO-2022-JP is ASCII with escapes, and English in UTF-16 is ASCII with NULs.
        return body.decode("ascii")
    declared = _declared(body, content_type)
    for encoding in dict.fromkeys([*declared, "utf-8"] if is_ascii else ["utf-8", *declared]):
        try:
            return body.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return _detected(body, declared)


def _declared(body: bytes, content_type: str) -> list[str]:
    """The character sets that header and page declare, by the WHATWG's table of labels (latin-1 means windows-1252), as
    Python's names, with windows-1252 last. A page that names UTF-16 in ASCII is not in it."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    header, page = CHARSET.search(content_type), META_CHARSET.search(body[:META_BYTES])
    labels = [header[1] if header else "", page[1].decode("latin-1") if page else ""]
    of_header, of_page = (map_encoding_to_html5(label, False) if label else None for label in labels)
    names = [of_header, None if of_page in UTF16 else of_page]
    return sorted(filter(None, names), key="cp1252".__eq__)


def _detected(body: bytes, declared: list[str]) -> str:
    from resiliparse.parse.encoding import detect_encoding

    detected = detect_encoding(body)
    candidates = dict.fromkeys([name for name in (detected, *declared, "utf-8") if name])
    texts = [body.decode(name, errors="replace") for name in candidates]
    text = min(texts, key=lambda text: text.count("\ufffd"))
    if text.count("\ufffd") > MAX_REPLACED_SHARE * len(text):
        raise PayloadError(
            "unknown_charset", f"declared {', '.join(declared) or 'none'}, detected {detected or 'none'}"
        )
    return text
