"""The byte-level BPE tokenizer in GLM's layout, on the `tokenizers` library: training and files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from model.chat_template import CHAT_TEMPLATE
from model.tokenizer_layout import END_OF_TEXT, PRETOKENIZER_PATTERN, SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_PAIR_COUNT = 2
"""A pair that occurs once in the sample is no pattern."""


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
            f"the tokenizer sample holds only {num_found} ordinary tokens (256 bytes, {num_found - 256} pairs that occur twice or more), "
            f"tokenizer.num_ordinary_tokens asks for {num_ordinary_tokens}: lower it to at most {num_found}, "
            "raise tokenizer.sample_chars or bring more text"
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
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(value: Any, path: os.PathLike[str]) -> None:
    """One spelling of a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True, ensure_ascii=False)
        file.write("\n")
