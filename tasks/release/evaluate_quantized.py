"""Step: measures what a quantized checkpoint lost, on every document of the suite, its first problems, and the
benchmarks of the release.

In: the quantized checkpoint, the one it was made of, the suite, what the checkpoint answered to it and to the
benchmarks. Out: quantized_scores.json, per document the log-probabilities by both; items.parquet, the quantized one's
answers as an evaluation has them, drawn with the numbers that the checkpoint's were drawn with; suite.json and
suite.items.jsonl, its answers to the benchmarks, where the scale asks a suite. Documents are computed by
transformers in float32, and the quantized checkpoint as its engines do: weights as they are in the file, activations
rounded where the format rounds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import Field

from infra.step import Artifact, Output, Progress, Record, digest_of, step
from tasks.evaluation.benchmarks.benchmark_change import BenchmarkChange
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE
from tasks.evaluation.benchmarks.run_suite import PACKAGES, read_listed_items, run_suite
from tasks.evaluation.comparisons import FigureChange, figure_changes
from tasks.evaluation.engine import load_tokenizer, reproducible_arithmetic
from tasks.evaluation.generated_answers import answer_problems, asked_problems
from tasks.evaluation.items import DOCUMENT, read_items, write_items
from tasks.evaluation.suite import read_suite
from tasks.release.leading_texts import LeadingText, leading_texts
from tasks.release.quantize_checkpoint import NUM_THREADS
from tasks.release.routing import routing_agreement
from tasks.release.transformers_engine import TransformersEngine

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from configs.schema import FormatRecipe, JobResources, SuiteRecipe
    from tasks.data.sources.list_sources import SourceListing
    from tasks.evaluation.benchmarks.evaluate_suite import SuiteEvaluation
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.release.quantize_checkpoint import QuantizedCheckpoint
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

TEXTS_AT_ONCE = 16


class QuantizedEvaluation(Record):
    """What the format lost."""

    quantized_format: str
    num_bits: int
    checkpoint_digest: str
    quantized_digest: str
    bits_per_byte: float | None
    """None where a log-probability is not finite; likewise `original_bits_per_byte`."""
    original_bits_per_byte: float | None
    token_agreement: float
    """Share of the scored positions at which both think the same token the most likely."""
    routing_agreement: float | None
    """Share of positions and layers at which both routers choose the same set of experts; None without experts."""
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Of the weights; `num_original_bytes` before."""
    num_original_bytes: int
    figures: dict[str, FigureChange]
    """What became of each figure of answers."""
    benchmarks: dict[str, BenchmarkChange] = Field(default_factory=dict)
    """What became of each benchmark of the scale's suite."""


@dataclass(frozen=True)
class AnsweredSuite:
    """The benchmarks of a release, with what the checkpoint answered to them."""

    evaluation: Artifact[SuiteEvaluation]
    files: SourceListing
    recipe: SuiteRecipe

    @property
    def digest(self) -> str:
        """sha256 over the answers, what was asked, and how."""
        return digest_of([self.evaluation.digest, self.files.digest, self.recipe.model_dump(mode="json")])


@dataclass
class Scores:
    """What one model says of all texts, in their order."""

    log_probabilities: list[float] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    """Most likely token at every scored position of a text."""
    experts: list[Tensor] = field(default_factory=list)
    """Chosen experts, sorted, of shape (layers, tokens, experts per token), of a text."""


@step(
    content=("quantized_scores.json", "items.parquet", SUITE_FILE, "suite.items.jsonl", "suite.*.predictions.jsonl"),
    distributions=("llmcompressor", "compressed-tensors", "datasets", "pyarrow", "numpy", "scipy", *PACKAGES),
)
def evaluate_quantized(
    *,
    quantized: Artifact[QuantizedCheckpoint],
    checkpoint: Artifact[TrainedCheckpoint],
    suite: Artifact[EvaluationSuite],
    evaluation: Artifact[Evaluation],
    recipe: FormatRecipe,
    resources: JobResources,
    output: Output,
    benchmarks: AnsweredSuite | None = None,
) -> QuantizedEvaluation:
    """`benchmarks` is None where the scale has no suite. Raises ValueError for a quantized checkpoint that does not
    read back."""
    from model.formats.quantized_model import load_original, load_quantized
    from model.formats.quantized_tensors import num_weight_bits

    tokenizer = load_tokenizer(checkpoint.path("hf/tokenizer.json"))
    questions = read_suite(suite.path("suite.parquet"))
    documents = [question for question in questions if question.kind == DOCUMENT]
    texts = leading_texts(tokenizer, documents, recipe.max_document_tokens)
    with reproducible_arithmetic(NUM_THREADS):
        theirs = _score(load_original(checkpoint.directory("hf")), texts, output)
        model = load_quantized(quantized.directory("hf"))
        ours = _score(model, texts, output)
        engine, problems = TransformersEngine(model, quantized.digest), asked_problems(questions, recipe)
        items = answer_problems(engine, tokenizer, problems, recipe.answers, quantized.digest, output)
        changes = {} if benchmarks is None else _ask_benchmarks(engine, quantized, benchmarks, output)
    write_items(output.path("items.parquet"), items)
    num_bytes = sum(text.num_bytes for text in texts)
    rows = [
        {"item_id": text.item_id, "original": _finite(before), "quantized": _finite(after), "num_bytes": text.num_bytes}
        for text, before, after in zip(texts, theirs.log_probabilities, ours.log_probabilities, strict=True)
    ]
    output.path("quantized_scores.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    quantized_format = quantized.record.quantized_format
    return QuantizedEvaluation(
        quantized_format=quantized_format,
        num_bits=num_weight_bits(quantized_format),
        checkpoint_digest=checkpoint.digest,
        quantized_digest=quantized.digest,
        bits_per_byte=_finite(-sum(ours.log_probabilities) / math.log(2) / num_bytes),
        original_bits_per_byte=_finite(-sum(theirs.log_probabilities) / math.log(2) / num_bytes),
        token_agreement=_agreement(ours.best, theirs.best),
        routing_agreement=routing_agreement(ours.experts, theirs.experts),
        num_documents=len(texts),
        num_tokens=sum(sum(text.is_scored) for text in texts),
        num_bytes=quantized.record.num_bytes,
        num_original_bytes=quantized.record.num_original_bytes,
        figures=figure_changes(items, read_items(evaluation.path("items.parquet"))),
        benchmarks=changes,
    )


def _ask_benchmarks(
    engine: TransformersEngine, quantized: Artifact[QuantizedCheckpoint], benchmarks: AnsweredSuite, output: Output
) -> dict[str, BenchmarkChange]:
    """Asks them as the checkpoint was asked."""
    from model.formats.hf_checkpoint import CONFIG_FILE
    from tasks.evaluation.benchmarks.checkpoint_model import engine_model
    from tasks.evaluation.benchmarks.suite_changes import suite_changes
    from tasks.evaluation.benchmarks.suite_results import write_result

    suite, directory = benchmarks.recipe.suite, quantized.directory("hf")
    asked = read_listed_items("release", suite, benchmarks.files, benchmarks.recipe.limit)
    positions = json.loads((directory / CONFIG_FILE).read_bytes())["max_position_embeddings"]
    model = engine_model(lambda: engine, directory, suite, quantized.digest, positions, output.report)
    result, items = run_suite(model, asked, quantized.digest, "transformers", output.report)
    write_result(output.path(SUITE_FILE), result, items)
    return suite_changes(benchmarks.evaluation.path(SUITE_FILE), output.path(SUITE_FILE))


def _score(model: nn.Module, texts: Sequence[LeadingText], output: Output) -> Scores:
    """Texts of similar length together, padded at the end, which no position before it sees."""
    import torch

    from model.formats.quantized_model import routers_of

    chosen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, result: chosen.append(result[2]))
        for router in routers_of(model)
    ]
    scores, order = {}, sorted(range(len(texts)), key=lambda number: len(texts[number].token_ids))
    with torch.inference_mode():
        for start in range(0, len(order), TEXTS_AT_ONCE):
            output.report(Progress(start, len(order), "documents", "scoring documents"))
            numbers = order[start : start + TEXTS_AT_ONCE]
            ids_BT = _padded([texts[number].token_ids[:-1] for number in numbers])
            chosen.clear()
            logits_BTV = model(input_ids=ids_BT).logits
            experts_LBTK = torch.stack(chosen).view(len(chosen), *ids_BT.shape, -1) if chosen else None
            for row, number in enumerate(numbers):
                scores[number] = _score_text(texts[number], logits_BTV[row], experts_LBTK, row)
    for hook in hooks:
        hook.remove()
    ordered = [scores[number] for number in range(len(texts))]
    return Scores(
        [log_probability for log_probability, _, _ in ordered],
        [best for _, best, _ in ordered],
        [experts for _, _, experts in ordered if experts is not None],
    )


def _score_text(
    text: LeadingText, logits_TV: Tensor, experts_LBTK: Tensor | None, row: int
) -> tuple[float, Tensor, Tensor | None]:
    import torch

    length = len(text.token_ids) - 1
    targets_T, is_scored_T = torch.tensor(text.token_ids[1:]), torch.tensor(text.is_scored)
    logits_TV = logits_TV[:length].float()
    log_probability_T = -torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="none")
    experts_LTK = None if experts_LBTK is None else experts_LBTK[:, row, :length].sort(-1).values.clone()
    return float(log_probability_T[is_scored_T].sum()), logits_TV.argmax(-1)[is_scored_T], experts_LTK


def _padded(rows: list[list[int]]) -> torch.Tensor:
    import torch

    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def _agreement(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    import torch

    return round(float((torch.cat(list(ours)) == torch.cat(list(theirs))).double().mean()), 6)


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
