"""Shingles, MinHash signatures, band keys and exact Jaccard similarity of many texts at once, as NumPy arrays.

A document's shingles are hashes of its word n-grams (of all its words, where it has fewer), 48 bits each. Two different
shingles of a document of a million words are equal with a probability of 1 in 500. Signatures are datasketch's own (its
scheme affine32) over the upper 32 bits. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import BASE, mix, ngram_hashes, split_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from configs.schema import DeduplicationRecipe

    U64 = NDArray[np.uint64]
    U32 = NDArray[np.uint32]
    I64 = NDArray[np.int64]

SHINGLE_BITS = 48
OWNER_SHIFT = np.uint64(SHINGLE_BITS)
MAX_OWNERS = 1 << (64 - SHINGLE_BITS)
"""Number of sets that are sorted together: the set's number is stored above a shingle's bits, so one sort of integers
sorts all sets."""
CHUNK_CHARS = 200_000
"""Characters hashed at once: the arrays of a chunk fit the caches (65 MB of text: 1.1 s instead of 7.5 s at twenty
times as many)."""
BLOCK_SHINGLES = 1 << 16
"""Shingles permuted at once: 256 KiB, half of an L2 cache."""
BLOCK_COMPARED = 1 << 20
"""Shingles compared at once."""
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
    shingle (one entry more than texts)."""
    hashes, owners = ngram_hashes(split_words(texts), ngram_size, whole_if_shorter=True)
    if len(owners) > 1 and (owners[1:] < owners[:-1]).any():
        order = np.argsort(owners, kind="stable")
        hashes, owners = hashes[order], owners[order]
    return hashes >> np.uint64(64 - SHINGLE_BITS), np.searchsorted(owners, np.arange(len(texts) + 1))


def shingle_sets(texts: list[str], ngram_size: int) -> tuple[U64, I64]:
    """Sorted distinct shingles of each text, and the offset of each text's first one (one entry more than texts)."""
    assert len(texts) <= MAX_OWNERS, len(texts)
    shingles, offsets = shingles_of(texts, ngram_size)
    owners = np.repeat(np.arange(len(texts), dtype=np.uint64), np.diff(offsets)) << OWNER_SHIFT
    owned = np.sort(shingles | owners)
    is_new = np.ones(len(owned), dtype=bool)
    is_new[1:] = owned[1:] != owned[:-1]
    owned = owned[is_new]
    starts = np.searchsorted(owned >> OWNER_SHIFT, np.arange(len(texts) + 1, dtype=np.uint64))
    return owned & np.uint64((1 << SHINGLE_BITS) - 1), starts


def signatures(shingles: U64, offsets: I64, permuted_by: U32) -> U32:
    """(texts, permutations): the smallest permuted shingle; texts without words have all ones. Repeated shingles change
    nothing."""
    signed = np.full((len(offsets) - 1, permuted_by.shape[1]), 0xFFFFFFFF, dtype=np.uint32)
    filled = np.flatnonzero(np.diff(offsets))
    values = _premixed((shingles >> np.uint64(SHINGLE_BITS - 32)).astype(np.uint32))
    for start, stop in _blocks(np.diff(offsets)[filled], BLOCK_SHINGLES):
        texts = filled[start:stop]
        own = values[offsets[texts[0]] : offsets[texts[-1] + 1]]
        starts = offsets[texts] - offsets[texts[0]]
        permuted, smallest = np.empty_like(own), np.empty((permuted_by.shape[1], len(texts)), dtype=np.uint32)
        for index, (multiplier, addend) in enumerate(permuted_by.T):
            np.multiply(own, multiplier, out=permuted)
            np.add(permuted, addend, out=permuted)
            np.minimum.reduceat(permuted, starts, out=smallest[index])
        signed[texts] = smallest.T
    return signed


def _premixed(values: U32) -> U32:
    """MurmurHash3's 32-bit finaliser, which datasketch applies before it permutes."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))


def _blocks(sizes: I64, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive groups of sizes with a sum of about `limit`; a larger size is a group of its own."""
    groups = np.cumsum(sizes) // limit
    starts = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
    yield from zip(starts, [*starts[1:], len(sizes)][: len(starts)], strict=True)


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
    """Sizes of intersection and union of the sets numbered left[i] and right[i], each without repeated shingles."""
    sizes = np.diff(offsets)
    total = sizes[left] + sizes[right]
    shared = np.zeros(len(left), dtype=np.int64)
    for start, stop in _blocks(total, BLOCK_COMPARED):
        for low in range(start, stop, MAX_OWNERS):
            pairs = slice(low, min(stop, low + MAX_OWNERS))
            owners = np.arange(pairs.stop - pairs.start, dtype=np.uint64) << OWNER_SHIFT
            parts = [
                _gathered(shingles, offsets, side[pairs]) | np.repeat(owners, sizes[side[pairs]])
                for side in (left, right)
            ]
            owned = np.sort(np.concatenate(parts))
            twice = owned[1:][owned[1:] == owned[:-1]]
            shared[pairs] = np.bincount((twice >> OWNER_SHIFT).astype(np.int64), minlength=len(owners))
    return shared, total - shared


def _gathered(values: U64, offsets: I64, sets: I64) -> U64:
    """The sets of these numbers, concatenated."""
    sizes = offsets[sets + 1] - offsets[sets]
    before = np.cumsum(sizes) - sizes
    return values[np.arange(sizes.sum()) + np.repeat(offsets[sets] - before, sizes)]
