"""The byte-level BPE tokenizer in GLM's layout, on the `tokenizers` library: training, files, and encoding inside Spark executors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from model.tokenizer_layout import END_OF_TEXT, PRETOKENIZER_PATTERN, SPECIAL_TOKENS

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

MIN_PAIR_COUNT = 2
"""A pair that occurs once in the sample is no pattern."""
TOKEN_COLUMNS = "id string, source string, offset long, num_bytes long, bucket int, tokens binary, num_tokens long"


def train_bpe(texts: Iterator[str], num_ordinary_tokens: int) -> Tokenizer:
    """Learn the merges from texts; special tokens get the ids from `num_ordinary_tokens` on.

    Raises ValueError if the texts do not hold enough different pairs: the ids of the special tokens would move."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=num_ordinary_tokens, min_frequency=MIN_PAIR_COUNT, special_tokens=[], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    num_found = tokenizer.get_vocab_size(with_added_tokens=False)
    if num_found != num_ordinary_tokens:
        raise ValueError(
            f"the tokenizer sample holds only {num_found} ordinary tokens (256 bytes and {num_found - 256} pairs that occur twice or more), "
            f"tokenizer.num_ordinary_tokens asks for {num_ordinary_tokens}: lower it to at most {num_found}, raise tokenizer.sample_chars "
            "or bring more text"
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Content of tokenizer_config.json: what transformers, vLLM and llama.cpp read beside tokenizer.json."""
    ids = {tokenizer.token_to_id(token): token for token in SPECIAL_TOKENS}
    shape = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(identity): {"content": token, **shape} for identity, token in sorted(ids.items())},
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


@cache
def text_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a file, set to read `<|endoftext|>` and the like in a text as plain characters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_batches(batches: Iterator[pa.RecordBatch], tokenizer_json: Any, num_vocabulary: int) -> Iterator[pa.RecordBatch]:
    """TOKEN_COLUMNS for documents (id, source, offset, num_bytes, bucket, text): each ends in END_OF_TEXT. `tokenizer_json` is a broadcast."""
    import numpy as np
    import pyarrow as pa
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(tokenizer_json.value)
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = token_dtype(num_vocabulary)
    for batch in batches:
        encodings = tokenizer.encode_batch_fast(batch.column("text").to_pylist(), add_special_tokens=False)
        tokens = [np.asarray([*encoding.ids, end], dtype=dtype) for encoding in encodings]
        columns = [batch.column(name) for name in ("id", "source", "offset", "num_bytes", "bucket")]
        columns += [pa.array([row.tobytes() for row in tokens], pa.binary()), pa.array([len(row) for row in tokens], pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=[column.split(" ")[0] for column in TOKEN_COLUMNS.split(", ")])


def token_dtype(num_vocabulary: int) -> str:
    """Megatron's rule: 16 bits where every id below 65,500 fits, else 32."""
    return "uint16" if num_vocabulary < 65500 else "int32"


def write_json(value: Any, path: os.PathLike[str]) -> None:
    """One spelling of a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True, ensure_ascii=False)
        file.write("\n")
