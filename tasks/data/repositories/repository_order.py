"""Joins the files of one repository to one text, in the order of their imports.

A file comes after the files that it imports. Circles are cut at the file whose path comes first. Files that no import
reaches follow by path (tasks/data/repositories/import_paths.py). Runs in executors:
imports no Spark.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.data.repositories.import_paths import KnownPaths, imported_paths

HEADER_OF = {
    **dict.fromkeys((".py", ".pyi", ".sh", ".rb", ".r", ".jl", ".pl", ".ex", ".toml", ".yaml", ".yml", ".cfg"), "# "),
    **dict.fromkeys((".sql", ".lua", ".hs"), "-- "),
    ".erl": "% ",
    ".clj": ";; ",
}
OTHER_HEADER = "// "


@dataclass(frozen=True)
class Piece:
    """A document that is a file of a repository, or a part of one."""

    id: str
    source: str
    offset: int
    piece: int
    """First character in the file."""
    path: str
    text: str


def order_files(texts: dict[str, str]) -> list[str]:
    """The paths, each after the files that it imports, as far as possible."""
    known = KnownPaths(texts)
    wanted = {path: sorted(imported_paths(path, text, known)) for path, text in texts.items()}
    done: dict[str, None] = {}
    for start in sorted(texts):
        waiting, open_paths = [(start, iter(wanted[start]))], {start}
        while waiting and start not in done:
            path, rest = waiting[-1]
            following = next((other for other in rest if other not in done and other not in open_paths), None)
            if following is None:
                done[path] = None
                waiting.pop()
            else:
                open_paths.add(following)
                waiting.append((following, iter(wanted[following])))
    return list(done)


def repository_texts(pieces: Sequence[Piece], max_chars: int) -> Iterator[tuple[str, list[tuple[Piece, int]]]]:
    """(text, [(piece, characters that it takes with its header)]): all files, cut between files where the text would be
    longer than `max_chars`; a single longer file is not cut.

    Each file begins with a line that names its path; so does a part whose predecessor is missing.
    """
    files: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.source, piece.offset, piece.piece)):
        files.setdefault(piece.path, []).append(piece)
    order = order_files({path: "".join(part.text for part in parts) for path, parts in files.items()})
    members: list[tuple[Piece, str]] = []
    size = 0
    for path in order:
        written = list(_write_file(path, files[path]))
        length = sum(len(text) for _, text in written)
        if members and size + length > max_chars:
            yield "".join(text for _, text in members), [(piece, len(text)) for piece, text in members]
            members, size = [], 0
        members += written
        size += length
    if members:
        yield "".join(text for _, text in members), [(piece, len(text)) for piece, text in members]


def _write_file(path: str, parts: list[Piece]) -> Iterator[tuple[Piece, str]]:
    expected = None
    for part in parts:
        address = (part.source, part.offset, part.piece)
        header = "" if address == expected else header_line(path)
        is_last = part is parts[-1]
        ending = "" if not is_last else "\n" if part.text.endswith("\n") else "\n\n"
        yield part, header + part.text + ending
        expected = (part.source, part.offset, part.piece + len(part.text))


def header_line(path: str) -> str:
    """The line before a file, as a comment of its language."""
    return f"{HEADER_OF.get(posixpath.splitext(path)[1], OTHER_HEADER)}file: {path}\n"
