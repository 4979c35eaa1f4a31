"""Step: seed problems with worked solutions (role `prompts`) -> chats.parquet of those that verify, rejected.parquet.

Calculations that a solution annotates are recomputed, its final answer is compared with the record's, its code is run
against the tests.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from infra.step import Output, Progress, Record, step
from tasks.data.records.documents import CHAT_COLUMNS, arrow_schema
from tasks.data.seeds.math_answers import without_annotations
from tasks.data.seeds.problem_kinds import CODE
from tasks.data.seeds.seed_problems import Seed, check_solution, conversation, read_seeds

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.data.sources.list_sources import SourceListing

SUFFIX = "#solutions"
"""Suffix of the source's name: the same record may also have a teacher's trace."""
CHATS = CHAT_COLUMNS.rpartition(", num_bytes")[0]
REJECTED = "id string, source string, offset long, reason string"


class VerifiedSolutions(Record):
    num_seeds: int
    num_without_solution: int
    num_chats: int
    chats_by_collection: dict[str, int]
    rejected: dict[str, int]
    """Solutions by reason."""


@step(content=("chats.parquet", "rejected.parquet"), distributions=("pyarrow",))
def verify_solutions(*, sources: SourceListing, output: Output) -> VerifiedSolutions:
    """Keep the solutions that verify. Without seeds both tables are empty."""
    seeds = read_seeds(sources.files)
    solved = [seed for seed in seeds if seed.solution]
    chats, rejected = [], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # half of a sandbox's time is waiting for the kernel
        reasons = pool.map(lambda seed: check_solution(seed, stated_solution(seed)), solved)
        for number, (seed, reason) in enumerate(zip(solved, reasons, strict=True)):
            if number % 100 == 0:
                output.report(Progress(number, len(solved), "solutions"))
            if reason:
                rejected.append({"id": seed.id, "source": seed.source, "offset": seed.offset, "reason": reason})
            elif seed.question:
                chats.append(conversation(seed, SUFFIX, "", written_solution(seed)))
    write_rows(output.path("chats.parquet"), chats, CHATS)
    write_rows(output.path("rejected.parquet"), rejected, REJECTED)
    return VerifiedSolutions(
        num_seeds=len(seeds),
        num_without_solution=len(seeds) - len(solved),
        num_chats=len(chats),
        chats_by_collection=counts(chats, "collection"),
        rejected=counts(rejected, "reason"),
    )


def stated_solution(seed: Seed) -> str:
    """The solution with its final answer, which GSM8K stores separately."""
    return seed.solution if seed.kind == CODE or "\\boxed" in seed.solution else f"{seed.solution}\n#### {seed.answer}"


def written_solution(seed: Seed) -> str:
    if seed.kind == CODE:
        return f"```python\n{seed.solution.strip()}\n```"
    text = without_annotations(seed.solution)
    return text if "\\boxed" in text else f"{text}\nThe answer is {seed.answer}."


def counts(rows: list[dict[str, object]], key: str) -> dict[str, int]:
    values = [str(row[key]) for row in rows]
    return {value: values.count(value) for value in sorted(set(values))}


def write_rows(path: Path, rows: list[dict[str, object]], columns: str) -> None:
    """Write rows as a table sorted by id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(columns)).sort_by("id"), path, compression="zstd")
