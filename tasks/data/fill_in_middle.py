"""Fill-in-the-middle of a phase's documents (Bavarian et al. 2022, arXiv 2207.14255): prefix, suffix, middle, in the packed order alone.

A chosen piece P of n tokens, split at a <= b, is read as <|code_prefix|> P[:a] <|code_suffix|> P[b:] <|code_middle|> P[a:b] and then its
end-of-text, where it holds one. The shards stay as they are: the lines of the order point into them, and at the three special tokens in
a shard of the packed artifact's own. Whether a document is rearranged, and where it is split, follow from its id and the seed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.data.packed_rows import GLUE_SHARD
from tasks.data.row_order import mix_bits
from tasks.data.token_shard import append_tokens, token_dtype, write_index

FIM_TOKENS = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")
"""In the order of the glue shard's sequences."""
NUM_EXTRA = len(FIM_TOKENS)
MIN_TOKENS = 16
"""Shorter pieces stay as they are: there is no middle to speak of."""


@dataclass(frozen=True)
class Rearrangement:
    """Which documents are rearranged: `ids` holds the 64 bits of every sequence's document id, by number of the shard."""

    rate: float
    seed: int
    ids: dict[int, np.ndarray]

    def is_chosen(self, shard: int, sequences: np.ndarray) -> np.ndarray:
        """A claim per document of a shard; nothing is chosen in shards without ids."""
        if shard not in self.ids:
            return np.zeros(len(sequences), dtype=bool)
        return self._bits(self.ids[shard][sequences], "chosen") / 2.0**64 < self.rate

    def splits(self, units: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Two places 0 <= a <= b <= num_tokens for each unit (shard, sequence, offset, ...), as columns."""
        ids = np.zeros(len(units), dtype=np.uint64)
        for shard in np.unique(units[:, 0]).tolist():
            own = units[:, 0] == shard
            ids[own] = self.ids[shard][units[own, 1]]
        offsets = mix_bits(units[:, 2].astype(np.uint64))
        places = [self._bits(ids ^ offsets, name) % (num_tokens + 1).astype(np.uint64) for name in ("first", "second")]
        return np.sort(np.column_stack(places).astype(np.int64), axis=1)

    def _bits(self, ids: np.ndarray, purpose: str) -> np.ndarray:
        key = int.from_bytes(hashlib.sha256(f"{self.seed} fim {purpose}".encode()).digest()[:8], "big")
        return mix_bits(mix_bits(ids ^ np.uint64(key)) + np.uint64(key & 0xFFFF))


def read_ids(sidecar_path: Path) -> np.ndarray:
    """64 bits of every sequence's document id, in the order of the sequences."""
    import pyarrow.parquet as pq

    table = pq.read_table(sidecar_path, columns=["sequence", "id"]).sort_by("sequence")
    return np.array([int(identity, 16) for identity in table["id"].to_pylist()], dtype=np.uint64)


def write_glue(directory: Path, special_ids: dict[str, int], vocab_size: int) -> None:
    """The shard that the special tokens are read from, one sequence for each."""
    dtype = token_dtype(vocab_size)
    with open(directory / f"{GLUE_SHARD}.bin", "wb") as file:
        lengths = append_tokens(file, [[special_ids[name]] for name in FIM_TOKENS], dtype)
    write_index(directory / f"{GLUE_SHARD}.idx", lengths, dtype)


def rearranged_lines(units: np.ndarray, ends: np.ndarray, splits: np.ndarray, glue: int) -> np.ndarray:
    """Lines (unit, shard, sequence, offset, length) of units (shard, sequence, offset, length with the special tokens), empty ones too.

    `ends` says whether a unit ends with its document's end-of-text, which is read last; `splits` are places before it."""
    shard, sequence, offset, length = units[:, :4].T
    ends = ends.astype(np.int64)
    body = length - NUM_EXTRA - ends
    first, second = splits.T
    zeros, ones, number = np.zeros_like(shard), np.ones_like(shard), np.arange(len(units))
    parts = [
        (glue, 0 * ones, zeros, ones), (shard, sequence, offset, first),
        (glue, 1 * ones, zeros, ones), (shard, sequence, offset + second, body - second),
        (glue, 2 * ones, zeros, ones), (shard, sequence, offset + first, second - first),
        (shard, sequence, offset + body, ends),
    ]  # fmt: skip
    lines = np.stack([np.column_stack([number, origin * ones, *rest]) for origin, *rest in parts], axis=1)
    return lines.reshape(-1, 5)
