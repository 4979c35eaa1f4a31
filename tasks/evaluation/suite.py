"""suite.parquet: what every candidate is asked, one row per question, sorted by item id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tasks.evaluation.items import CHOICE, FAR, TASK, text_digest

COLUMNS = ("item_id", "kind", "domain", "unit", "text", "answer", "choices")


@dataclass(frozen=True)
class Question:
    """One row."""

    item_id: str
    kind: str
    domain: str
    unit: str
    """Name shared by questions that count as one independent item: the record of a document, the repository of domain
    repository; else the item id."""
    text: str
    """The document's leading characters, the problem's prompt, the user's words, or the text before the choices or
    before a far text."""
    answer: str
    """The verified answer, the number of the right choice counted from 0, what the environment of a task is made from,
    or the far text; empty for a document."""
    choices: str = ""
    """JSON list of the continuations to choose from; empty for the other kinds."""

    @property
    def prompt_digest(self) -> str:
        return text_digest(self.text + {CHOICE: self.choices, TASK: self.answer, FAR: self.answer}.get(self.kind, ""))

    @property
    def choice_list(self) -> list[str]:
        """The continuations of a multiple-choice question."""
        return json.loads(self.choices)


def write_suite(path: Path, questions: list[Question]) -> None:
    """Write questions in the given order, which must be that of their ids."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist([vars(question) for question in questions], schema=schema), path)


def read_suite(path: Path) -> list[Question]:
    """The questions of a suite, sorted by item id."""
    import pyarrow.parquet as pq

    return [Question(**row) for row in pq.read_table(path).to_pylist()]
