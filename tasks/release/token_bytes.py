"""The bytes that the tokens of a byte-level tokenizer encode."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from model.text.tokenizer_layout import SHOWN_TOKENS, byte_characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that a token writes, which may be a part of a UTF-8 character; none for a special token or an unused
    row of the vocabulary."""
    token = tokenizer.id_to_token(token_id)
    if token in SHOWN_TOKENS:
        return token.encode()
    if token is None or token_id in tokenizer.get_added_tokens_decoder():
        return b""
    return bytes(_byte_of_character()[character] for character in token)


@cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def ends_inside_character(data: bytes) -> bool:
    """Whether the last UTF-8 character of `data` lacks bytes, by the rule of llama.cpp's server (validate_utf8)."""
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if length < needed:
            return True
    return False
