"""Step: measures bits per byte of each GGUF file on the suite's first documents, with llama.cpp itself.

In: GGUF files, the checkpoint whose tokenizer they carry, the evaluation suite. Out: gguf_scores.json, per type and
document the log-probability and bytes. It starts the model server on loopback for each file in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from tasks.evaluation.engine import load_tokenizer
from tasks.evaluation.items import DOCUMENT
from tasks.evaluation.suite import read_suite
from tasks.release.leading_texts import LeadingText, leading_texts
from tasks.release.served_scoring import CONTEXT_MARGIN, FILLER, ServedScorer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import ReleaseRecipe, ServingResources
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.release.convert_to_gguf import GgufFiles
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint


class GgufEvaluation(Record):
    """Bits per byte by GGUF type; None where a log-probability is not finite."""

    checkpoint_digest: str
    bits_per_byte: dict[str, float | None]
    file_bytes: dict[str, int]
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Of the scored text."""


@step(content=("gguf_scores.json",), evidence=("server-*.log",), distributions=("xllamacpp", "tokenizers", "pyarrow"))
def evaluate_gguf(
    *,
    gguf: Artifact[GgufFiles],
    checkpoint: Artifact[TrainedCheckpoint],
    suite: Artifact[EvaluationSuite],
    recipe: ReleaseRecipe,
    resources: ServingResources,
    output: Output,
) -> GgufEvaluation:
    """`resources` name threads and time limit; port and context length are chosen here."""
    tokenizer = load_tokenizer(checkpoint.path("hf/tokenizer.json"))
    texts = _choose_texts(tokenizer, suite.path("suite.parquet"), recipe)
    vocab_size = json.loads(checkpoint.path("hf/config.json").read_text(encoding="utf-8"))["vocab_size"]
    filler = tokenizer.token_to_id(FILLER)
    assert filler is not None, f"a byte-level tokenizer has a token {FILLER!r}"
    scores: dict[str, list[float]] = {}
    for gguf_type, file_name in gguf.record.file_names.items():
        output.report(Progress(len(scores), len(gguf.record.file_names), "files", f"llama.cpp scores {file_name}"))
        scores[gguf_type] = _score_file(
            gguf.path(file_name), texts, filler, vocab_size, resources, output.path(f"server-{gguf_type}.log")
        )
    num_bytes = sum(text.num_bytes for text in texts)
    rows = {
        gguf_type: [
            {"item_id": text.item_id, "log_probability": _finite(value), "num_bytes": text.num_bytes}
            for text, value in zip(texts, values, strict=True)
        ]
        for gguf_type, values in scores.items()
    }
    output.path("gguf_scores.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return GgufEvaluation(
        checkpoint_digest=checkpoint.digest,
        bits_per_byte={
            gguf_type: _finite(-sum(values) / math.log(2) / num_bytes) for gguf_type, values in scores.items()
        },
        file_bytes=gguf.record.num_bytes,
        num_documents=len(texts),
        num_tokens=sum(sum(text.is_scored) for text in texts),
        num_bytes=num_bytes,
    )


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _choose_texts(tokenizer: Tokenizer, suite_path: Path, recipe: ReleaseRecipe) -> list[LeadingText]:
    documents = [question for question in read_suite(suite_path) if question.kind == DOCUMENT]
    if len(documents) < recipe.num_quantization_documents:
        raise ValueError(
            f"the suite holds {len(documents)} documents, release.recipe.num_quantization_documents asks for "
            f"{recipe.num_quantization_documents}: lower it, or raise evaluation.recipe.max_document_tokens"
        )
    return leading_texts(
        tokenizer, documents[: recipe.num_quantization_documents], recipe.max_quantization_document_tokens
    )


def _score_file(
    gguf_path: Path,
    texts: Sequence[LeadingText],
    filler: int,
    vocab_size: int,
    resources: ServingResources,
    log_path: Path,
) -> list[float]:
    from infra.serving.model_server import running_model_server

    context_length = max(len(text.token_ids) for text in texts) + CONTEXT_MARGIN
    private = resources.model_copy(update={"port": 0, "context_length": context_length})
    with (
        running_model_server(gguf_path, private, log_path) as server,
        ServedScorer(server.url, filler, vocab_size) as scorer,
    ):
        return [
            sum(value for value, counts in zip(scorer.score(text.token_ids), text.is_scored, strict=True) if counts)
            for text in texts
        ]
