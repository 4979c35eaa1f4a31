"""Runs lm-evaluation-harness over our engine: a suite's questions are its task, the engine is its model.

Importing this takes two seconds. Nothing is downloaded: the task's documents are passed in memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from infra.step import Output, Progress
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.evaluation.engine import Engine, document_token_ids, special_token_id
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASK = "glm46_choice"
PAIRS_PER_REPORT = 256
"""Number of pairs of question and choice that the engine is given between two progress reports."""


def run_harness(
    engine: Engine, tokenizer: Tokenizer, questions: Sequence[Question], sequence_length: int, output: Output
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(the harness's sample per question, in their order; its metrics by name)."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = EngineModel(engine, tokenizer, sequence_length, output)
    results: Any = evaluate(model, {TASK: _task(questions)}, bootstrap_iters=0, log_samples=True, verbosity="ERROR")
    return sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"]), results["results"][TASK]


def _task(questions: Sequence[Question]) -> ConfigurableTask:
    rows = [
        {"text": question.text, "choices": question.choice_list, "right": int(question.answer)}
        for question in questions
    ]
    return QuietTask(
        config={
            "task": TASK,
            "custom_dataset": lambda **options: {"test": Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "right",
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
            ],
        }
    )


class QuietTask(ConfigurableTask):
    """A task without the harness's progress bar: the pipeline shows its own."""

    def build_all_requests(self, **options: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            super().build_all_requests(**options)


class EngineModel(TemplateLM):
    """Scores pairs of context and continuation with an engine; a pair longer than `sequence_length` loses its
    beginning."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, sequence_length: int, output: Output) -> None:
        super().__init__()
        self.engine, self.bpe, self.sequence_length, self.output = engine, tokenizer, sequence_length, output

    @property
    def eot_token_id(self) -> int:
        return special_token_id(self.bpe, END_OF_TEXT)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return document_token_ids(self.bpe, string)[1:]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        """Log-probability of every continuation. Whether it is the greedy one is not measured: acc and acc_norm do not
        need it."""
        likelihoods: list[tuple[float, bool]] = []
        for start in range(0, len(requests), PAIRS_PER_REPORT):
            self.output.report(Progress(start, len(requests), "choices", "scoring multiple choice"))
            block = requests[start : start + PAIRS_PER_REPORT]
            rows = [
                [self.eot_token_id, *context, *continuation][-self.sequence_length - 1 :]
                for _, context, continuation in block
            ]
            for (_, _, continuation), scores in zip(block, self.engine.score(rows), strict=True):
                likelihoods.append((sum(scores[-len(continuation) :]), False))
        return likelihoods

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError(f"task {TASK} asks for multiple choice only")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError(f"task {TASK} asks for multiple choice only")
