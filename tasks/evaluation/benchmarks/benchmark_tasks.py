"""A benchmark as a task of lm-evaluation-harness, and the harness's samples as outcomes of items.

The prompts, with their examples, are made by benchmark_items: the harness adds none. Programs are judged in the
project's sandbox; the harness executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from pydantic import BaseModel

from configs.schema import AnswerBenchmark, LikelihoodBenchmark
from model.text.chat_template import answer_of
from tasks.data.problems.refusals import behaves
from tasks.data.prompts.verifiers import agrees_mathematically, follows_constraints
from tasks.data.sandbox.code_sandbox import PASSED, find_verdict
from tasks.data.seeds.code_answers import program_of
from tasks.evaluation.benchmarks.benchmark_items import BenchmarkItem
from tasks.evaluation.harness import QuietTask

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

ACCURACY, NORMALISED, BITS_PER_BYTE = "accuracy", "accuracy_normalised", "bits_per_byte"
"""Figures. accuracy_normalised divides a choice's log-probability by its number of characters (acc_norm)."""
PROGRAMS = ("completed_program", "program")
RIGHT = "acc"


class ItemOutcome(BaseModel):
    """What was asked, what came back, and how it was judged."""

    benchmark: str
    item_id: str
    example_ids: tuple[str, ...]
    """Items shown as answered examples, in their order."""
    prompt: str
    """As the model was given it, with examples and chat template; of context_choice the first context. Messages as
    JSON for a server that applies the template itself."""
    choices: tuple[str, ...]
    expected: str
    output: str | None
    """What was generated; null where nothing was."""
    log_probabilities: tuple[float, ...]
    """Of every choice, of the last word, or of the whole text; empty where an answer was generated."""
    scores: dict[str, float]
    """Per figure: 1 right, 0 wrong; for bits_per_byte the number of bits."""
    num_bytes: int
    """Of the scored text, for bits_per_byte; else 1."""


def harness_task(benchmark: LikelihoodBenchmark | AnswerBenchmark, items: Sequence[BenchmarkItem]) -> ConfigurableTask:
    """The items as the harness's documents, in their order."""
    shape = _shape(benchmark)
    rows = [_row(benchmark.kind, item) for item in items]
    dataset = {"test": Dataset.from_list(rows)}
    return QuietTask(
        config={
            "task": benchmark.name,
            "custom_dataset": lambda **options: dataset,
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "text",
            **shape,
        }
    )


def _row(kind: str, item: BenchmarkItem) -> dict[str, Any]:
    question = item.question
    choices = [item.prompt + choice for choice in question.choices] if kind == "context_choice" else question.choices
    target = f" {question.expected}" if kind == "last_word" else question.expected
    return {"text": item.prompt, "choices": list(choices), "right": question.right, "target": target}


def _shape(benchmark: LikelihoodBenchmark | AnswerBenchmark) -> dict[str, Any]:
    """The part of a task's configuration that its kind decides."""
    if isinstance(benchmark, AnswerBenchmark):
        return {
            "output_type": "generate_until",
            "doc_to_target": "target",
            "generation_kwargs": {
                "until": benchmark.until,
                "max_gen_toks": benchmark.max_new_tokens,
                "do_sample": False,
                "temperature": 0.0,
            },
            "process_results": lambda row, answers: {
                RIGHT: float(is_right(benchmark.kind, row["text"], row["target"], answers[0]))
            },
            "metric_list": [_mean(RIGHT)],
        }
    if benchmark.kind == "text":
        return {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "target"}
    if benchmark.kind == "last_word":
        return {"output_type": "loglikelihood", "doc_to_target": "target", "metric_list": [_mean(RIGHT)]}
    is_context = benchmark.kind == "context_choice"
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "right" if is_context else "text",
        "doc_to_choice": "choices",
        "doc_to_target": "target" if is_context else "right",
        "metric_list": [_mean(RIGHT), *([_mean("acc_norm")] if benchmark.kind == "choice" else [])],
    }


def _mean(name: str) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}


def is_right(kind: str, prompt: str, expected: str, text: str) -> bool:
    """Whether a generated text answers an item. A program whose tests come to no verdict is not right."""
    if kind == "completed_program":
        return find_verdict(prompt + text, expected, "") == PASSED
    answer = answer_of(text)
    if not answer:
        return False
    if kind == "program":
        return find_verdict(program_of(answer), expected, "") == PASSED
    if kind == "math":
        return agrees_mathematically(answer, expected)
    if kind == "constraints":
        return follows_constraints(answer, expected)
    if kind in ("refusal", "over_refusal"):
        return behaves(answer, expected)
    assert kind == "exact", kind
    return answer == expected.strip()


def outcome_of(
    benchmark: LikelihoodBenchmark | AnswerBenchmark, item: BenchmarkItem, sample: dict[str, Any]
) -> ItemOutcome:
    """An item's outcome from the harness's sample. Raises ValueError for a log-probability that is not finite."""
    responses = sample["filtered_resps"]
    scores, num_bytes = {}, 1
    if benchmark.kind == "text":
        num_bytes = len(item.question.expected.encode())
        scores[BITS_PER_BYTE] = -responses[0] / math.log(2)
        log_probabilities = (responses[0],)
    else:
        scores[ACCURACY] = float(sample[RIGHT])
        log_probabilities = () if isinstance(benchmark, AnswerBenchmark) else tuple(each[0] for each in responses)
    if "acc_norm" in sample:
        scores[NORMALISED] = float(sample["acc_norm"])
    if not all(map(math.isfinite, log_probabilities)):
        raise ValueError(
            f"benchmark {benchmark.name}, item {item.item_id}: the model's log-probabilities are not finite: its "
            f"weights are broken, export the checkpoint again"
        )
    return ItemOutcome(
        benchmark=benchmark.name,
        item_id=item.item_id,
        example_ids=item.example_ids,
        prompt=sample["arguments"][0][0],
        choices=item.question.choices,
        expected=item.question.expected,
        output=responses[0] if isinstance(benchmark, AnswerBenchmark) else None,
        log_probabilities=log_probabilities,
        scores=scores,
        num_bytes=num_bytes,
    )
