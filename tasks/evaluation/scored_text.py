"""The tokens of a suite's document by which a model is scored: all of them, or of a conversation the assistant's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.text.chat_template import encode, render_to_train
from tasks.data.records.documents import CHAT
from tasks.evaluation.engine import document_token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tasks.evaluation.suite import Question


@dataclass(frozen=True)
class ScoredText:
    """The tokens of one document or conversation."""

    token_ids: list[int]
    is_scored: list[bool]
    """For every token after the first: whether its log-probability counts."""
    num_bytes: int
    """UTF-8 bytes of what counts; special tokens have none."""


def scored_text(tokenizer: Tokenizer, question: Question) -> ScoredText:
    """A document follows the end-of-text token, and every token of it counts. Of a conversation, as SFT reads it,
    what an assistant writes counts, as in training."""
    if question.domain != CHAT:
        token_ids = document_token_ids(tokenizer, question.text)
        return ScoredText(token_ids, [True] * (len(token_ids) - 1), len(question.text.encode()))
    chat = json.loads(question.text)
    segments = render_to_train(chat["messages"], chat["tools"])
    token_ids, is_trained = encode(tokenizer, segments)
    written = [segment.text for segment in segments if segment.is_trained and not segment.is_special]
    return ScoredText(token_ids, is_trained[1:], len("".join(written).encode()))
