"""Tokenizes the conversations of one Spark partition into one shard with a mask. Runs in executors: imports neither
Spark nor infra."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from configs.files.stored_files import StoredFile, local_copy
from model.text.chat_template import encode, render_to_train
from tasks.data.shards.token_shard import token_dtype
from tasks.data.shards.tokenize_parts import Sequences, write_sequences
from tasks.data.text.text_encoder import open_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


def write_chat_shard(
    batches: Iterator[pa.RecordBatch], directory: str, tokenizer: StoredFile, vocab_size: int
) -> Iterator[pa.RecordBatch]:
    """Write conversations, sorted by id and all of one shard, as <shard>.bin, .idx, .mask and sidecar; yields
    SHARD_COLUMNS."""
    opened = open_tokenizer(local_copy(tokenizer))

    def encode_chats(batch: pa.RecordBatch) -> Sequences:
        rows = zip(batch["messages"].to_pylist(), batch["tools"].to_pylist(), strict=True)
        encoded = [encode(opened, render_to_train(json.loads(messages), json.loads(tools))) for messages, tools in rows]
        lengths = np.fromiter((len(ids) for ids, _ in encoded), np.int64, len(encoded))
        ids = np.fromiter(chain.from_iterable(ids for ids, _ in encoded), np.int32, int(lengths.sum()))
        return ids, lengths, np.fromiter(chain.from_iterable(trained for _, trained in encoded), np.bool_, len(ids))

    return write_sequences(batches, directory, token_dtype(vocab_size), encode_chats)
