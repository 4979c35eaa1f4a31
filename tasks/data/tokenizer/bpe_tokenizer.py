"""The byte-level BPE tokenizer in GLM's layout, learned from counted words, as a `tokenizers` object and files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from model.text.chat_template import CHAT_TEMPLATE
from model.text.tokenizer_layout import END_OF_TEXT, PRETOKENIZER_PATTERN, SPECIAL_TOKENS, added_tokens, byte_characters
from tasks.data.tokenizer.bpe_merges import IN_MEMORY, Room, WordTable, learn_merges
from tasks.data.tokenizer.word_counts import count_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_PAIR_COUNT = 2
"""Least count of a learned pair: a pair that occurs once in the sample is no pattern."""


def train_bpe(texts: Iterator[str], num_ordinary_tokens: int) -> Tokenizer:
    """Learn the merges from texts in memory; GLM's special tokens get the ids from `num_ordinary_tokens` on."""
    return bpe_of_words([count_texts(texts)], num_ordinary_tokens, SPECIAL_TOKENS)


def bpe_of_words(
    words: Iterable[WordTable], num_ordinary_tokens: int, special_tokens: tuple[str, ...], room: Room = IN_MEMORY
) -> Tokenizer:
    """Learn the merges from counted words: those that the trainer of `tokenizers` learns from the same text.

    Raises ValueError if the words do not hold enough different pairs: the ids of the special tokens would move. Raises
    NoRoomError."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    learned = learn_merges(words, num_ordinary_tokens, MIN_PAIR_COUNT, room)
    tokens = dict.fromkeys([*sorted(byte_characters()), *(merged for _, _, merged in learned)])
    num_learned = len(tokens)
    if num_learned != num_ordinary_tokens:
        raise ValueError(
            f"the tokenizer sample holds only {num_learned} ordinary tokens (256 bytes, {num_learned - 256} pairs that "
            f"occur twice or more), "
            f"tokenizer.num_ordinary_tokens asks for {num_ordinary_tokens}: lower it to at most {num_learned}, "
            "raise tokenizer.sample_chars or bring more text"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # A pair can be learned twice, if another pair gives one of its tokens: as in the reference, the last merge counts.
    merges = list(reversed(dict.fromkeys((left, right) for left, right, _ in reversed(learned))))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_tokens(added_tokens(special_tokens))
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Content of tokenizer_config.json: what transformers, vLLM and llama.cpp read beside tokenizer.json."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    shape = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(identity): {"content": token.content, "special": token.special, **shape} for identity, token in added
        },
        "additional_special_tokens": [
            token.content for _, token in added if token.special and token.content != END_OF_TEXT
        ],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(value: Any, path: os.PathLike[str]) -> None:
    """Write a JSON file with fixed indentation and order of keys."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True, ensure_ascii=False)
        file.write("\n")
