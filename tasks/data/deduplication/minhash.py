"""Shingles, MinHash signatures, band keys and exact Jaccard similarity of many texts at once, as NumPy arrays.

A document's shingles are hashes of its word n-grams (of all its words, where it has fewer), 48 bits each. Two different
shingles of a document of a million words are equal with a probability of 1 in 500. Signatures are datasketch's own (its
scheme affine32) over the upper 32 bits. The loops over words and shingles are compiled (minhash.cpp). Runs in
executors: imports no Spark.
"""

from __future__ import annotations

import ctypes
import hashlib
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.kernels.native_library import array_pointers, load_library
from tasks.data.text.words import BASE, mix, split_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from configs.schema import DeduplicationRecipe

    U64 = NDArray[np.uint64]
    U32 = NDArray[np.uint32]
    I64 = NDArray[np.int64]

SOURCE = Path(__file__).with_suffix(".cpp")
SHINGLE_BITS = 48
OWNER_SHIFT = np.uint64(SHINGLE_BITS)
MAX_OWNERS = 1 << (64 - SHINGLE_BITS)
"""Number of sets that are sorted together: the set's number is stored above a shingle's bits, so one sort of integers
sorts all sets."""
CHUNK_CHARS = 200_000
"""Characters hashed at once: the arrays of a chunk fit the caches."""
FALSE_NEGATIVE_WEIGHT = 0.95
"""Weight of missed pairs against wrong candidates: a missed pair stays in the corpus, a wrong candidate costs one
comparison. At threshold 0.7 and 128 permutations 99.8 % of the pairs of similarity 0.8 become candidates."""

PROBE_TEXT = (
    "Ten words_of e\u0301t\u00e9, \u0421\u043b\u043e\u0432\u043e \u4e2d\u6587 \u0e44\u0e17\u0e22 "
    "\u0939\u093f\u0928\u094d 12 + 7!"
)


def banding(threshold: float, num_permutations: int) -> tuple[int, int]:
    """(bands, rows) by datasketch's optimiser. Raises ValueError where there are too few permutations for two bands."""
    from datasketch import MinHashLSH

    weights = (1 - FALSE_NEGATIVE_WEIGHT, FALSE_NEGATIVE_WEIGHT)
    try:
        index = MinHashLSH(threshold=threshold, num_perm=num_permutations, weights=weights)
    except ValueError as error:
        raise ValueError(
            f"deduplicate.num_permutations ({num_permutations}) are too few for deduplicate.threshold ({threshold}): "
            f"{error}; take 64 or "
            "more, or a lower threshold"
        ) from error
    return index.b, index.r


def signing_metadata(recipe: DeduplicationRecipe) -> dict[str, object]:
    """Values that must be equal for signatures to be comparable: the recipe's, and a hash of this code's signature of a
    text in several scripts."""
    probe = signatures(*shingles_of([PROBE_TEXT], recipe.ngram_size), permutations(recipe.num_permutations))
    return {**recipe.signing, "probe": hashlib.sha256(probe.tobytes()).hexdigest()[:16]}


def permutations(count: int) -> U32:
    """Multipliers and addends of datasketch's permutations of 32-bit values, seed 1: (2, count)."""
    from datasketch import MinHash

    return np.asarray(MinHash(num_perm=count, scheme="affine32", seed=1).permutations, dtype=np.uint32)


def shingles_of(texts: list[str], ngram_size: int) -> tuple[U64, I64]:
    """Shingles of each text, including repeated ones, in the order of the texts, and the offset of each text's first
    shingle (one entry more than texts). Composed and decomposed characters are the same, as in `content_digest`."""
    words = split_words([unicodedata.normalize("NFC", text) for text in texts])
    counts = np.where(words.counts < ngram_size, np.minimum(words.counts, 1), words.counts - ngram_size + 1)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    shingles = np.empty(offsets[-1], dtype=np.uint64)
    load_library(SOURCE).make_shingles(
        *array_pointers(words.hashes, words.offsets),
        ctypes.c_int64(len(texts)),
        ctypes.c_int64(ngram_size),
        ctypes.c_int(64 - SHINGLE_BITS),
        *array_pointers(offsets, shingles),
    )
    return shingles, offsets


def shingle_sets(texts: list[str], ngram_size: int) -> tuple[U64, I64]:
    """Sorted distinct shingles of each text, and the offset of each text's first one (one entry more than texts)."""
    assert len(texts) <= MAX_OWNERS, len(texts)
    shingles, offsets = shingles_of(texts, ngram_size)
    owned = np.sort(shingles | np.repeat(np.arange(len(texts), dtype=np.uint64), np.diff(offsets)) << OWNER_SHIFT)
    is_new = np.ones(len(owned), dtype=bool)
    is_new[1:] = owned[1:] != owned[:-1]
    owned = owned[is_new]
    starts = np.searchsorted(owned >> OWNER_SHIFT, np.arange(len(texts) + 1, dtype=np.uint64))
    return owned & np.uint64((1 << SHINGLE_BITS) - 1), starts


def signatures(shingles: U64, offsets: I64, permuted_by: U32) -> U32:
    """(texts, permutations): the smallest permuted shingle; texts without words have all ones. Repeated shingles change
    nothing."""
    num_texts, num_permutations = len(offsets) - 1, permuted_by.shape[1]
    signed = np.empty((num_texts, num_permutations), dtype=np.uint32)
    load_library(SOURCE).sign_texts(
        *array_pointers(shingles, offsets),
        ctypes.c_int64(num_texts),
        ctypes.c_int(SHINGLE_BITS),
        *array_pointers(*permuted_by),
        ctypes.c_int64(num_permutations),
        *array_pointers(signed),
    )
    return signed


def band_keys(signature: U32, num_bands: int, num_rows: int) -> U64:
    """(texts, bands): one 64-bit key per band; equal keys mean equal rows of the same band."""
    rows = signature[:, : num_bands * num_rows].astype(np.uint64).reshape(len(signature), num_bands, num_rows)
    keys = np.zeros(rows.shape[:2], dtype=np.uint64) + np.arange(num_bands, dtype=np.uint64)
    for row in range(num_rows):
        keys = mix(keys * BASE + rows[:, :, row])
    return keys


def sketches(signature: U32) -> U64:
    """Per text one bit of each of the signature's last 64 values (of all, where there are fewer): sketches are as
    similar as the signatures."""
    bits = np.zeros((len(signature), 64), dtype=np.uint8)
    bits[:, : signature.shape[1]] = signature[:, -64:] & np.uint32(1)
    return np.packbits(bits, axis=1).view(np.uint64).reshape(-1)


def jaccard_counts(shingles: U64, offsets: I64, left: I64, right: I64) -> tuple[I64, I64]:
    """Sizes of intersection and union of the shingle_sets numbered left[i] and right[i]."""
    sizes, shared = np.diff(offsets), np.empty(len(left), dtype=np.int64)
    left, right = np.ascontiguousarray(left, np.int64), np.ascontiguousarray(right, np.int64)
    load_library(SOURCE).count_shared(
        *array_pointers(shingles, offsets, left, right), ctypes.c_int64(len(left)), *array_pointers(shared)
    )
    return shared, sizes[left] + sizes[right] - shared
