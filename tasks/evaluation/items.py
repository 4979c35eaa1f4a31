"""Evaluation items: the table that gates read, its schema and the figures computed from it.

`items.parquet` is sorted by item id. A document item is one held-out document. An arithmetic item is one problem
continued as plain text. A chat problem is one problem asked as a conversation, with several sampled answers. A choice
item is one multiple-choice question. A worked problem is the text of one with the way to its result, scored as a
document is. A far text is the part of one long document that comes after many tokens. A safety item is one request,
harmful or harmless, with several sampled answers. A task is one that was played in its environment several times.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.records.documents import REPOSITORY
from tasks.evaluation.intervals import Interval, pass_at_k, ratio_interval, seed_noise, share_interval

if TYPE_CHECKING:
    import pyarrow

DOCUMENT = "document"
ARITHMETIC = "arithmetic"
CHAT_PROBLEM = "chat_problem"
CHOICE = "choice"
WORKED = "worked_problem"
FAR = "far_text"
SAFETY = "safety"
TASK = "task"
WHAT_IS_MISSING = {
    DOCUMENT: "no held-out document: bits_per_byte is missing, evaluate with held-out documents",
    ARITHMETIC: "no arithmetic problem: arithmetic_accuracy is missing, evaluate with generated problems",
    CHAT_PROBLEM: "no problem asked as a conversation: pass_at_1 and distinct_answer_share are missing, evaluate with "
    "chat problems",
    CHOICE: "no multiple-choice question: choice_accuracy is missing, evaluate with questions",
    WORKED: "no worked problem: worked_bits_per_byte is missing, evaluate with generated problems",
    FAR: "no far text: far_bits_per_byte is missing, evaluate with longer documents",
    SAFETY: "no request: safe_answer_share is missing, raise evaluation.recipe.num_safety_prompts",
    TASK: "no task: agentic_success is missing, raise data.recipe.synthesize.num_evaluation_tasks",
}


@dataclass(frozen=True)
class Item:
    """One row."""

    item_id: str
    kind: str
    """DOCUMENT, ARITHMETIC, CHAT_PROBLEM, CHOICE, WORKED, FAR, SAFETY or TASK."""
    domain: str
    unit: str
    """Items of one unit count as one independent item: pieces of one record, and the questions that continue them."""
    prompt_digest: str
    """sha256 of what the model was asked: the document, the problem, the question with its choices."""
    expected: str
    """The right answer, what a request asks for (tasks/data/problems/refusals.py), or the number of the right choice;
    empty for a document."""
    output: str
    """The generated answer; a JSON list of the sampled answers to a chat problem or request, of the last turns of a
    task's episodes, of the choices' log-probabilities to a question."""
    score: float
    """Bits per byte of a document, worked problem or far text (lower is better); else the share of right answers."""
    log_probability: float
    """Natural logarithm, summed over the document's tokens, the generated ones, or those of the right choice."""
    num_bytes: int
    """UTF-8 bytes of the document, the generated answers, or the right choice."""
    num_samples: int
    """Answers given; 0 for a document."""
    num_right: int
    num_formed: int = 0
    """Sampled answers that ended by themselves and say something outside their reasoning; of a task the episodes that
    ended with an answer; 0 where none is sampled."""

    @property
    def bits(self) -> float:
        return -self.log_probability / math.log(2)


def group_of(item: Item) -> str:
    """The benchmark of a multiple-choice question, which is the name of its file or `continuation`; of a request
    `harmful` or `harmless`; of a task its environment."""
    assert item.kind in (CHOICE, SAFETY, TASK), item
    return item.item_id.split("/")[1]


def text_digest(text: str) -> str:
    """sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def suite_digest(prompt_digests: Mapping[str, str]) -> str:
    """sha256 over item ids and prompt digests: equal suites can be compared item by item."""
    lines = (f"{item_id} {digest}\n" for item_id, digest in sorted(prompt_digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write items sorted by id; an id that occurs twice is an error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = sorted(items, key=lambda item: item.item_id)
    ids = [row.item_id for row in rows]
    assert len(set(ids)) == len(ids), (
        f"item ids occur twice: {sorted({name for name in ids if ids.count(name) > 1})[:5]}"
    )
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=_schema()), path)


def read_items(path: Path) -> list[Item]:
    """The items of one evaluation, sorted by id. Raises ValueError when the file is not such a table."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if not table.schema.equals(_schema()):
        raise ValueError(
            f"{path} is not a table of evaluation items (columns {table.column_names}): evaluate the checkpoint again"
        )
    return [Item(**row) for row in table.to_pylist()]


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    texts = ("item_id", "kind", "domain", "unit", "prompt_digest", "expected", "output")
    numbers = [("score", pa.float64()), ("log_probability", pa.float64())]
    counts = [(name, pa.int64()) for name in ("num_bytes", "num_samples", "num_right", "num_formed")]
    return pa.schema([*((name, pa.string()) for name in texts), *numbers, *counts])


def items_of(items: Iterable[Item], kind: str) -> list[Item]:
    """The items of one kind. Raises ValueError that names the missing metric where there is none."""
    matches = [item for item in items if item.kind == kind]
    if not matches:
        raise ValueError(f"the evaluation holds {WHAT_IS_MISSING[kind]}")
    return matches


def num_non_finite(items: Iterable[Item]) -> int:
    """Items whose log-probability is NaN or infinite: a broken model."""
    return sum(not math.isfinite(item.log_probability) for item in items)


def bits_per_byte(items: Iterable[Item], kind: str = DOCUMENT) -> float:
    """Summed bits over summed bytes of documents; not finite where one log-probability is not. Raises ValueError where
    there is none."""
    documents = items_of(items, kind)
    return sum(item.bits for item in documents) / sum(item.num_bytes for item in documents)


def bits_per_byte_interval(items: Iterable[Item], kind: str = DOCUMENT) -> Interval:
    """Interval of bits per byte, over independent documents."""
    units = by_unit(items_of(items, kind))
    bits, num_bytes = (
        [sum(item.bits for item in unit) for unit in units],
        [sum(item.num_bytes for item in unit) for unit in units],
    )
    return ratio_interval(bits, num_bytes)


def text_once(items: Iterable[Item]) -> list[Item]:
    """The documents without those of domain repository, whose text is that of other documents once more."""
    return [item for item in items_of(items, DOCUMENT) if item.domain != REPOSITORY]


def by_unit(items: Iterable[Item]) -> list[list[Item]]:
    """Items that count as one, in the order in which each unit begins."""
    units: dict[str, list[Item]] = {}
    for item in items:
        units.setdefault(item.unit, []).append(item)
    return list(units.values())


def by_domain(items: Iterable[Item], kind: str) -> dict[str, list[Item]]:
    """The items of a kind, by domain."""
    matches = items_of(items, kind)
    return {
        name: [item for item in matches if item.domain == name] for name in sorted({item.domain for item in matches})
    }


def accuracy(items: Iterable[Item], kind: str) -> float:
    """Share of one kind's items that were answered rightly; for chat problems it is pass@1, the mean over sampled
    answers."""
    scores = [item.score for item in items_of(items, kind)]
    return sum(scores) / len(scores)


def accuracy_interval(items: Iterable[Item], kind: str) -> Interval:
    """Interval of the accuracy over independent items; several answers to one item are correlated."""
    units = by_unit(items_of(items, kind))
    num_right = [sum(item.num_right for item in unit) for unit in units]
    return share_interval(num_right, [sum(item.num_samples for item in unit) for unit in units])


def seed_noise_of(items: Sequence[Item]) -> float:
    """Standard deviation of the items' accuracy between runs that differ only in the seeds of sampling; 0 for greedy
    answers."""
    return seed_noise([item.num_right for item in items], [item.num_samples for item in items])


def of_requests(items: Iterable[Item], label: str) -> list[Item]:
    """The items of harmful or of harmless requests; none where the suite has none."""
    return [item for item in items if item.kind == SAFETY and group_of(item) == label]


def formed_answer_share(items: Iterable[Item]) -> float:
    """Share of the sampled answers that ended by themselves and say something outside their reasoning."""
    problems = items_of(items, CHAT_PROBLEM)
    return sum(item.num_formed for item in problems) / sum(item.num_samples for item in problems)


def passed_at_k(items: Iterable[Item], k: int) -> list[float]:
    """Per chat problem the estimated chance that k answers hold a right one."""
    return [pass_at_k(item.num_samples, item.num_right, k) for item in items_of(items, CHAT_PROBLEM)]


def distinct_answer_share(items: Iterable[Item]) -> float:
    """Different answers given over all chat problems / different right answers to them, at most 1.

    A policy that answers rightly has 1, one that gives the same answer to every problem has 1 / the number of right
    answers. It says nothing about quality: random answers differ, too.
    """
    problems = items_of(items, CHAT_PROBLEM)
    given = {answer for item in problems for answer in json.loads(item.output)}
    return min(1.0, len(given) / len({item.expected for item in problems}))
