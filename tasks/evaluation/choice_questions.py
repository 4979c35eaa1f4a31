"""Multiple-choice questions: from evaluation files that hold some, else continuations of held-out documents.

A file is JSON lines or Parquet, read as a benchmark of kind `choice` is.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from tasks.data.prompts.benchmark_records import record_lines
from tasks.data.prompts.published_layouts import LacksError, in_form_of_kind, passage_of
from tasks.data.readers.record_lines import TABLES
from tasks.data.records.documents import document_id
from tasks.evaluation.items import CHOICE
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tasks.data.sources.list_sources import SourceFile

NUM_CONTINUATIONS = 4
CONTEXT_CHARS = 200
CONTINUATION_CHARS = 60
ANSWER_CUE = "\nAnswer:"

Parsed = tuple[str, list[str], int]
"""The text before the choices, the choices, the number of the right one."""


def questions_from_files(files: Iterable[SourceFile], num_questions: int) -> list[Question]:
    """Questions of the files with role `evaluation`, an even share of every file that holds some, within a file those
    of smallest hash."""
    ranked: list[tuple[int, str, Question]] = []
    tables = [file for file in files if file.role == "evaluation" and file.format in TABLES]
    for file, benchmark in zip(tables, _benchmarks([file.name for file in tables]), strict=True):
        questions = _file_questions(file, benchmark)
        smallest = heapq.nsmallest(num_questions, ((order_hash(q.item_id), q.item_id, q) for q in questions))
        ranked += [(rank, digest, question) for rank, (digest, _, question) in enumerate(smallest)]
    return [question for _, _, question in sorted(ranked, key=lambda entry: entry[:2])[:num_questions]]


def order_hash(identity: str) -> str:
    """The hash by which items are ordered, before some are taken."""
    return hashlib.sha256(identity.encode()).hexdigest()


def _benchmarks(names: Sequence[str]) -> list[str]:
    """What the questions of each file are called: the file's name without its endings, or its whole path where several
    files have that name, as those of the Hub do (test-00000-of-00001.parquet)."""
    paths = [PurePosixPath(name).parent / PurePosixPath(name).name.split(".")[0] for name in names]
    known = Counter(path.name for path in paths)
    return [path.name if known[path.name] == 1 else re.sub(r"[:/]+", "-", str(path)) for path in paths]


def _file_questions(file: SourceFile, benchmark: str) -> Iterator[Question]:
    """Of a broken file only what is before the break; the ingestion has reported the rest."""
    for line in record_lines(file):
        parsed = None if line.record is None else published_question(line.record)
        if parsed is not None:
            text, choices, right = parsed
            item_id, written = (
                f"{CHOICE}/{benchmark}/{document_id(file.name, line.offset, 0)}",
                json.dumps(choices, ensure_ascii=False),
            )
            yield Question(item_id, CHOICE, file.domain, item_id, text, str(right), written)


def published_question(record: Mapping[str, Any]) -> Parsed | None:
    """A record as a question, also as its authors publish it; None where it is none, or the right choice is not
    published."""
    try:
        return question_of(in_form_of_kind(CHOICE, record))
    except LacksError:
        return None


def question_of(record: Mapping[str, Any]) -> Parsed | None:
    """A record with `query` or `question`, a list `choices` and `gold` or `answer` (number from 0, letter, or the
    choice itself) as a question; None where it is none."""
    text, choices = record.get("query", record.get("question")), record.get("choices")
    if not isinstance(text, str) or not text.strip() or not isinstance(choices, list) or len(choices) < 2:
        return None
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        return None
    right = _right_choice(record.get("gold", record.get("answer")), choices)
    is_bare = "query" not in record
    if is_bare and (passage := passage_of(record)):
        text, is_bare = f"{passage}\nQuestion: {text.strip()}{ANSWER_CUE}", False
    return None if right is None else (_with_cue(text, is_bare=is_bare), choices, right)


def _right_choice(given: Any, choices: Sequence[str]) -> int | None:
    if isinstance(given, str):
        named = choices.index(given) if given in choices else -1
        given = named if named >= 0 or len(given) != 1 else ascii_uppercase.find(given)
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(choices) else None


def _with_cue(text: str, is_bare: bool) -> str:
    """A question is followed by `Answer:`; a text to be continued stays as it is."""
    text = f"Question: {text.strip()}" if is_bare else text.strip()
    return text + ANSWER_CUE if text.startswith("Question:") and not text.endswith(ANSWER_CUE.strip()) else text


def questions_from_documents(documents: Iterable[dict[str, str]], num_questions: int) -> list[Question]:
    """Which of four texts continues a held-out document? The wrong ones continue the next documents of its domain, in
    hash order.

    documents: rows with id, unit, domain and text, in the order in which they are taken. Texts without a space are left
    out.
    """
    by_domain: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in documents:
        cut = _cut(row["text"])
        if cut is not None:
            by_domain.setdefault(row["domain"], []).append((row["id"], row["unit"], *cut))
    questions = []
    for domain, rows in sorted(by_domain.items()):
        for number, (identity, unit, context, continuation) in enumerate(rows):
            others = (rows[(number + step) % len(rows)][3] for step in range(1, len(rows)))
            wrong = list(dict.fromkeys(other for other in others if other != continuation))[: NUM_CONTINUATIONS - 1]
            if len(wrong) == NUM_CONTINUATIONS - 1:
                right = int(order_hash(identity)[:8], 16) % NUM_CONTINUATIONS
                choices = json.dumps([*wrong[:right], continuation, *wrong[right:]], ensure_ascii=False)
                questions.append(
                    Question(f"{CHOICE}/continuation/{identity}", CHOICE, domain, unit, context, str(right), choices)
                )
    return sorted(questions, key=lambda question: order_hash(question.item_id))[:num_questions]


def _cut(text: str) -> tuple[str, str] | None:
    """(context, continuation) on both sides of the first white space after CONTEXT_CHARS."""
    space = re.compile(r"\s+").search(text, CONTEXT_CHARS)
    if space is None:
        return None
    context, continuation = text[: space.start()], text[space.end() : space.end() + CONTINUATION_CHARS]
    return (context, continuation) if context.strip() and len(continuation) == CONTINUATION_CHARS else None
