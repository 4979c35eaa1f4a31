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
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from infra.step import Output, Progress
from model.generation.sampling import Sampling
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.evaluation.engine import Engine, document_token_ids, end_token_ids, special_token_id
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASK = "glm46_choice"
PAIRS_PER_REPORT = 256
"""Number of pairs of question and choice that the engine is given between two progress reports."""


def run_harness(
    engine: Engine,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    sequence_length: int,
    weights_version: str,
    output: Output,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(the harness's sample per question, in their order; its metrics by name)."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = EngineModel(engine, tokenizer, sequence_length, weights_version, output)
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
    """Scores and continues text with an engine; a context that makes a row longer than `sequence_length` loses its
    beginning."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, sequence_length: int, weights_version: str, output: Output
    ) -> None:
        super().__init__()
        self.engine, self.bpe, self.sequence_length, self.output = engine, tokenizer, sequence_length, output
        self.weights_version = weights_version

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

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of every whole text. A text longer than `sequence_length` is scored in windows of that
        length, every token once, the last window with as many tokens before its own as fit."""
        totals: list[float] = []
        for (text,) in (request.args for request in requests):
            token_ids = self.tok_encode(text)
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(token_ids, self.eot_token_id, self.sequence_length, 1)
            ]
            scores = self.engine.score([[*context, *scored] for context, scored in windows])
            totals.append(sum(sum(row[-len(scored) :]) for row, (_, scored) in zip(scores, windows, strict=True)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Every context's continuation up to the first of its stop strings or the end of the answer."""
        answers: list[str] = []
        for seed, (context, options) in enumerate(request.args for request in requests):
            wanted: dict[str, Any] = {**normalize_gen_kwargs(options)}
            max_new_tokens = wanted["max_gen_toks"]
            if max_new_tokens >= self.sequence_length:
                raise ValueError(f"max_gen_toks ({max_new_tokens}) must be below {self.sequence_length}: lower it")
            prompt = [self.eot_token_id, *self.tok_encode(context)][max_new_tokens - self.sequence_length :]
            sampling = Sampling(
                max_new_tokens, wanted.get("temperature", 0.0), stop_token_ids=end_token_ids(self.bpe), seed=seed
            )
            token_ids = self.engine.generate([prompt], sampling, self.weights_version).token_ids[0]
            text = self.bpe.decode(token_ids, skip_special_tokens=True)
            answers.append(postprocess_generated_text(text, wanted["until"], think_end_token=None))
        return answers
