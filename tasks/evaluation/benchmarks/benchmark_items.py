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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.data.prompts.benchmark_records import Record, read_records
from tasks.data.prompts.prompt_records import UnusablePromptError
from tasks.data.prompts.published_layouts import LacksError, given_text, in_form_of_kind
from tasks.data.sources.globs import named_by
from tasks.data.sources.held_out_splits import subject_of
from tasks.evaluation.benchmarks.published_answers import with_answers
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
    asked = [] if benchmark.file is None else files_of(benchmark.file, files)
    if trained := [file for file in asked if file.role != "evaluation"]:
        fix = "give it the role evaluation in glm46-data.yaml, or name a dataset's test or validation split"
        raise ValueError(
            f"benchmark {benchmark.name}: {trained[0].name} has the role {trained[0].role}, so it may be trained on: "
            f"{fix}"
        )
    left_out: Counter[str] = Counter()
    if benchmark.kind == "retrieval":
        rows = _retrieval_rows(benchmark, asked)
    else:
        rows = _rows(benchmark, benchmark.file, asked, left_out)
    if len({question.task is None or question.task.tree is None for _, _, question in rows}) > 1:
        raise ValueError(f"{benchmark.file} holds records with and without a tree: make two files of them")
    kept = {row[0] for row in rows}
    if limit is not None:
        kept = set(sorted(kept, key=order_hash)[:limit])
    shots = None
    if benchmark.kind != "retrieval" and benchmark.few_shot is not None:
        source = benchmark.few_shot.file
        is_own = source == benchmark.file
        shown = rows if is_own else _rows(benchmark, source, files_of(source, files), Counter())
        shots = _Shots(benchmark.few_shot, shown)
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


def files_of(pattern: str, files: SourceListing) -> list[SourceFile]:
    """The listed files that a name or glob means, by name."""
    by_name = {file.name: file for file in files.files}
    return [by_name[name] for name in sorted(named_by(pattern, by_name))]


def _retrieval_rows(benchmark: RetrievalBenchmark, files: Sequence[SourceFile]) -> list[Row]:
    texts = [given_text(record, ("text", "content")) for file in files for record in read_records(file, "text")]
    text = "\n\n".join(texts) if files else None
    rows: dict[str, Row] = {}
    for part, document, asked, code in retrieval_items(benchmark, text):
        prompt = f"{document}{BETWEEN_EXAMPLES}{asked}"
        item_id = _digest(prompt)
        rows[item_id] = (item_id, {}, Question(prompt, code, "", part=part))
    return list(rows.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(
    benchmark: LikelihoodBenchmark | AnswerBenchmark, pattern: str, files: Sequence[SourceFile], left_out: Counter[str]
) -> list[Row]:
    """Every record of the files that `pattern` means as a question, each once."""
    rows: dict[str, Row] = {}
    records: dict[str, list[Record]] = {file.name: read_records(file, benchmark.kind) for file in files}
    records = with_answers(records) if benchmark.kind == "tools" else records
    subjects = {name: subject_of(name) for name in records if name != pattern}
    are_parts = len({*subjects.values()}) > 1
    for name, own in records.items():
        subject = subjects.get(name, "")
        for number, given in enumerate(own, 1):
            record = {"subject": subject, **given} if subject else given
            question = _question(benchmark, record, f"{name}, record {number}", left_out)
            if question is None:
                continue
            item_id = _digest(json.dumps(record, sort_keys=True, ensure_ascii=False, default=str))
            if item_id in rows:
                left_out[DUPLICATE] += 1
            if are_parts:
                question = replace(question, part=question.part or subject)
            rows.setdefault(item_id, (item_id, record, question))
    if not rows:
        raise ValueError(f"{pattern} holds no item of kind {benchmark.kind}: name another file")
    return list(rows.values())


def _question(
    benchmark: LikelihoodBenchmark | AnswerBenchmark, record: Record, where: str, left_out: Counter[str]
) -> Question | None:
    """None where the record is left out."""
    try:
        form = in_form_of_kind(benchmark.kind, record)
        return READERS[benchmark.kind](form, getattr(benchmark, "is_chat", False))
    except UnusablePromptError as error:
        if error.reason in LEFT_OUT:
            left_out[error.reason] += 1
            return None
        raise ValueError(
            f"{where}: cannot be asked as kind {benchmark.kind} ({error.reason}); its fields are {_fields(record)}: "
            f"correct it"
        ) from error
    except LacksError as error:
        raise ValueError(
            f"{where}: {error}; kind {benchmark.kind} needs it, its fields are {_fields(record)}: correct the record, "
            f"or the benchmark's kind"
        ) from error


def _fields(record: Record) -> str:
    return ", ".join(sorted(record)) or "none"
