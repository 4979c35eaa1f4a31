"""Encodes texts to token ids, whole Arrow columns at once, as arrays. Runs in executors: imports no Spark.

With GLM's pre-tokenizer most of a text is words met before. tasks/data/text/pretokens.py cuts the texts. Only the
library's model encodes a word, once (its whole pipeline takes three times as long for a word). Documents are put
together from the words' ids. Other pre-tokenizers use the library's whole pipeline.
"""

from __future__ import annotations

import json
import os
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from model.text.tokenizer_layout import PRETOKENIZER_PATTERN, byte_characters, tokenizer_for_text
from tasks.data.text.pretokens import Pretokens, cut_pretokens

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

MAX_KNOWN_WORDS = 2**20
"""Words whose ids are kept, about 150 MB; when there are more, all are forgotten."""


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer for text that people wrote, in an executor."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Spark runs one worker per core
    return tokenizer_for_text(path)


class TextEncoder:
    """Encodes columns of texts with one tokenizer."""

    def __init__(self, tokenizer_path: str) -> None:
        self.tokenizer = open_tokenizer(tokenizer_path)
        self._has_glm_words = has_glm_words(self.tokenizer)
        self._tokenize = self.tokenizer.model.tokenize
        self._stand_ins = dict(enumerate(byte_characters()))
        self._forget()

    def encode(self, texts: pa.Array, end_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts one after the other, length of each), `end_id` after each text where one is given."""
        if not self._has_glm_words:
            return self._encode_by_library(texts.to_pylist(), end_id)
        parts = [self._encode_pretokens(chunk, end_id) for chunk in cut_pretokens(texts)]
        ids, lengths = zip(*parts, strict=True) if parts else ((), ())
        return np.concatenate([np.zeros(0, np.int32), *ids]), np.concatenate([np.zeros(0, np.int64), *lengths])

    def _encode_by_library(self, texts: list[str], end_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        end = [] if end_id is None else [end_id]
        encoded = [item.ids + end for item in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths

    def _encode_pretokens(self, chunk: Pretokens, end_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        words = chunk.words.dictionary_encode()
        numbers = self._numbers_of(words.dictionary.to_pylist())[words.indices.to_numpy()]
        bounds = chunk.document_starts
        if end_id is not None:
            self._ids[0] = end_id
            numbers = np.insert(numbers, bounds[1:], 0)
            bounds = bounds + np.arange(len(bounds))
        counts = self._counts[numbers]
        ends = np.cumsum(counts)
        before = np.concatenate([[0], ends])
        indices = np.repeat(self._starts[numbers] - before[:-1], counts) + np.arange(before[-1])
        return self._ids[indices], np.diff(before[bounds])

    def _numbers_of(self, words: list[str]) -> np.ndarray:
        """Index of each word among the known words; new ones are encoded. Index 0 is the end of a document."""
        if len(self._known) > MAX_KNOWN_WORDS:
            self._forget()
        new = [word for word in words if word not in self._known]
        if new:
            ids, counts = self._encode_words(new)
            self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(counts) - counts])
            self._counts = np.concatenate([self._counts, counts])
            self._ids = np.concatenate([self._ids, ids])
            self._known.update(zip(new, range(len(self._known) + 1, len(self._known) + len(new) + 1), strict=True))
        return np.fromiter(map(self._known.__getitem__, words), np.int64, len(words))

    def _encode_words(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all words, length of each), as from the library's pipeline: special tokens are not recognized, and a
        pre-token is not cut again."""
        encoded = [self._tokenize(word.encode().decode("latin-1").translate(self._stand_ins)) for word in words]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.fromiter((token.id for tokens in encoded for token in tokens), np.int32, int(lengths.sum())), lengths

    def _forget(self) -> None:
        self._known: dict[str, int] = {}
        self._ids, self._starts, self._counts = np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int64)


def has_glm_words(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer cuts texts as GLM's does and encodes every pre-token separately."""
    layout = json.loads(tokenizer.to_str())
    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZER_PATTERN}, "behavior": "Isolated", "invert": False}
    parts = (layout["pre_tokenizer"] or {}).get("pretokenizers", [])
    is_plain = layout["normalizer"] is None and all(token["special"] for token in layout["added_tokens"])
    byte_level = (
        len(parts) == 2
        and parts[1]["type"] == "ByteLevel"
        and not parts[1]["add_prefix_space"]
        and not parts[1]["use_regex"]
    )
    return is_plain and byte_level and parts[0] == split
