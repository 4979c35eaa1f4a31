"""The beginnings of a suite's documents by which the files of a release are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.evaluation.scored_text import scored_text
from tasks.release.token_bytes import token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tasks.evaluation.suite import Question


@dataclass(frozen=True)
class LeadingText:
    """The leading tokens of one document."""

    item_id: str
    token_ids: list[int]
    is_scored: list[bool]
    """For every token after the first."""
    num_bytes: int


def leading_texts(tokenizer: Tokenizer, documents: Sequence[Question], max_tokens: int) -> list[LeadingText]:
    """At most `max_tokens` tokens of each document. Raises ValueError where none of them counts: beginnings of
    conversations that end before the first answer."""
    texts = []
    for document in documents:
        whole = scored_text(tokenizer, document)
        token_ids = whole.token_ids[: max_tokens + 1]
        is_scored = whole.is_scored[: len(token_ids) - 1]
        written = [token_id for token_id, counts in zip(token_ids[1:], is_scored, strict=True) if counts]
        num_bytes = sum(len(token_bytes(tokenizer, token_id)) for token_id in written)
        texts.append(LeadingText(document.item_id, token_ids, is_scored, num_bytes))
    if not any(text.num_bytes for text in texts):
        raise ValueError(
            f"release.recipe.max_quantization_document_tokens ({max_tokens}) ends before the first answer of every "
            "conversation: raise it"
        )
    return texts
