"""Bits per byte: the log-probability of held-out text, of its far end, or of the answers in held-out conversations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infra.step import Output, Progress
from tasks.evaluation.engine import Engine, ScoringEngine, document_token_ids
from tasks.evaluation.items import Item
from tasks.evaluation.scored_text import scored_text
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WINDOWS_PER_REPORT = 64
"""Number of windows that the engine is given between two progress reports."""


def score_documents(
    engine: Engine, tokenizer: Tokenizer, documents: Sequence[Question], sequence_length: int, output: Output
) -> Iterator[Item]:
    """One item per document, every token of it predicted: the first from the end-of-text token, as in training. Of a
    conversation the tokens count that training would train.

    A document longer than `sequence_length` is cut into windows; each begins with the last token of the one before it
    as context.
    """
    texts = [scored_text(tokenizer, document) for document in documents]
    windows: list[list[int]] = []
    owners: list[tuple[int, int]] = []
    for number, text in enumerate(texts):
        for start in range(0, len(text.token_ids) - 1, sequence_length):
            windows.append(text.token_ids[start : start + sequence_length + 1])
            owners.append((number, start))
    # The engine pads what it is given to one length.
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number]))
    totals = [0.0] * len(documents)
    for start in range(0, len(windows), WINDOWS_PER_REPORT):
        output.report(Progress(start, len(windows), "windows", "scoring held-out documents"))
        members = order[start : start + WINDOWS_PER_REPORT]
        scores = engine.score([windows[number] for number in members])
        for (owner, first), row in zip([owners[number] for number in members], scores, strict=True):
            counts = texts[owner].is_scored[first : first + len(row)]
            totals[owner] += sum(value for value, is_scored in zip(row, counts, strict=True) if is_scored)
    for document, text, log_probability in zip(documents, texts, totals, strict=True):
        yield _scored(document, log_probability, text.num_bytes)


def score_far_texts(
    engine: ScoringEngine, tokenizer: Tokenizer, questions: Sequence[Question], max_tokens: int, output: Output
) -> Iterator[Item]:
    """One item per question: what comes after its text, which a phase with shorter rows has read at no position. Where
    both have more than `max_tokens`, as by another tokenizer than that of the suite, the text loses its beginning."""
    output.report(Progress(0, len(questions), "documents", "scoring text far from its document's beginning"))
    pairs = []
    for question in questions:
        scored = tokenizer.encode(question.answer, add_special_tokens=False).ids
        room = max_tokens - len(scored)
        pairs.append((document_token_ids(tokenizer, question.text)[-room:], scored))
    for question, score in zip(questions, engine.score_continuations(pairs), strict=True):
        yield _scored(question, score.log_probability, len(question.answer.encode()))


def _scored(question: Question, log_probability: float, num_bytes: int) -> Item:
    return Item(
        question.item_id,
        question.kind,
        question.domain,
        question.unit,
        question.prompt_digest,
        expected="",
        output="",
        score=-log_probability / math.log(2) / num_bytes,
        log_probability=log_probability,
        num_bytes=num_bytes,
        num_samples=0,
        num_right=0,
    )
