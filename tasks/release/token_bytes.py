"""The bytes behind the tokens of a byte-level tokenizer."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes a token stands for: maybe a part of a UTF-8 character; those of its name for a special token."""
    token = tokenizer.id_to_token(token_id)
    assert token is not None, f"token id {token_id} lies outside the tokenizer's {tokenizer.get_vocab_size()} tokens"
    if token_id in tokenizer.get_added_tokens_decoder():
        return token.encode()
    return bytes(_byte_of_character()[character] for character in token)


def written_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a server writes for a generated token: nothing for a special one and for an unused row of the vocabulary."""
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if tokenizer.id_to_token(token_id) is None or (added is not None and added.special):
        return b""
    return token_bytes(tokenizer, token_id)


@cache
def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2, encoder.py, bytes_to_unicode), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def ends_inside_character(data: bytes) -> bool:
    """Whether the last UTF-8 character of `data` lacks bytes, by the rule of llama.cpp's server (validate_utf8)."""
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if length < needed:
            return True
    return False
