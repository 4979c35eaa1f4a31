"""Byte-pair merges from a table of words and their counts: those that the trainer of `tokenizers` finds in the same text, in its order.

That trainer takes texts alone and keeps counts in 32 bits where this table comes from a cluster. The loop is compiled (bpe_merges.cpp).
"""

from __future__ import annotations

import ctypes

import numpy as np

from model.native_library import load_library
from model.tokenizer_layout import byte_characters


def learn_merges(text: np.ndarray, starts: np.ndarray, counts: np.ndarray, num_tokens: int, min_count: int) -> list[tuple[str, str, str]]:
    """(left, right, merged) tokens of a vocabulary of at most `num_tokens`, the 256 bytes included, in the order learned.

    text: uint8, the words one after the other; starts: int64, where each begins, and the end; counts: int64 per word."""
    characters = byte_characters()
    alphabet = sorted(characters)
    byte_ids = np.array([alphabet.index(character) for character in characters], dtype=np.int32)
    starts, counts = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(counts, np.int64)
    text = np.ascontiguousarray(text, np.uint8)
    # Two pairs may write one token, so there can be more merges than tokens; twice as many were never seen.
    merges = np.empty((2 * num_tokens + 16, 3), dtype=np.int32)
    library = load_library("bpe_merges")
    library.learn_merges.restype = ctypes.c_int64
    num_merges = library.learn_merges(
        *(_pointer(array) for array in (text, starts, counts)), ctypes.c_int64(len(counts)), _pointer(byte_ids),
        ctypes.c_int64(num_tokens), ctypes.c_int64(min_count), _pointer(merges), ctypes.c_int64(len(merges)),
    )  # fmt: skip
    assert num_merges >= 0, "more merges than twice the vocabulary"
    tokens = alphabet
    found = []
    for left, right, merged in merges[:num_merges].tolist():
        if merged == len(tokens):
            tokens.append(tokens[left] + tokens[right])
        found.append((tokens[left], tokens[right], tokens[merged]))
    return found


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
