"""Reads MediaWiki XML dumps page by page, in memory bounded by one page. Runs in executors: imports no Spark.

Pages of the main name space are documents in their newest revision; `offset` is the byte of `<page>`, decompressed. A document type is
refused: no dump has one, and entities that it could declare grow without bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit
from xml.parsers import expat

from tasks.data.documents import WIKITEXT
from tasks.data.parsed_records import Parsed, rejection, too_long
from tasks.data.source_bytes import GARBLED, HashingReader, blocks, codec_of, decompressed

FIELDS = ("title", "ns", "id", "text", "timestamp", "model", "base")
MAIN = "0"
WIKIMEDIA = (
    "wikipedia.org", "wiktionary.org", "wikibooks.org", "wikiquote.org", "wikisource.org", "wikiversity.org", "wikivoyage.org",
    "wikinews.org", "wikimedia.org",
)  # fmt: skip
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
    """Bytes of a text above the bound."""


class _DumpReader:
    """Handlers of an XML parser, which leave finished pages in `ready`."""

    def __init__(self, max_record_bytes: int) -> None:
        self.ready: list[_Page] = []
        self.base, self.lang = "", ""
        self.page: _Page | None = None
        self._max_bytes, self._text_start = max_record_bytes, 0
        self._open: list[str] = []
        self._parts: list[str] = []
        self.parser = expat.ParserCreate()
        self.parser.buffer_text, self.parser.buffer_size = True, 1 << 20
        self.parser.StartElementHandler, self.parser.EndElementHandler = self._start, self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._refuse

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._open.append(name)
        self._parts.clear()
        if name == "page":
            self.page = _Page(self.parser.CurrentByteIndex)
        elif name == "redirect" and self.page:
            self.page.is_redirect = True
        elif name == "mediawiki":
            self.lang = attributes.get("xml:lang", "")
        elif name == "text":
            self._text_start = self.parser.CurrentByteIndex
            if self.page:
                self.page.num_skipped = 0

    def _characters(self, text: str) -> None:
        if self._open[-1] not in FIELDS:
            return
        if self._open[-1] == "text" and self.page and self.parser.CurrentByteIndex - self._text_start > self._max_bytes:
            self._parts.clear()
            self.page.num_skipped = self.parser.CurrentByteIndex - self._text_start
        else:
            self._parts.append(text)

    def _end(self, name: str) -> None:
        self._open.pop()
        parent = self._open[-1] if self._open else ""
        if name == "page" and self.page:
            self.ready.append(self.page)
            self.page = None
        elif name == "base":
            self.base = "".join(self._parts)
        elif self.page and name in FIELDS and (parent == "revision" or (parent == "page" and name in ("title", "ns", "id"))):
            key = "revision" if (name, parent) == ("id", "revision") else name
            self.page.values[key] = "".join(self._parts)
        self._parts.clear()

    def _refuse(self, *_: object) -> None:
        raise _RefusedError("a document type is declared, which no dump needs")


def wiki_pages(name: str, file: HashingReader, lang: str, max_record_bytes: int) -> Iterator[Parsed]:
    """The articles of a dump as wikitext."""
    dump = _DumpReader(max_record_bytes)
    try:
        for block in blocks(decompressed(name, file)):
            dump.parser.Parse(block)
            yield from (_article(name, page, dump, lang, max_record_bytes) for page in dump.ready)
            dump.ready.clear()
        dump.parser.Parse(b"", True)
    except (expat.ExpatError, _RefusedError) as error:
        yield from (_article(name, page, dump, lang, max_record_bytes) for page in dump.ready)
        yield rejection(name, dump.page.offset if dump.page else dump.parser.ErrorByteIndex, "broken_xml", str(error))
    except GARBLED as error:
        offset = dump.page.offset if dump.page else max(0, dump.parser.CurrentByteIndex)
        yield rejection(name, offset, f"truncated_{codec_of(name) or 'file'}", str(error))


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
        name, page.offset, text, _url(dump.base, title), _licence(dump.base, values.get("timestamp", "")), lang or dump.lang,
        markup=WIKITEXT, key=values.get("id", ""),
    )  # fmt: skip


def _url(base: str, title: str) -> str:
    """`base` is the address of the main page."""
    return f"{base.rpartition('/')[0]}/{quote(title.replace(' ', '_'), safe=':/,()!*;@$-._~')}" if base and title else ""


def _licence(base: str, timestamp: str) -> str:
    host = urlsplit(base).hostname or ""
    if not host.endswith(WIKIMEDIA):
        return ""
    return "CC-BY-SA-4.0" if timestamp >= NEW_LICENCE_SINCE else "CC-BY-SA-3.0"
