"""Reads MediaWiki XML dumps page by page, in memory bounded by one page. Runs in executors: imports no Spark.

Pages of the main name space are documents in their newest revision; `offset` is the byte of `<page>`, decompressed.
After what is no XML, reading goes on at the next `<page>`. A document type is refused: no dump has one, and entities
that it could declare grow without bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit
from xml.parsers import expat

from tasks.data.readers.parsed_records import Parsed, rejection, too_long
from tasks.data.readers.source_bytes import GARBLED, HashingReader, blocks, codec_of, decompressed
from tasks.data.records.documents import WIKITEXT

FIELDS = ("title", "ns", "id", "text", "timestamp", "model", "base")
MAIN = "0"
PAGE, ROOT = b"<page>", b"<mediawiki>"
WIKIMEDIA = (
    "wikipedia.org",
    "wiktionary.org",
    "wikibooks.org",
    "wikiquote.org",
    "wikisource.org",
    "wikiversity.org",
    "wikivoyage.org",
    "wikinews.org",
    "wikimedia.org",
)
NEW_LICENCE_SINCE = "2023-06-07"
"""The day on which Wikimedia's terms of use went from CC BY-SA 3.0 to 4.0."""


class _RefusedError(Exception):
    """The file declares a document type."""


@dataclass
class _Page:
    offset: int
    values: dict[str, str] = field(default_factory=dict)
    is_redirect: bool = False
    num_skipped: int = 0
    """Bytes of a text that is too long and was skipped; 0 for others."""


@dataclass(frozen=True)
class _Break:
    """Byte at which the dump is no XML, and why; the page around it is lost."""

    offset: int
    detail: str


class _DumpReader:
    """An XML parser over the blocks of a dump; a new parser begins after each break."""

    def __init__(self, max_record_bytes: int) -> None:
        self.base, self.lang = "", ""
        self._ready: list[_Page] = []
        self._page: _Page | None = None
        self._max_bytes, self._text_start = max_record_bytes, 0
        self._position, self._tail, self._is_lost = 0, b"", False
        self._start_parser(0)

    def read(self, data: bytes) -> Iterator[_Page | _Break]:
        """The pages that end in the next bytes of the dump, and a break where they are no XML."""
        data, at = self._tail + data, self._position - len(self._tail)
        self._position, self._tail = at + len(data), b""
        while data:
            if self._is_lost:
                start = data.find(PAGE)
                if start < 0:
                    self._tail = data[1 - len(PAGE) :]
                    return
                data, at = data[start:], at + start
                self._start_parser(at - len(ROOT))
                self._parser.Parse(ROOT)
            try:
                self._parser.Parse(data)
                data = b""
            except expat.ExpatError as error:
                yield from self._finished()
                broken_at = self._origin + self._parser.ErrorByteIndex
                yield _Break(self._page.offset if self._page else broken_at, str(error))
                skipped = max(0, broken_at - at) + 1
                data, at, self._is_lost = data[skipped:], at + skipped, True
        yield from self._finished()

    def position(self) -> int:
        """Byte at which the unfinished page begins, or, without one, at which the parser is."""
        return self._page.offset if self._page else max(0, self._origin + self._parser.CurrentByteIndex)

    def end(self) -> Iterator[_Page | _Break]:
        """The pages that the end of the dump completes, and a break where the end is missing."""
        try:
            if not self._is_lost:
                self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            yield _Break(self.position(), str(error))
        yield from self._finished()

    def _finished(self) -> Iterator[_Page]:
        yield from self._ready
        self._ready.clear()

    def _start_parser(self, origin: int) -> None:
        """`origin`: offset in the dump of the parser's first byte."""
        self._origin, self._page, self._is_lost = origin, None, False
        self._open: list[str] = []
        self._parts: list[str] = []
        self._parser = expat.ParserCreate()
        self._parser.buffer_text, self._parser.buffer_size = True, 1 << 20
        self._parser.StartElementHandler, self._parser.EndElementHandler = self._start, self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.StartDoctypeDeclHandler = self._refuse

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._open.append(name)
        self._parts.clear()
        if name == "page":
            self._page = _Page(self._origin + self._parser.CurrentByteIndex)
        elif name == "redirect" and self._page:
            self._page.is_redirect = True
        elif name == "mediawiki":
            self.lang = attributes.get("xml:lang", self.lang)
        elif name == "text":
            self._text_start = self._parser.CurrentByteIndex
            if self._page:
                self._page.num_skipped = 0

    def _characters(self, text: str) -> None:
        if self._open[-1] not in FIELDS:
            return
        if (
            self._open[-1] == "text"
            and self._page
            and self._parser.CurrentByteIndex - self._text_start > self._max_bytes
        ):
            self._parts.clear()
            self._page.num_skipped = self._parser.CurrentByteIndex - self._text_start
        else:
            self._parts.append(text)

    def _end(self, name: str) -> None:
        self._open.pop()
        parent = self._open[-1] if self._open else ""
        if name == "page" and self._page:
            self._ready.append(self._page)
            self._page = None
        elif name == "base":
            self.base = "".join(self._parts)
        elif (
            self._page
            and name in FIELDS
            and (parent == "revision" or (parent == "page" and name in ("title", "ns", "id")))
        ):
            key = "revision" if (name, parent) == ("id", "revision") else name
            self._page.values[key] = "".join(self._parts)
        self._parts.clear()

    def _refuse(self, *_: object) -> None:
        raise _RefusedError("a document type is declared, which no dump needs")


def wiki_pages(name: str, file: HashingReader, lang: str, max_record_bytes: int) -> Iterator[Parsed]:
    """The articles of a dump as wikitext."""
    dump = _DumpReader(max_record_bytes)
    try:
        for item in _read_all(dump, name, file):
            if isinstance(item, _Break):
                yield rejection(name, item.offset, "broken_xml", item.detail)
            else:
                yield _article(name, item, dump, lang, max_record_bytes)
    except _RefusedError as error:
        file.broken_at = 0
        yield rejection(name, 0, "broken_xml", str(error))
    except GARBLED as error:
        yield rejection(name, dump.position(), f"truncated_{codec_of(name)}", str(error))


def _read_all(dump: _DumpReader, name: str, file: HashingReader) -> Iterator[_Page | _Break]:
    for block in blocks(decompressed(name, file)):
        yield from dump.read(block)
    yield from dump.end()


def _article(name: str, page: _Page, dump: _DumpReader, lang: str, max_record_bytes: int) -> Parsed:
    values, text = page.values, page.values.get("text")
    title = values.get("title", "")
    if page.num_skipped:
        return too_long(name, page.offset, page.num_skipped, max_record_bytes)
    if values.get("ns", MAIN) != MAIN:
        return rejection(name, page.offset, "other_namespace", title)
    if page.is_redirect or (text or "").lstrip()[:9].upper() == "#REDIRECT":
        return rejection(name, page.offset, "redirect", title)
    if values.get("model", "wikitext") != "wikitext":
        return rejection(name, page.offset, "not_wikitext", f"{title}: {values['model']}")
    if text is None:
        return rejection(name, page.offset, "no_text", title)
    if not text.strip():
        return rejection(name, page.offset, "empty", title)
    return Parsed(
        name,
        page.offset,
        text,
        _url(dump.base, title),
        _licence(dump.base, values.get("timestamp", "")),
        lang or dump.lang,
        markup=WIKITEXT,
        key=values.get("id", ""),
    )


def _url(base: str, title: str) -> str:
    """`base` is the address of the main page."""
    return (
        f"{base.rpartition('/')[0]}/{quote(title.replace(' ', '_'), safe=':/,()!*;@$-._~')}" if base and title else ""
    )


def _licence(base: str, timestamp: str) -> str:
    host = urlsplit(base).hostname or ""
    if not host.endswith(WIKIMEDIA):
        return ""
    return "CC-BY-SA-4.0" if timestamp >= NEW_LICENCE_SINCE else "CC-BY-SA-3.0"
