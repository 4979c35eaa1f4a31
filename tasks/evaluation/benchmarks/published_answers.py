"""Joins the questions of function calling with their answers, which BFCL publishes in files of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tasks.data.prompts.benchmark_records import Record

ANSWER_FIELDS = {"id", "ground_truth"}
WITHOUT_CALL = re.compile(r"(?:live_)?irrelevance_")
"""Ids of BFCL's questions that no function answers: they have no answer in any file."""


def with_answers(records: Mapping[str, Sequence[Record]]) -> dict[str, list[Record]]:
    """The questions of every file, those without `ground_truth` with that of the answer with their id. Raises
    ValueError for an answer without its question."""
    waiting = {
        str(record["id"]): (record["ground_truth"], name)
        for name, own in records.items()
        for record in own
        if {*record} == ANSWER_FIELDS
    }
    joined: dict[str, list[Record]] = {}
    for name, own in records.items():
        for record in own:
            identity = str(record.get("id"))
            if {*record} == ANSWER_FIELDS:
                continue
            if identity in waiting and "ground_truth" not in record:
                record = {**record, "ground_truth": waiting.pop(identity)[0]}
            elif WITHOUT_CALL.match(identity):
                record = {"ground_truth": None, **record}
            joined.setdefault(name, []).append(record)
    if waiting:
        identity, (_, name) = next(iter(waiting.items()))
        raise ValueError(
            f"{name} has the answer to {identity} ({len(waiting)} such answers), and no file of the benchmark has the "
            f"question: name both files in the benchmark's `file`, as in "
            f"{{BFCL_v4_simple_python,possible_answer/BFCL_v4_simple_python}}.json"
        )
    return joined
