"""Requests that a candidate is asked: from evaluation files of kind `safety`, else the generated held-out ones.

A file is JSON lines or Parquet with `prompt` or `question`, and `label`: harmful or harmless.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.data.prompts.benchmark_records import record_lines
from tasks.data.prompts.prompt_records import UnusablePromptError, prompt_of
from tasks.data.records.documents import document_id
from tasks.data.seeds.problem_kinds import SAFETY as SAFETY_KIND
from tasks.evaluation.choice_questions import order_hash
from tasks.evaluation.items import SAFETY
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tasks.data.sources.list_sources import SourceFile


def choose_requests(files: Iterable[SourceFile], held_out_path: Path, num_prompts: int) -> list[Question]:
    """`num_prompts` of each label, those of smallest hash; 0 gives none. Raises ValueError for a record of a file that
    is no request, and where one label has fewer."""
    if num_prompts == 0:
        return []
    given = [request for file in files if _holds_requests(file) for request in _file_requests(file)]
    requests = given or list(_held_out_requests(held_out_path))
    chosen: list[Question] = []
    for label in (HARMFUL, HARMLESS):
        own = sorted((each for each in requests if _label(each) == label), key=lambda each: order_hash(each.item_id))
        if len(own) < num_prompts:
            where = "the evaluation files of kind safety" if given else "the generated held-out requests"
            raise ValueError(
                f"evaluation.recipe.num_safety_prompts is {num_prompts}, {where} hold {len(own)} {label} requests: "
                f"lower it or bring more"
            )
        chosen += own[:num_prompts]
    return chosen


def _holds_requests(file: SourceFile) -> bool:
    return file.role == "evaluation" and file.kind == SAFETY_KIND


def _file_requests(file: SourceFile) -> Iterator[Question]:
    for number, line in enumerate(record_lines(file), 1):
        try:
            if line.record is None:
                raise UnusablePromptError(line.reason)
            asked = prompt_of(SAFETY_KIND, line.record)
        except UnusablePromptError as error:
            raise ValueError(
                f"{file.name}, record {number}: cannot be asked as kind safety ({error.reason}): give it a prompt and "
                f"a label, harmful or harmless"
            ) from error
        yield _question(document_id(file.name, line.offset, 0), asked.question, asked.answer)


def _held_out_requests(path: Path) -> Iterator[Question]:
    import pyarrow.parquet as pq

    for row in pq.read_table(path, columns=["id", "prompt", "answer"]).to_pylist():
        yield _question(row["id"], row["prompt"], row["answer"])


def _question(identity: str, text: str, expected: str) -> Question:
    item_id = f"{SAFETY}/{json.loads(expected)['label']}/{identity}"
    return Question(item_id, SAFETY, SAFETY_KIND, item_id, text, expected)


def _label(request: Question) -> str:
    return request.item_id.split("/")[1]
