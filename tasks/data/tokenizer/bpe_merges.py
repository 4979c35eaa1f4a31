"""Learns byte-pair merges from a table of words and their counts: those of the `tokenizers` trainer, in its order.

That trainer takes only texts, and keeps counts in 32 bits; this table comes from a cluster. The loop is compiled
(bpe_merges.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model.kernels.native_library import array_pointers, load_library
from model.text.tokenizer_layout import byte_characters

SOURCE = Path(__file__).with_suffix(".cpp")
NO_ROOM, TOO_MANY_WORDS = -2, -3
"""Statuses of bpe_merges.cpp."""


class WordTable(NamedTuple):
    """Distinct words, one after the other in `text`, with their counts."""

    text: np.ndarray
    """uint8."""
    starts: np.ndarray
    """int64: offset of each word in the text, and the end of the last."""
    counts: np.ndarray
    """int64."""


@dataclass(frozen=True)
class Room:
    """Memory for the learner's arrays: up to `memory_bytes`, beyond that in unnamed files, which the system evicts when
    it needs memory."""

    memory_bytes: int
    directory: Path | None
    """Directory of the files; None for no files."""


IN_MEMORY = Room(2**62, None)


class NoRoomError(Exception):
    """Neither memory nor the disk has room for the learner's arrays."""


def learn_merges(
    words: Iterable[WordTable], num_tokens: int, min_count: int, room: Room = IN_MEMORY
) -> list[tuple[str, str, str]]:
    """(left, right, merged) tokens of a vocabulary of at most `num_tokens`, the 256 bytes included, in the order
    learned.

    Each word may be in only one table, once. Raises NoRoomError."""
    characters = byte_characters()
    alphabet = sorted(characters)
    byte_ids = np.array([alphabet.index(character) for character in characters], dtype=np.int32)
    library = _library()
    folder = str(room.directory or "").encode()
    learner = ctypes.c_void_p(
        library.open_learner(ctypes.c_int64(room.memory_bytes), folder, *array_pointers(byte_ids))
    )
    if not learner:
        raise NoRoomError(_no_room(room, 0))
    try:
        for table in words:
            _add(learner, table, room)
        # Two pairs may give the same token, so there can be more merges than tokens; twice as many were never seen.
        merges = np.empty((2 * num_tokens + 16, 3), dtype=np.int32)
        arguments = (
            ctypes.c_int64(num_tokens),
            ctypes.c_int64(min_count),
            *array_pointers(merges),
            ctypes.c_int64(len(merges)),
        )
        num_merges = _checked(learner, library.learn_merges(learner, *arguments), room)
    finally:
        library.close_learner(learner)
    return _spelled(merges[:num_merges], alphabet)


def _add(learner: ctypes.c_void_p, table: WordTable, room: Room) -> None:
    text = np.ascontiguousarray(table.text, np.uint8)
    starts, counts = (np.ascontiguousarray(array, np.int64) for array in (table.starts, table.counts))
    status = _library().add_words(learner, *array_pointers(text, starts, counts), ctypes.c_int64(len(counts)))
    _checked(learner, status, room)


def _spelled(merges: np.ndarray, alphabet: list[str]) -> list[tuple[str, str, str]]:
    tokens = list(alphabet)
    merged_tokens = []
    for left, right, merged in merges.tolist():
        if merged == len(tokens):
            tokens.append(tokens[left] + tokens[right])
        merged_tokens.append((tokens[left], tokens[right], tokens[merged]))
    return merged_tokens


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE)
    library.open_learner.restype = ctypes.c_void_p
    library.close_learner.restype = None
    library.add_words.restype = library.learn_merges.restype = library.bytes_in_files.restype = ctypes.c_int64
    return library


def _checked(learner: ctypes.c_void_p, status: int, room: Room) -> int:
    if status == NO_ROOM:
        raise NoRoomError(_no_room(room, _library().bytes_in_files(learner)))
    if status == TOO_MANY_WORDS:
        raise NoRoomError("a pair of bytes occurs in more words than a list can name (4 GiB of positions)")
    assert status >= 0, "more merges than twice the vocabulary"
    return status


def _no_room(room: Room, in_files: int) -> str:
    if room.directory is None:
        return "the memory of this process does not hold the arrays of the merge learner"
    return (
        f"{room.memory_bytes / 2**20:,.0f} MiB of memory and the disk of {room.directory}, which took "
        f"{in_files / 2**20:,.0f} MiB, "
        "do not hold the arrays of the merge learner"
    )
