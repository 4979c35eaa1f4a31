"""Reads the rows of a CSV or TSV file (RFC 4180) as records of strings. Its first row names the columns; in
MMLU's own files it is a question. Runs in
executors: imports no Spark."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator

from tasks.data.readers.json_lines import JsonLine
from tasks.data.readers.source_bytes import GARBLED, HashingReader, codec_of, decompressed, stem_of

DELIMITERS = ",;\t|"
LETTERS = ("A", "B", "C", "D")
MMLU_COLUMNS = ("question", *LETTERS, "answer")
"""Of MMLU's own files, the only ones that are read without names in their first row: it is a question already."""


def csv_lines(
    name: str, file: HashingReader, max_row_bytes: int, missing_in: Callable[[list[str]], str] = lambda names: ""
) -> Iterator[JsonLine]:
    """The rows of a file; `offset` is the first byte of each, decompressed. `missing_in` says what is missing where
    the columns are these; empty for nothing.

    Columns are parted by tabs where the name says so, else by whichever of DELIMITERS is most frequent in the first
    line. Cells stay strings: what looks like a number may be a key with leading zeros. A cell between tabs that holds
    a tab and a line end is broken: the quotes of a file that does not quote would merge rows.
    """
    lines = _Lines(decompressed(name, file), max_row_bytes)
    csv.field_size_limit(max_row_bytes)
    try:
        first = next((line for line in lines if line.strip()), "")
        if not first:
            return
        delimiter = "\t" if stem_of(name).endswith(".tsv") else max(DELIMITERS, key=first.count)
        lines.put_back(first)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(rows)
        cells = names if _is_question(names) else []
        names = [*MMLU_COLUMNS] if cells else names
        wrong = _wrong_header(name, names, missing_in)
        if wrong is not None:
            yield wrong
            return
        if cells:
            yield _record(0, lines.offset, names, cells, "", max_row_bytes)
        while True:
            offset = lines.offset
            try:
                cells = next(rows, None)
                wrong = ""
            except csv.Error as error:
                cells, wrong = [], str(error)
            if cells is None:
                return
            if delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                wrong = "a quote is open over tabs and line ends: write quotes that are text twice, and around the cell"
            if cells or wrong:
                yield _record(offset, lines.offset - offset, names, cells, wrong, max_row_bytes)
    except csv.Error as error:
        yield JsonLine(0, None, "broken_header", f"{name}, first row: {error}")
    except GARBLED as error:
        yield JsonLine(lines.offset, None, f"truncated_{codec_of(name)}", str(error))


def _is_question(cells: list[str]) -> bool:
    """Whether a first row is one of MMLU: words, four choices and the letter of one."""
    return len(cells) == len(MMLU_COLUMNS) and cells[-1] in LETTERS and len(cells[0].split()) > 1


class _Lines(Iterator[str]):
    """The lines of a stream, of which none is held beyond `max_bytes`. `offset` is the first byte of the next."""

    def __init__(self, stream: io.BufferedIOBase, max_bytes: int) -> None:
        self.offset = 0
        self._stream = stream
        self._max_bytes = max_bytes
        self._waiting: list[str] = []

    def __next__(self) -> str:
        if self._waiting:
            return self._waiting.pop()
        line = self._stream.readline(self._max_bytes + 1)
        if not line:
            raise StopIteration
        codec = "utf-8" if self.offset else "utf-8-sig"
        self.offset += len(line)
        if not line.endswith(b"\n"):
            while rest := self._stream.readline(self._max_bytes + 1):
                self.offset += len(rest)
                if rest.endswith(b"\n"):
                    break
        return line.decode(codec, "surrogateescape")

    def put_back(self, line: str) -> None:
        self._waiting.append(line)


def _wrong_header(name: str, names: list[str], missing_in: Callable[[list[str]], str]) -> JsonLine | None:
    repeated = [column for column, count in Counter(names).items() if count > 1]
    if repeated:
        detail = f"{name}: its first row names {repeated[0]!r} more than once: it must give each column a name"
        return JsonLine(0, None, "broken_header", detail)
    missing = missing_in(names)
    return JsonLine(0, None, "missing_column", f"{missing}. Its first row must name the columns") if missing else None


def _record(
    offset: int, num_bytes: int, names: list[str], cells: list[str], wrong: str, max_row_bytes: int
) -> JsonLine:
    """The record of a row of `num_bytes`, or the reason why it is none; `wrong` is what the reader found."""
    if num_bytes > max_row_bytes:
        detail = f"{num_bytes} bytes, at most {max_row_bytes} are read (ingest.max_record_bytes)"
        return JsonLine(offset, None, "record_too_long", detail)
    if wrong or len(cells) != len(names):
        detail = wrong or f"{len(cells)} cells, the first row has {len(names)}"
        return JsonLine(offset, None, "broken_csv", f"{detail}; {num_bytes} bytes are left out")
    try:
        "".join(cells).encode()
    except UnicodeEncodeError as error:
        return JsonLine(offset, None, "not_utf8", f"byte 0x{ord(error.object[error.start]) - 0xDC00:02x}")
    return JsonLine(offset, dict(zip(names, cells, strict=True)), "", "")
