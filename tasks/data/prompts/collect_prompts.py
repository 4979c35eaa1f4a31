"""Step: the prompts of reinforcement learning -> prompts.parquet: those of files of role `prompts`, generated ones, and
searches in the training documents.

rejected.parquet names the other records of the files, each with its reason. A program's tests are trusted only where
the record's own solution, if it has one, passed them (verify_solutions).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.environments.environments import OPENERS
from tasks.data.problems.environment_tasks import TASK_SOURCE
from tasks.data.problems.synthesize_problems import PROMPT_SOURCE
from tasks.data.prompts.asked_turns import turns_before
from tasks.data.prompts.document_searches import document_search_rows
from tasks.data.prompts.prompt_records import READERS, UnusablePromptError, prompt_of
from tasks.data.readers.json_lines import JsonLine
from tasks.data.readers.record_lines import record_lines
from tasks.data.readers.source_bytes import HashingReader, is_listed, open_source
from tasks.data.records.documents import AGENTIC, document_id, sampling_hash
from tasks.data.seeds.problem_kinds import CODE, DOMAIN_OF_KIND, EXACT, SAFETY
from tasks.data.seeds.verify_solutions import REJECTED, write_rows

if TYPE_CHECKING:
    from configs.schema import PromptRecipe
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.prompts.sample_passages import SampledPassages
    from tasks.data.seeds.verify_solutions import VerifiedSolutions
    from tasks.data.sources.list_sources import SourceFile, SourceListing

PROMPTS = (
    "id string, source string, offset long, collection string, licence string, domain string, kind string, "
    "prompt string, messages string, tools string, answer string"
)
"""`prompt` is the whole text that is asked; `messages` its turns, where these are more than a question, else []."""
Row = dict[str, Any]


class CollectedPrompts(Record):
    num_prompts: int
    prompts_by_domain: dict[str, int]
    prompts_by_kind: dict[str, int]
    rejected: dict[str, int]
    """Records of the files by reason."""


@step(content=("prompts.parquet", "rejected.parquet"), distributions=("pyarrow",))
def collect_prompts(
    *,
    sources: SourceListing,
    synthetic: Artifact[SynthesizedProblems],
    solutions: Artifact[VerifiedSolutions],
    recipe: PromptRecipe,
    output: Output,
    passages: Artifact[SampledPassages] | None = None,
) -> CollectedPrompts:
    """`passages` is None where nothing is asked about documents. Raises ValueError for a file that changed, one of a
    kind that has no verifier, and one of which no record is a prompt."""
    files = [file for file in sources.files if file.role == "prompts"]
    if unknown := next((file for file in files if file.kind not in READERS), None):
        named = f"kind {unknown.kind}, which has no verifier" if unknown.kind else "no kind"
        raise ValueError(
            f"source {unknown.name} has the role prompts and {named}: give it one of {', '.join(READERS)} in "
            f"glm46-data.yaml, or the role ignore"
        )
    rows = _generated(synthetic)
    rows += [] if passages is None else _searches(passages)
    rows = [{"messages": "[]", **row} for row in rows]
    rejected: list[Row] = []
    refuted = _refuted(solutions)
    asked = {row["prompt"] for row in rows}
    chosen: dict[str, list[Row]] = {}
    for number, file in enumerate(files):
        output.report(Progress(number, len(files), "files"))
        read = list(_file_rows(file, recipe, refuted, asked))
        if read and all("reason" in row for row in read):
            reasons = dict(sorted(Counter(row["reason"] for row in read).items()))
            raise ValueError(
                f"source {file.name}: none of its {len(read)} records is a prompt of kind {file.kind} ({reasons}): "
                f"correct the file or its kind, or give it the role ignore"
            )
        rejected += [row for row in read if "reason" in row]
        chosen.setdefault(file.collection, []).extend(row for row in read if "reason" not in row)
    for collected in chosen.values():
        collected.sort(key=lambda row: (sampling_hash(row["id"]), row["id"]))
        rows += collected[: recipe.max_per_collection]
        rejected += [_rejected(row, "collection_full") for row in collected[recipe.max_per_collection :]]
    write_rows(output.path("prompts.parquet"), rows, PROMPTS)
    write_rows(output.path("rejected.parquet"), rejected, REJECTED)
    return CollectedPrompts(
        num_prompts=len(rows),
        prompts_by_domain=dict(sorted(Counter(row["domain"] for row in rows).items())),
        prompts_by_kind=dict(sorted(Counter(row["kind"] for row in rows).items())),
        rejected=dict(sorted(Counter(row["reason"] for row in rejected).items())),
    )


def _generated(synthetic: Artifact[SynthesizedProblems]) -> list[Row]:
    import pyarrow.parquet as pq

    numbers = {document_id(PROMPT_SOURCE, number, 0): number for number in range(synthetic.record.num_prompts)}
    made = pq.read_table(synthetic.path("prompts.parquet"), columns=["id", "domain", "prompt", "answer"]).to_pylist()
    place = {"source": PROMPT_SOURCE, "collection": PROMPT_SOURCE, "licence": "", "tools": "[]"}
    kinds = {DOMAIN_OF_KIND[SAFETY]: SAFETY}
    rows = [{**row, **place, "kind": kinds.get(row["domain"], EXACT), "offset": numbers[row["id"]]} for row in made]
    numbers = {document_id(TASK_SOURCE, number, 0): number for number in range(synthetic.record.num_tasks)}
    place = {"source": TASK_SOURCE, "collection": TASK_SOURCE, "licence": ""}
    tasks = pq.read_table(synthetic.path("tasks.parquet")).to_pylist()
    return [*rows, *({**row, **place, "offset": numbers[row["id"]]} for row in tasks)]


def _searches(passages: Artifact[SampledPassages]) -> list[Row]:
    import pyarrow.parquet as pq

    return document_search_rows(pq.read_table(passages.path("passages.parquet"))["passage"].to_pylist())


def _refuted(solutions: Artifact[VerifiedSolutions]) -> dict[str, str]:
    """Records whose own solution did not verify: their ids, and why."""
    import pyarrow.parquet as pq

    table = pq.read_table(solutions.path("rejected.parquet"), columns=["id", "reason"])
    return dict(zip(table["id"].to_pylist(), table["reason"].to_pylist(), strict=True))


def _file_rows(file: SourceFile, recipe: PromptRecipe, refuted: dict[str, str], asked: set[str]) -> Iterator[Row]:
    """Rows of PROMPTS or, with a reason, of REJECTED; `asked` are the prompts before, and is extended."""
    with open_source(file.path, file.sha256) as raw:
        hashing = HashingReader(raw)
        for line in record_lines(file.format, file.name, file.path, file.sha256, hashing):
            row = _row(file, line)
            if "reason" not in row and file.kind == CODE and row["id"] in refuted:
                row = _rejected(row, refuted[row["id"]])
            if "reason" not in row and len(row["prompt"]) > recipe.max_prompt_chars:
                row = _rejected(row, "too_long")
            if "reason" not in row and row["prompt"] in asked:
                row = _rejected(row, "duplicate")
            if "reason" not in row:
                asked.add(row["prompt"])
            yield row
        if not is_listed(hashing, file.sha256):
            raise ValueError(
                f"source {file.name} changed while it was read: run again when nothing writes to the directory"
            )


def _row(file: SourceFile, line: JsonLine) -> Row:
    place = {"id": document_id(file.name, line.offset, 0), "source": file.name, "offset": line.offset}
    if line.record is None:
        return {**place, "reason": line.reason}
    try:
        before, asked = turns_before(line.record)
        read = prompt_of(file.kind, asked)
    except UnusablePromptError as error:
        return {**place, "reason": error.reason}
    domain = DOMAIN_OF_KIND.get(file.kind, AGENTIC) if file.domain == "web" or file.kind in OPENERS else file.domain
    described = {"collection": file.collection, "licence": file.licence, "domain": domain, "kind": file.kind}
    messages = [*before, {"role": "user", "content": read.question}] if before else []
    prompt = "\n\n".join(message["content"] for message in messages) or read.question
    told = {"prompt": prompt, "messages": json.dumps(messages, ensure_ascii=False)}
    return {**place, **described, **told, "tools": read.tools, "answer": read.answer}


def _rejected(row: Row, reason: str) -> Row:
    return {"id": row["id"], "source": row["source"], "offset": row["offset"], "reason": reason}
