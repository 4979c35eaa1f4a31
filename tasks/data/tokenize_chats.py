"""Tokenizes the conversations of one Spark partition into one shard with a mask. Runs in executors: imports neither Spark nor infra."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from model.chat_template import encode, render_to_train
from tasks.data.token_shard import token_dtype
from tasks.data.tokenize_parts import Sequences, open_tokenizer, write_sequences

if TYPE_CHECKING:
    import pyarrow as pa


def write_chat_shard(batches: Iterator[pa.RecordBatch], directory: str, tokenizer_path: str, vocab_size: int) -> Iterator[pa.RecordBatch]:
    """Write conversations, sorted by id and all of one shard, as <shard>.bin, .idx and .mask; yields SHARD_COLUMNS."""
    tokenizer = open_tokenizer(tokenizer_path)

    def encode_chats(batch: pa.RecordBatch) -> Sequences:
        rows = zip(batch["messages"].to_pylist(), batch["tools"].to_pylist(), strict=True)
        encoded = [encode(tokenizer, render_to_train(json.loads(messages), json.loads(tools))) for messages, tools in rows]
        return [ids for ids, _ in encoded], [trained for _, trained in encoded]

    return write_sequences(batches, Path(directory), token_dtype(vocab_size), encode_chats)
