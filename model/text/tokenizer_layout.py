"""The vocabulary layout of GLM-4.5/4.6: byte-level BPE tokens first, then 36 special tokens, then unused rows.

The tokenizer step trains with these constants and the GGUF export relies on them, so the served model splits text the
same way.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import AddedToken, Tokenizer

SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""Special tokens in the order of their ids, which follow the ordinary tokens without a gap: 151,329 to 151,364 in
GLM-4.5/4.6."""

SHOWN_TOKENS: tuple[str, ...] = SPECIAL_TOKENS[SPECIAL_TOKENS.index("<think>") : SPECIAL_TOKENS.index("/nothink")]
"""Marks of reasoning and of tool calls. As in GLM's own files they are tokens that decoding shows (`special: false`):
servers' parsers find them in the text, which SGLang and transformers write without special tokens."""

NUM_SPECIAL_S1 = 256
SPECIAL_TOKENS_BY_LAYOUT: dict[str, tuple[str, ...]] = {
    "glm": SPECIAL_TOKENS,
    "s1_256": SPECIAL_TOKENS
    + tuple(f"<|reserved_{number}|>" for number in range(NUM_SPECIAL_S1 - len(SPECIAL_TOKENS))),
}
"""`tokenizer.special_tokens` of the configuration. s1_256: the source document S1 asks for 256; those that it does not
name are reserved, after GLM's 36, so templates and end tokens are the same."""

END_OF_TEXT = "<|endoftext|>"
"""Separates documents in pre-training, pads, and is the first of the three end-of-sequence tokens."""

END_TOKENS: tuple[str, ...] = ("<|endoftext|>", "<|user|>", "<|observation|>")
"""Tokens that end a generated turn: GLM closes the assistant's turn with the next role token."""

PRETOKENIZER_PATTERN: str = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
"""llama.cpp's pre-tokenizer "glm4" (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_CHATGLM4): with `tokenizers`, a `Split` on
this regex with behaviour "isolated", then `ByteLevel(add_prefix_space=False, use_regex=False)`; no normalizer."""

PUBLISHED_PRETOKENIZER_PATTERN: str = PRETOKENIZER_PATTERN.replace(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
)
"""The spelling in the published GLM tokenizer.json; it differs only for the long s, which (?i) folds to s."""


@cache
def byte_characters() -> tuple[str, ...]:
    """The printable character for every byte in a byte-level vocabulary (GPT-2, encoder.py, bytes_to_unicode)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(256 + number) for number in range(256))
    return tuple(chr(byte) if byte in printable else next(others) for byte in range(256))


def added_tokens(contents: Iterable[str]) -> list[AddedToken]:
    """Tokens beside the ordinary ones, as published: those that decoding shows are not special."""
    from tokenizers import AddedToken

    return [AddedToken(content, special=content not in SHOWN_TOKENS, normalized=False) for content in contents]


def tokenizer_for_text(path: str) -> Tokenizer:
    """The tokenizer for text that people wrote: a document that speaks of <|endoftext|> or <think> holds its
    characters, never its id."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(path)
    # The library splits only special tokens into characters.
    tokens = tokenizer.get_added_tokens_decoder().values()
    tokenizer.add_special_tokens(
        [AddedToken(token.content, special=True, normalized=token.normalized) for token in tokens]
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Of all tokens with their ids: the same however the file is written, another where two ids change places."""
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
