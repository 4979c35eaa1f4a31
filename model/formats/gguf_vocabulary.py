"""Converts a `tokenizer.json` (byte-level BPE) to the token list, token types and merges of a GGUF file."""

import json
from dataclasses import dataclass
from pathlib import Path

from gguf import TokenType

from model.text.tokenizer_layout import END_TOKENS, PRETOKENIZER_PATTERN, PUBLISHED_PRETOKENIZER_PATTERN


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]
    """One per row of the embedding, in id order; rows without a token are named [PADn]."""
    types: list[int]
    """NORMAL, CONTROL (special), USER_DEFINED (added, but shown as text) or UNUSED."""
    merges: list[str]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def read_vocabulary(tokenizer_path: Path, vocab_size: int) -> Vocabulary:
    """Read and check: the tokenizer must be one that llama.cpp's pre-tokenizer "glm4" splits in the same places."""
    try:
        tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{tokenizer_path} is not a readable tokenizer.json ({error}): train or copy the tokenizer again"
        ) from error
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or tokenizer.get("normalizer"):
        raise ValueError(
            f"{tokenizer_path}: must be a byte-level BPE without normalizer, is {model['type']} with "
            f"{tokenizer.get('normalizer')}"
        )
    _check_pretokenizer(tokenizer_path, tokenizer.get("pre_tokenizer"))
    tokens: list[str | None] = [None] * vocab_size
    types: list[int] = [TokenType.UNUSED] * vocab_size
    ordinary = [(token_id, token, TokenType.NORMAL) for token, token_id in model["vocab"].items()]
    added = [
        (entry["id"], entry["content"], TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED)
        for entry in tokenizer["added_tokens"]
    ]
    # Added tokens come second: a trainer may list a special token in the vocabulary as well, and its type is the added
    # one.
    for token_id, token, token_type in [*ordinary, *added]:
        if token_id >= vocab_size:
            raise ValueError(
                f"{tokenizer_path}: token {token!r} has id {token_id}, beyond vocab_size {vocab_size}: not this "
                f"model's tokenizer"
            )
        tokens[token_id], types[token_id] = token, token_type
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary = Vocabulary(
        [f"[PAD{row}]" if token is None else token for row, token in enumerate(tokens)], types, merges
    )
    for token in ("[gMASK]", *END_TOKENS):
        if token not in vocabulary.tokens:
            raise ValueError(
                f"{tokenizer_path}: special token {token} is missing: train the tokenizer with all SPECIAL_TOKENS"
            )
    return vocabulary


def _check_pretokenizer(tokenizer_path: Path, pretokenizer: dict | None) -> None:
    parts = (pretokenizer or {}).get("pretokenizers", [])
    splits = [part for part in parts if part["type"] == "Split"]
    byte_level = [part for part in parts if part["type"] == "ByteLevel"]
    fits = (
        len(parts) == 2
        and len(splits) == len(byte_level) == 1
        and splits[0]["pattern"].get("Regex") in (PRETOKENIZER_PATTERN, PUBLISHED_PRETOKENIZER_PATTERN)
        and splits[0]["behavior"] == "Isolated"
        and not splits[0]["invert"]
        and not byte_level[0]["add_prefix_space"]
        and not byte_level[0]["use_regex"]
    )
    if not fits:
        raise ValueError(
            f"{tokenizer_path}: the pre-tokenizer must be Split(model.tokenizer_layout.PRETOKENIZER_PATTERN, "
            f"isolated) then "
            f'ByteLevel(add_prefix_space=False, use_regex=False), llama.cpp\'s "glm4"; it is {json.dumps(pretokenizer)}'
        )
