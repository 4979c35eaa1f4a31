"""Ask a checkpoint every question of a suite: bits per byte of validation documents, verified arithmetic.

In: a trained checkpoint (hf/ with tokenizer.json) and a suite. Out: items.parquet, one row per item, sorted by item id; gates read
only that. Runs in this process with fixed threads and deterministic algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from model.tokenizer_layout import END_OF_TEXT, END_TOKENS
from tasks.evaluation.engine import Engine, load_engine, load_tokenizer, reproducible_arithmetic
from tasks.evaluation.items import (
    ARITHMETIC,
    VALIDATION,
    Item,
    arithmetic_accuracy,
    bits_per_byte,
    bits_per_byte_by_domain,
    text_digest,
    write_items,
)
from tasks.evaluation.select_evaluation_items import Question, read_suite

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationRecipe, EvaluationResources
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.training.train_phase import TrainedCheckpoint

SEQUENCES_PER_REPORT = 64
"""Sequences handed to the engine between two progress reports."""


class Evaluation(Record):
    """What a checkpoint achieved on a suite."""

    suite_digest: str
    checkpoint_digest: str
    num_items: int
    num_non_finite: int
    """Validation documents whose log-probability is NaN or infinite: a broken model."""
    bits_per_byte: float | None
    """Over all validation documents; None where one is not finite."""
    bits_per_byte_by_domain: dict[str, float | None]
    arithmetic_accuracy: float


@step(content=("items.parquet",), distributions=("torch", "tokenizers", "pyarrow", "safetensors"))
def evaluate_checkpoint(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    suite: Artifact[EvaluationSuite],
    recipe: EvaluationRecipe,
    resources: EvaluationResources,
    output: Output,
) -> Evaluation:
    """A model that yields NaN is evaluated like any other: the gate refuses it."""
    checkpoint_dir = checkpoint.directory("hf")
    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    questions = read_suite(suite.path("suite.parquet"))
    with reproducible_arithmetic(recipe.num_threads):
        engine = load_engine(checkpoint_dir, weights_version=checkpoint.digest, batch_sequences=resources.batch_sequences)
        documents = [question for question in questions if question.kind == VALIDATION]
        problems = [question for question in questions if question.kind == ARITHMETIC]
        items = [*score_documents(engine, tokenizer, documents, recipe.sequence_length, output)]
        items += answer_problems(engine, tokenizer, problems, recipe.max_new_tokens, checkpoint.digest, output)
    write_items(output.path("items.parquet"), items)
    return Evaluation(
        suite_digest=suite.record.suite_digest,
        checkpoint_digest=checkpoint.digest,
        num_items=len(items),
        num_non_finite=sum(not math.isfinite(item.log_probability) for item in items if item.kind == VALIDATION),
        bits_per_byte=_figure(bits_per_byte(items)),
        bits_per_byte_by_domain={name: _figure(value) for name, value in bits_per_byte_by_domain(items).items()},
        arithmetic_accuracy=arithmetic_accuracy(items),
    )


def _figure(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def score_documents(
    engine: Engine, tokenizer: Tokenizer, documents: Sequence[Question], sequence_length: int, output: Output
) -> Iterator[Item]:
    """One item per document, every token of it predicted: the first from the end-of-text token, as in training.

    A document longer than `sequence_length` is cut into windows; each begins with the last token of the one before it as context.
    """
    windows: list[list[int]] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        token_ids = document_token_ids(tokenizer, document.text)
        for start in range(0, len(token_ids) - 1, sequence_length):
            windows.append(token_ids[start : start + sequence_length + 1])
            owners.append(number)
    totals = [0.0] * len(documents)
    for start in range(0, len(windows), SEQUENCES_PER_REPORT):
        output.report(Progress(start, len(windows), "windows", "scoring validation documents"))
        scores = engine.score(windows[start : start + SEQUENCES_PER_REPORT])
        for owner, row in zip(owners[start : start + SEQUENCES_PER_REPORT], scores, strict=True):
            totals[owner] += sum(row)
    for document, log_probability in zip(documents, totals, strict=True):
        num_bytes = len(document.text.encode())
        yield Item(
            document.item_id, VALIDATION, document.domain, text_digest(document.text), output="",
            score=-log_probability / math.log(2) / num_bytes, log_probability=log_probability, num_bytes=num_bytes,
        )  # fmt: skip


def document_token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens with end-of-text before them: documents follow one another that way in training."""
    return [special_token_id(tokenizer, END_OF_TEXT), *tokenizer.encode(text, add_special_tokens=False).ids]


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token. Raises ValueError when the tokenizer has none of that name."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"the checkpoint's tokenizer.json has no token {token}: export the checkpoint with the tokenizer it was trained with"
        )
    return token_id


def answer_problems(
    engine: Engine, tokenizer: Tokenizer, problems: Sequence[Question], max_new_tokens: int, weights_version: str, output: Output
) -> Iterator[Item]:
    """One item per problem: the greedy continuation up to the line's end, right only if it equals the answer exactly."""
    from model.generation import Sampling

    stops = tuple(special_token_id(tokenizer, token) for token in END_TOKENS)
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=stops)
    for start in range(0, len(problems), SEQUENCES_PER_REPORT):
        output.report(Progress(start, len(problems), "problems", "answering arithmetic problems"))
        asked = problems[start : start + SEQUENCES_PER_REPORT]
        prompts = [document_token_ids(tokenizer, problem.text) for problem in asked]
        generation = engine.generate(prompts, sampling, weights_version)
        for problem, token_ids, log_probabilities in zip(asked, generation.token_ids, generation.log_probabilities, strict=True):
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
            right = text.split("\n", 1)[0] == problem.answer
            yield Item(
                problem.item_id, ARITHMETIC, problem.domain, text_digest(problem.text), output=text,
                score=float(right), log_probability=sum(log_probabilities), num_bytes=len(text.encode()),
            )  # fmt: skip
