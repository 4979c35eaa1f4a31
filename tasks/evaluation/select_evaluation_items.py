"""Choose what a candidate is asked: validation documents in hash order up to the token budget, and every generated problem.

In: documents with a column `split`, and generated problems. Out: suite.parquet (item_id, kind, domain, text, answer), sorted by item
id. The suite is an artifact of its own so that candidate and champion are asked the same, whatever their tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.engine import load_tokenizer
from tasks.evaluation.items import ARITHMETIC, VALIDATION, suite_digest, text_digest

if TYPE_CHECKING:
    from configs.schema import EvaluationRecipe
    from tasks.data.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.synthesize_problems import SynthesizedProblems
    from tasks.data.train_tokenizer import TrainedTokenizer

ARITHMETIC_DOMAIN = "synthetic"


class EvaluationSuite(Record):
    """What suite.parquet holds."""

    suite_digest: str
    """sha256 over item ids and prompt digests."""
    num_documents: int
    num_problems: int
    num_validation_tokens: int
    """Under the tokenizer that the budget was counted with."""
    num_validation_bytes: int


@dataclass(frozen=True)
class Question:
    """One row of suite.parquet."""

    item_id: str
    kind: str
    domain: str
    text: str
    """The document's leading characters, or the problem's prompt."""
    answer: str
    """The problem's verified answer; empty for a document."""


@step(content=("suite.parquet",), distributions=("tokenizers", "pyarrow"))
def select_evaluation_items(
    *,
    documents: Artifact[DecontaminatedDocuments],
    problems: Artifact[SynthesizedProblems],
    tokenizer: Artifact[TrainedTokenizer],
    recipe: EvaluationRecipe,
    output: Output,
) -> EvaluationSuite:
    """Raises ValueError when the budget does not hold a single document."""
    chosen, num_tokens = _choose_documents(documents.paths("documents/*.parquet"), tokenizer.path("tokenizer.json"), recipe)
    asked = list(_read_problems(problems.path("problems.parquet")))
    questions = sorted([*chosen, *asked], key=lambda question: question.item_id)
    write_suite(output.path("suite.parquet"), questions)
    return EvaluationSuite(
        suite_digest=suite_digest({question.item_id: text_digest(question.text) for question in questions}),
        num_documents=len(chosen),
        num_problems=len(asked),
        num_validation_tokens=num_tokens,
        num_validation_bytes=sum(len(question.text.encode()) for question in chosen),
    )


def _choose_documents(paths: list[Path], tokenizer_path: Path, recipe: EvaluationRecipe) -> tuple[list[Question], int]:
    import pyarrow.parquet as pq

    tokenizer = load_tokenizer(tokenizer_path)
    columns, held_out = ["id", "domain", "text"], [("split", "==", VALIDATION)]
    rows = [row for path in paths for row in pq.read_table(path, columns=columns, filters=held_out).to_pylist()]
    chosen: list[Question] = []
    num_tokens = 0
    for row in sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest()):
        text = row["text"][: recipe.max_document_chars]
        length = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if num_tokens + length > recipe.max_validation_tokens:
            break
        num_tokens += length
        chosen.append(Question(f"{VALIDATION}/{row['id']}", VALIDATION, row["domain"], text, ""))
    if not chosen:
        raise ValueError(
            f"the first of {len(rows)} validation documents does not fit evaluation.recipe.max_validation_tokens "
            f"({recipe.max_validation_tokens}): raise it, or lower evaluation.recipe.max_document_chars; where there is no document, "
            f"raise data.recipe.split.validation_share"
        )
    return chosen, num_tokens


def _read_problems(path: Path) -> Iterator[Question]:
    import pyarrow.parquet as pq

    for row in pq.read_table(path, columns=["id", "prompt", "answer"]).to_pylist():
        yield Question(f"{ARITHMETIC}/{row['id']}", ARITHMETIC, ARITHMETIC_DOMAIN, row["prompt"], row["answer"])


def write_suite(path: Path, questions: list[Question]) -> None:
    """Write questions in the given order, which must be that of their ids."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in ("item_id", "kind", "domain", "text", "answer")])
    pq.write_table(pa.Table.from_pylist([vars(question) for question in questions], schema=schema), path)


def read_suite(path: Path) -> list[Question]:
    """The questions of a suite, sorted by item id."""
    import pyarrow.parquet as pq

    return [Question(**row) for row in pq.read_table(path).to_pylist()]
