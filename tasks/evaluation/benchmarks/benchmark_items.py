"""Reads the items of a benchmark from its file: the prompt with its examples, and what a right answer is.

A record that lacks what its kind needs is an error: a benchmark with fewer items is another benchmark. Only records
that occur again, and IFEval's instructions that no program here checks, are left out, and counted, as are requests of
the other label.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.data.prompts.benchmark_records import Record, read_records
from tasks.data.prompts.prompt_records import UnusablePromptError
from tasks.data.prompts.published_layouts import LacksError, given_text, in_form_of_kind
from tasks.evaluation.benchmarks.question_forms import BETWEEN_EXAMPLES, READERS, Question
from tasks.evaluation.benchmarks.retrieval_items import retrieval_items
from tasks.evaluation.choice_questions import order_hash

if TYPE_CHECKING:
    from configs.schema import AnswerBenchmark, Benchmark, FewShot, LikelihoodBenchmark, RetrievalBenchmark
    from tasks.data.sources.list_sources import SourceFile, SourceListing

LEFT_OUT = ("unsupported_constraint", f"{HARMFUL}_request", f"{HARMLESS}_request")
"""Reasons for which a record is left out; any other is an error."""
DUPLICATE = "duplicate"


@dataclass(frozen=True)
class BenchmarkItem:
    """A question with the examples before it."""

    item_id: str
    """Digest of the record: the same question has the same id in every copy of a file."""
    question: Question
    prompt: str
    """What the model is given; for context_choice what precedes every context."""
    example_ids: tuple[str, ...]


@dataclass(frozen=True)
class BenchmarkItems:
    items: list[BenchmarkItem]
    num_records: int
    left_out: dict[str, int] = field(default_factory=dict)
    """Records by reason."""


Row = tuple[str, Record, Question]
"""Id, record, question."""


def read_items(benchmark: Benchmark, files: SourceListing, limit: int | None) -> BenchmarkItems:
    """The items in the file's order; with a limit those of smallest hash. Raises ValueError for a file whose role is
    not evaluation, and for a record without what the benchmark's kind needs."""
    by_name = {file.name: file for file in files.files}
    file = None if benchmark.file is None else by_name[benchmark.file]
    if file is not None and file.role != "evaluation":
        fix = "give it the role evaluation in glm46-data.yaml, or name a dataset's test or validation split"
        raise ValueError(
            f"benchmark {benchmark.name}: {file.name} has the role {file.role}, so it may be trained on: {fix}"
        )
    left_out: Counter[str] = Counter()
    if benchmark.kind == "retrieval":
        rows = _retrieval_rows(benchmark, file)
    else:
        assert file is not None, benchmark.name
        rows = _rows(benchmark, file, left_out)
    if len({question.task is None or question.task.tree is None for _, _, question in rows}) > 1:
        raise ValueError(f"{benchmark.file} holds records with and without a tree: make two files of them")
    kept = {row[0] for row in rows}
    if limit is not None:
        kept = set(sorted(kept, key=order_hash)[:limit])
    shots = None
    if benchmark.kind != "retrieval" and benchmark.few_shot is not None:
        source = by_name[benchmark.few_shot.file]
        shots = _Shots(benchmark.few_shot, rows if source is file else _rows(benchmark, source, Counter()))
    items = [_item(benchmark.name, row, shots) for row in rows if row[0] in kept]
    return BenchmarkItems(items, len(rows) + sum(left_out.values()), dict(left_out))


class _Shots:
    """Candidates for examples, by the value of the group's field, in hash order."""

    def __init__(self, few_shot: FewShot, rows: Sequence[Row]) -> None:
        self.few_shot = few_shot
        self.by_group: dict[str, list[Row]] = {}
        if few_shot.group and not any(few_shot.group in record for _, record, _ in rows):
            fields = _fields(rows[0][1])
            raise ValueError(
                f"few_shot.group {few_shot.group} is no field of {few_shot.file}, whose records have {fields}: name "
                f"one of these, or leave it empty"
            )
        for row in sorted(rows, key=lambda row: order_hash(row[0])):
            self.by_group.setdefault(self.group_of(row[1]), []).append(row)

    def group_of(self, record: Record) -> str:
        return str(record.get(self.few_shot.group, "")) if self.few_shot.group else ""

    def of(self, name: str, item_id: str, record: Record) -> list[Row]:
        """The examples of an item. Raises ValueError where there are too few."""
        group = self.group_of(record)
        others = [row for row in self.by_group.get(group, []) if row[0] != item_id][: self.few_shot.num_examples]
        if len(others) < self.few_shot.num_examples:
            where = f" with {self.few_shot.group} {group!r}" if self.few_shot.group else ""
            raise ValueError(
                f"benchmark {name} needs {self.few_shot.num_examples} examples{where}, {self.few_shot.file} holds "
                f"{len(others)}: lower few_shot.num_examples"
            )
        return others


def _item(name: str, row: Row, shots: _Shots | None) -> BenchmarkItem:
    item_id, record, question = row
    examples = shots.of(name, item_id, record) if shots is not None else []
    parts = [*(example.example for _, _, example in examples), question.prompt]
    prompt = question.before + BETWEEN_EXAMPLES.join(parts)
    return BenchmarkItem(item_id, question, prompt, tuple(example_id for example_id, _, _ in examples))


def _retrieval_rows(benchmark: RetrievalBenchmark, file: SourceFile | None) -> list[Row]:
    text = None
    if file is not None:
        text = "\n\n".join(given_text(record, ("text", "content")) for record in read_records(file, "text"))
    rows: dict[str, Row] = {}
    for part, document, asked, code in retrieval_items(benchmark, text):
        prompt = f"{document}{BETWEEN_EXAMPLES}{asked}"
        item_id = _digest(prompt)
        rows[item_id] = (item_id, {}, Question(prompt, code, "", part=part))
    return list(rows.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(benchmark: LikelihoodBenchmark | AnswerBenchmark, file: SourceFile, left_out: Counter[str]) -> list[Row]:
    """Every record of a file as a question, each once."""
    rows: dict[str, Row] = {}
    read = READERS[benchmark.kind]
    is_chat = getattr(benchmark, "is_chat", False)
    for number, record in enumerate(read_records(file, benchmark.kind), 1):
        try:
            question = read(in_form_of_kind(benchmark.kind, record), is_chat)
        except UnusablePromptError as error:
            if error.reason in LEFT_OUT:
                left_out[error.reason] += 1
                continue
            raise ValueError(
                f"{file.name}, record {number}: cannot be asked as kind {benchmark.kind} ({error.reason}); its "
                f"fields are {_fields(record)}: correct it"
            ) from error
        except LacksError as error:
            raise ValueError(
                f"{file.name}, record {number}: {error}; kind {benchmark.kind} needs it, its fields are "
                f"{_fields(record)}: correct the record, or the benchmark's kind"
            ) from error
        item_id = _digest(json.dumps(record, sort_keys=True, ensure_ascii=False, default=str))
        if item_id in rows:
            left_out[DUPLICATE] += 1
        rows.setdefault(item_id, (item_id, record, question))
    if not rows:
        raise ValueError(f"{file.name} holds no item of kind {benchmark.kind}: name another file")
    return list(rows.values())


def _fields(record: Record) -> str:
    return ", ".join(sorted(record)) or "none"
