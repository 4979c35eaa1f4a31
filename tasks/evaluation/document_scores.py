"""Bits per byte: the log-probability of held-out documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infra.step import Output, Progress
from tasks.evaluation.engine import Engine, document_token_ids
from tasks.evaluation.items import DOCUMENT, Item
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WINDOWS_PER_REPORT = 64
"""Number of windows that the engine is given between two progress reports."""


def score_documents(
    engine: Engine, tokenizer: Tokenizer, documents: Sequence[Question], sequence_length: int, output: Output
) -> Iterator[Item]:
    """One item per document, every token of it predicted: the first from the end-of-text token, as in training.

    A document longer than `sequence_length` is cut into windows; each begins with the last token of the one before it
    as context.
    """
    windows: list[list[int]] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        token_ids = document_token_ids(tokenizer, document.text)
        for start in range(0, len(token_ids) - 1, sequence_length):
            windows.append(token_ids[start : start + sequence_length + 1])
            owners.append(number)
    totals = [0.0] * len(documents)
    for start in range(0, len(windows), WINDOWS_PER_REPORT):
        output.report(Progress(start, len(windows), "windows", "scoring held-out documents"))
        scores = engine.score(windows[start : start + WINDOWS_PER_REPORT])
        for owner, row in zip(owners[start : start + WINDOWS_PER_REPORT], scores, strict=True):
            totals[owner] += sum(row)
    for document, log_probability in zip(documents, totals, strict=True):
        num_bytes = len(document.text.encode())
        yield Item(
            document.item_id,
            DOCUMENT,
            document.domain,
            document.unit,
            document.prompt_digest,
            expected="",
            output="",
            score=-log_probability / math.log(2) / num_bytes,
            log_probability=log_probability,
            num_bytes=num_bytes,
            num_samples=0,
            num_right=0,
        )
