"""Rearranges documents of a phase to prefix, suffix, middle (Bavarian et al. 2022, arXiv 2207.14255).

It changes only the packed order. A chosen piece P of n tokens, split at a <= b, is read as <|code_prefix|> P[:a]
<|code_suffix|> P[b:] <|code_middle|> P[a:b] and then its end-of-text, where it holds one. The shards do not
change: the lines of the order point into them, and to the three special tokens in a shard of the packed artifact.
The document's id and the seed decide whether a document is rearranged, and where it is split. Where a token begins
inside a character (byte-level BPE cuts rare ones), the split moves before that character.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.text.tokenizer_layout import byte_characters
from tasks.data.packing.packed_rows import GLUE_SHARD
from tasks.data.packing.row_order import mix_bits
from tasks.data.records.stored_tables import open_parquet
from tasks.data.shards.stored_shard import StoredShard
from tasks.data.shards.token_shard import append_tokens, token_dtype, write_index

if TYPE_CHECKING:
    from configs.files.stored_files import StoredFile

FIM_TOKENS = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")
"""The special tokens, in the order of the glue shard's sequences."""
NUM_EXTRA = len(FIM_TOKENS)
MIN_TOKENS = 16
"""Tokens of the shortest piece that is rearranged: shorter ones have no useful middle."""


@dataclass(frozen=True)
class Rearrangement:
    """Decides which documents are rearranged: `ids_of` a shard's number are 64 bits of every sequence's document id."""

    rate: float
    seed: int
    ids_of: Callable[[int], np.ndarray]
    shards: Mapping[int, StoredShard]
    """The shards that have ids, by number."""
    is_inside: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Whether each token id begins inside a character."""

    def is_chosen(self, shard: int, sequences: np.ndarray) -> np.ndarray:
        """Whether each document of a shard is rearranged; none is in shards without ids."""
        if shard not in self.shards:
            return np.zeros(len(sequences), dtype=bool)
        return self._bits(self.ids_of(shard)[sequences], "chosen") / 2.0**64 < self.rate

    def splits(self, units: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Two positions 0 <= a <= b <= num_tokens for each unit (shard, sequence, offset, ...), as columns."""
        ids = np.zeros(len(units), dtype=np.uint64)
        for shard in np.unique(units[:, 0]).tolist():
            own = units[:, 0] == shard
            ids[own] = self.ids_of(shard)[units[own, 1]]
        offsets = mix_bits(units[:, 2].astype(np.uint64))
        positions = [
            self._bits(ids ^ offsets, name) % (num_tokens + 1).astype(np.uint64) for name in ("first", "second")
        ]
        return np.column_stack(
            [self._whole(units, position.astype(np.int64), num_tokens) for position in np.sort(positions, axis=0)]
        )

    def _whole(self, units: np.ndarray, positions: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """The positions, those inside a character moved to its first token."""
        for shard in np.unique(units[:, 0]).tolist():
            source = self.shards[shard]
            moving = np.flatnonzero((units[:, 0] == shard) & (positions < num_tokens))
            while len(moving):
                moving = moving[positions[moving] > 0]
                first = source.starts(units[moving, 1]) + units[moving, 2]
                moving = moving[self.is_inside[source.tokens.take(first + positions[moving])]]
                positions[moving] -= 1
        return positions

    def _bits(self, ids: np.ndarray, purpose: str) -> np.ndarray:
        key = int.from_bytes(hashlib.sha256(f"{self.seed} fim {purpose}".encode()).digest()[:8], "big")
        return mix_bits(mix_bits(ids ^ np.uint64(key)) + np.uint64(key & 0xFFFF))


def read_ids(sidecar: StoredFile) -> np.ndarray:
    """64 bits of every sequence's document id, in the order of the sequences."""
    with open_parquet(sidecar) as file:
        table = file.read(["sequence", "id"]).sort_by("sequence")
    return np.frombuffer(bytes.fromhex("".join(table["id"].to_pylist())), dtype=">u8").astype(np.uint64)


def read_inside(tokenizer_path: Path, num_tokens: int) -> np.ndarray:
    """Per id of a tokenizer.json whether the token begins inside a character of UTF-8: byte-level, or with
    SentencePiece's bytes."""
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    entries = (
        vocabulary.items()
        if isinstance(vocabulary, dict)
        else ((token, number) for number, (token, _) in enumerate(vocabulary))
    )
    firsts = tuple(byte_characters()[0x80:0xC0])
    is_byte_level = tokenizer["decoder"]["type"] == "ByteLevel"
    is_inside = np.zeros(num_tokens, dtype=bool)
    for token, number in entries:
        is_inside[number] = (
            token.startswith(firsts) if is_byte_level else re.fullmatch("<0x[89AB].>", token) is not None
        )
    return is_inside


def write_glue(directory: Path, special_ids: dict[str, int], vocab_size: int) -> None:
    """Write the shard from which the special tokens are read, one sequence for each."""
    dtype = token_dtype(vocab_size)
    with open(directory / f"{GLUE_SHARD}.bin", "wb") as file:
        lengths = append_tokens(file, [[special_ids[name]] for name in FIM_TOKENS], dtype)
    write_index(directory / f"{GLUE_SHARD}.idx", lengths, dtype)


def rearranged_lines(units: np.ndarray, ends: np.ndarray, splits: np.ndarray, glue: int) -> np.ndarray:
    """Lines (unit, shard, sequence, offset, length) of units (shard, sequence, offset, length with the special tokens),
    empty ones too.

    `ends` says whether a unit ends with its document's end-of-text, which is read last; `splits` are positions before
    it."""
    shard, sequence, offset, length = units[:, :4].T
    ends = ends.astype(np.int64)
    body = length - NUM_EXTRA - ends
    first, second = splits.T
    zeros, ones, number = np.zeros_like(shard), np.ones_like(shard), np.arange(len(units))
    parts = [
        (glue, 0 * ones, zeros, ones),
        (shard, sequence, offset, first),
        (glue, 1 * ones, zeros, ones),
        (shard, sequence, offset + second, body - second),
        (glue, 2 * ones, zeros, ones),
        (shard, sequence, offset + first, second - first),
        (shard, sequence, offset + body, ends),
    ]
    lines = np.stack([np.column_stack([number, origin * ones, *rest]) for origin, *rest in parts], axis=1)
    return lines.reshape(-1, 5)
