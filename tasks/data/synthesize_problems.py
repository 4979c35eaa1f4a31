"""Step: verified arithmetic -> documents/ to pre-train on (domain synthetic), chats.parquet for SFT, prompts.parquet for reinforcement
learning and problems.parquet to be evaluated with. No operand pair of an evaluated problem is trained on; no prompt is in a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.step import Output, Progress, Record, canonical_json, step
from tasks.data.arithmetic import OPERATIONS, answers, choose_problems, terms, verify_lines
from tasks.data.documents import PREPARED_COLUMNS, SYNTHETIC, TRAIN, UNBUCKETED, arrow_schema, content_digest, document_id, sampling_hash

if TYPE_CHECKING:
    from configs.schema import SynthesisRecipe

SOURCE = "synthetic/arithmetic"
CHAT_SOURCE = f"{SOURCE}-chats"
PROMPT_SOURCE = f"{SOURCE}-prompts"
EVALUATION_SOURCE = f"{SOURCE}-evaluation"


UNSCORED = {"language": "", "quality": None, "quality_bucket": UNBUCKETED}


class SynthesizedProblems(Record):
    num_documents: int
    num_bytes: int
    num_training_problems: int
    num_evaluation_problems: int
    num_chats: int
    num_prompts: int


@dataclass(frozen=True)
class Problem:
    operation: str
    terms: str
    """`12 + 7`"""
    result: str

    @property
    def line(self) -> str:
        """As documents state it."""
        return f"{self.terms} = {self.result}"

    @property
    def question(self) -> str:
        """As a user asks it."""
        return f"What is {self.terms}?"


@step(content=("documents/*.parquet", "chats.parquet", "prompts.parquet", "problems.parquet"), distributions=("pyarrow", "numpy"))
def synthesize_problems(*, recipe: SynthesisRecipe, output: Output) -> SynthesizedProblems:
    """Write problems whose stated results were read back from the text and checked. Raises ValueError if max_operand gives too few."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    output.report(Progress(0, recipe.num_training_problems, "problems"))
    known = _problems(recipe.num_training_problems + recipe.num_prompts, recipe, for_evaluation=False)
    training, unseen = known[: recipe.num_training_problems], known[recipe.num_training_problems :]
    evaluation = _problems(recipe.num_evaluation_problems, recipe, for_evaluation=True)
    size = recipe.problems_per_document
    texts = ["".join(f"{problem.line}\n" for problem in training[start : start + size]) for start in range(0, len(training), size)]
    tables = {
        "documents/part-00000.parquet": [_document(number, text) for number, text in enumerate(texts)],
        "chats.parquet": [_chat(number, problem, recipe) for number, problem in enumerate(training[: recipe.num_chats])],
        "prompts.parquet": [_prompt(number, problem) for number, problem in enumerate(unseen)],
        "problems.parquet": [_evaluation_problem(number, problem) for number, problem in enumerate(evaluation)],
    }
    for name, rows in tables.items():
        schema = arrow_schema(PREPARED_COLUMNS) if name.startswith("documents/") else None
        pq.write_table(pa.Table.from_pylist(rows, schema=schema).sort_by("id"), output.path(name), compression="zstd")
    return SynthesizedProblems(
        num_documents=len(texts), num_bytes=sum(len(text.encode()) for text in texts), num_training_problems=len(training),
        num_evaluation_problems=len(evaluation), num_chats=recipe.num_chats, num_prompts=len(unseen),
    )  # fmt: skip


def _problems(count: int, recipe: SynthesisRecipe, for_evaluation: bool) -> list[Problem]:
    """So many different problems of one side, verified."""
    import numpy as np

    operation, a, b = choose_problems(count, recipe.max_operand, recipe.operations, for_evaluation)
    results = answers(operation, a, b).astype(np.str_).tolist()
    signs = [OPERATIONS[place] for place in operation.tolist()]
    problems = [Problem(*values) for values in zip(signs, terms(operation, a, b).tolist(), results, strict=True)]
    lines = np.array([problem.line for problem in problems])
    wrong = lines[~verify_lines(lines)]
    assert not len(wrong), wrong[:3]
    return problems


def _document(number: int, text: str) -> dict[str, object]:
    identity = document_id(SOURCE, number, 0)
    place = {"id": identity, "source": SOURCE, "offset": number, "piece": 0, "collection": SOURCE, "url": "", "licence": ""}
    place |= {"repository": "", "path": ""}
    sizes = {"content_digest": content_digest(text), "num_chars": len(text), "num_bytes": len(text.encode())}
    return {**place, "domain": SYNTHETIC, "lang": "", "text": text, **sizes, "cluster": identity, "split": TRAIN, **UNSCORED}


def _chat(number: int, problem: Problem, recipe: SynthesisRecipe) -> dict[str, object]:
    """One question and its answer; with reasoning where the hash of its place falls into the share that thinks."""
    identity = document_id(CHAT_SOURCE, number, 0)
    reasoning = problem.line if sampling_hash(identity) < recipe.thinking_share * 2**32 else ""
    answer = {"role": "assistant", "content": problem.result, "reasoning": reasoning, "tool_calls": []}
    messages = canonical_json([{"role": "user", "content": problem.question, "reasoning": "", "tool_calls": []}, answer])
    place = {
        "id": identity,
        "source": CHAT_SOURCE,
        "offset": number,
        "piece": 0,
        "collection": CHAT_SOURCE,
        "licence": "",
        "kind": "arithmetic",
    }
    return {**place, "messages": messages, "tools": "[]"}


def _prompt(number: int, problem: Problem) -> dict[str, str]:
    asked = {"prompt": problem.question, "answer": problem.result, "family": f"arithmetic {problem.operation}"}
    return {"id": document_id(PROMPT_SOURCE, number, 0), "domain": SYNTHETIC, **asked}


def _evaluation_problem(number: int, problem: Problem) -> dict[str, str]:
    """`prompt` and `answer` continue plain text, `question` asks the same in a conversation."""
    texts = {"prompt": f"{problem.terms} =", "answer": f" {problem.result}", "question": problem.question}
    return {"id": document_id(EVALUATION_SOURCE, number, 0), "operation": problem.operation, **texts}
