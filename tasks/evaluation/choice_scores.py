"""Multiple choice by likelihood: which choice does the model continue the question with?

lm-evaluation-harness measures it. Every choice is scored after the question and one space, as the harness does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.step import Output
from tasks.evaluation.engine import ScoringEngine
from tasks.evaluation.items import CHOICE, Item
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ChoiceScores:
    """What the harness measured."""

    items: list[Item]
    normalised_accuracy: float
    """acc_norm: the log-probability of a choice is divided by its number of characters before they are compared."""


def score_choices(
    engine: ScoringEngine,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    sequence_length: int,
    weights_version: str,
    output: Output,
) -> ChoiceScores:
    """One item per question, in their order; score is the harness's acc."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from tasks.evaluation.harness import run_harness

    samples, metrics = run_harness(engine, tokenizer, questions, sequence_length, weights_version, output)
    items = [_item(question, sample) for question, sample in zip(questions, samples, strict=True)]
    return ChoiceScores(items, metrics["acc_norm,none"])


def _item(question: Question, sample: dict[str, Any]) -> Item:
    log_probabilities = [response[0] for response in sample["filtered_resps"]]
    right, is_right = int(question.answer), int(sample["acc"])
    return Item(
        question.item_id,
        CHOICE,
        question.domain,
        question.unit,
        question.prompt_digest,
        expected=question.answer,
        output=json.dumps(log_probabilities),
        score=float(is_right),
        log_probability=log_probabilities[right],
        num_bytes=len(question.choice_list[right].encode()),
        num_samples=1,
        num_right=is_right,
    )
