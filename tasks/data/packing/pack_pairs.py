"""Step: preference pairs and tokenizer -> the pairs of a phase as token ids: train, validation and test.parquet.

Both conversations of a pair are whole: a pair with one longer than the phase's rows is left out and counted. A row
holds the token ids of the preferred and of the rejected conversation, and where the answer starts; the two are equal
before it. Rows are in the order of their ids; the order of training is decided by the phase's seed.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from infra.step import Artifact, Output, Progress, Record, step
from model.text.chat_template import encode, is_thinking, render_closed
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.records.documents import TEST, TRAIN, VALIDATION

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

    from configs.schema import PairPackingRecipe
    from tasks.data.preferences.collect_preferences import CollectedPreferences
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

BATCH_ROWS = 1000


class PackedPairs(Record):
    num_training: int
    num_validation: int
    num_test: int
    too_long: dict[str, int]
    """Pairs that were left out by part of the split: one of their conversations is longer than a row."""
    training_tokens: int
    """Of both conversations of the pairs to train on."""


@step(content=("train.parquet", "validation.parquet", "test.parquet"), distributions=("pyarrow", "tokenizers", "numpy"))
def pack_pairs(
    *,
    preferences: Artifact[CollectedPreferences],
    tokenizer: Artifact[TrainedTokenizer],
    recipe: PairPackingRecipe,
    output: Output,
) -> PackedPairs:
    """Tokenize the pairs of all parts. Raises ValueError where a part is left without one."""
    import pyarrow.parquet as pq

    opened = tokenizer_for_text(str(tokenizer.path("tokenizer.json")))
    parts = (TRAIN, VALIDATION, TEST)
    writers = {part: pq.ParquetWriter(output.path(f"{part}.parquet"), _schema()) for part in parts}
    kept: Counter[str] = Counter()
    too_long: Counter[str] = Counter()
    num_tokens = num_read = 0
    for path in preferences.paths("pairs/*.parquet"):
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
            rows: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
            for pair in batch.to_pylist():
                row = encode_pair(opened, pair)
                if max(len(row["chosen"]), len(row["rejected"])) > recipe.sequence_length:
                    too_long[pair["split"]] += 1
                else:
                    rows[pair["split"]].append(row)
                    num_tokens += (len(row["chosen"]) + len(row["rejected"])) * (pair["split"] == TRAIN)
            for part in parts:
                kept[part] += len(rows[part])
                writers[part].write_batch(_batch(rows[part]))
            num_read += batch.num_rows
            output.report(Progress(num_read, preferences.record.num_pairs, "pairs"))
    for writer in writers.values():
        writer.close()
    if empty := [part for part in parts if not kept[part]]:
        raise ValueError(
            f"no preference pair of {recipe.sequence_length} tokens or less is left for {', '.join(empty)} "
            f"(longer ones: {dict(too_long)}): raise sequence_length or preferences.test_share and "
            f"preferences.validation_share, or bring more files of role preference"
        )
    return PackedPairs(
        num_training=kept[TRAIN],
        num_validation=kept[VALIDATION],
        num_test=kept[TEST],
        too_long={part: too_long[part] for part in parts if too_long[part]},
        training_tokens=num_tokens,
    )


def encode_pair(tokenizer: Tokenizer, pair: dict[str, Any]) -> dict[str, Any]:
    """Token ids of both conversations of a pair, and where the answer starts. Where one answer has reasoning, both
    were asked for it: the prompts of the two rows are equal."""
    prompt, tools = json.loads(pair["prompt"]), json.loads(pair["tools"])
    sides = {side: [*prompt, json.loads(pair[side])] for side in ("chosen", "rejected")}
    thinks = any(is_thinking(messages) for messages in sides.values())
    row: dict[str, Any] = {"id": pair["id"], "collection": pair["collection"]}
    for side, messages in sides.items():
        token_ids, trained = encode(tokenizer, render_closed(messages, tools, enable_thinking=thinks))
        row |= {side: token_ids, "answer_start": len(trained) - trained[::-1].index(False)}
    shared = [row[side][: row["answer_start"]] for side in sides]
    assert shared[0] == shared[1], (pair["id"], row["answer_start"])
    return row


def _schema() -> pa.Schema:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    fields = [("id", pa.string()), ("collection", pa.string()), ("answer_start", pa.int32())]
    return pa.schema([*fields, ("chosen", ids), ("rejected", ids)])


def _batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist(rows, schema=_schema())
