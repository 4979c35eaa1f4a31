"""Step: makes verified problems: documents/, chats, prompts, and problems to evaluate with.

documents/ (domain synthetic) is for pre-training, chats.parquet for SFT, prompts.parquet for reinforcement learning,
tasks.parquet for that in environments.
problems.parquet (arithmetic) is evaluated with, and so is held_out.parquet (the other families). Nothing evaluated or
held out is trained on: no operand pair, no key of a family's problem, no template of a request in safety.parquet. No
prompt is in a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.step import Output, Progress, Record, canonical_json, step
from tasks.data.problems.arithmetic import OPERATIONS, answers, choose_problems, terms, verify_worked, worked
from tasks.data.problems.environment_tasks import TASK_COLUMNS, held_out_task_rows, task_rows
from tasks.data.problems.reasoned_problem import ReasonedProblem
from tasks.data.problems.reasoning_families import FAMILIES, choose_reasoned
from tasks.data.problems.refusals import expected_behaviour
from tasks.data.problems.safety_requests import DOMAIN as SAFETY
from tasks.data.problems.safety_requests import SafetyRequest, held_out_requests, training_requests
from tasks.data.records.documents import (
    CHAT_COLUMNS,
    NUM_HASHES,
    PREPARED_COLUMNS,
    SYNTHETIC,
    TRAIN,
    UNBUCKETED,
    arrow_schema,
    content_digest,
    document_id,
    sampling_hash,
)

if TYPE_CHECKING:
    from pathlib import Path

    from configs.schema import SynthesisRecipe

SOURCE = "synthetic/arithmetic"
WORKED_SOURCE = f"{SOURCE}-worked"
CHAT_SOURCE = f"{SOURCE}-chats"
PROMPT_SOURCE = f"{SOURCE}-prompts"
EVALUATION_SOURCE = f"{SOURCE}-evaluation"
HELD_OUT_SOURCE = "synthetic/held-out"
SAFETY_CHAT_SOURCE = "synthetic/safety-chats"
SAFETY_SOURCE = "synthetic/safety"

ASKED_COLUMNS = "id string, domain string, prompt string, answer string, family string"
HELD_OUT_COLUMNS = f"{ASKED_COLUMNS}, text string"
COLUMNS = {
    "documents/part-00000.parquet": PREPARED_COLUMNS,
    "chats.parquet": CHAT_COLUMNS.rpartition(", num_bytes")[0],
    "tasks.parquet": TASK_COLUMNS,
    "held_out_tasks.parquet": TASK_COLUMNS,
    "held_out.parquet": HELD_OUT_COLUMNS,
}
"""Columns of tables that may be empty, or have empty columns."""
UNSCORED = {"language": "", "quality": None, "quality_bucket": UNBUCKETED}


class SynthesizedProblems(Record):
    num_documents: int
    num_bytes: int
    num_training_problems: int
    """Problems in documents, of all families."""
    num_evaluation_problems: int
    num_chats: int
    num_prompts: int
    num_tasks: int
    """Prompts of environments."""
    num_held_out_problems: int
    num_held_out_tasks: int
    """Tasks of environments that are evaluated."""
    num_safety_requests: int
    """Held-out requests, harmful and harmless."""
    training_problems_by_family: dict[str, int]
    rejected: dict[str, int]
    """Problems that the verifier refused, by family."""


@dataclass(frozen=True)
class Problem:
    operation: str
    terms: str
    """`12 + 7`"""
    result: str
    worked: str
    """The way to the result by digits: `2+7=9` and `1+0=1`, a line each."""

    @property
    def line(self) -> str:
        """The problem as documents state it."""
        return f"{self.terms} = {self.result}"

    @property
    def question(self) -> str:
        """The problem as a user asks it."""
        return f"What is {self.terms}?"

    @property
    def text(self) -> str:
        """The problem as documents work it out: as those of the families."""
        return ReasonedProblem(self.question, self.worked, self.result, "").text


@dataclass(frozen=True)
class FamilyProblems:
    """The chosen problems of one family besides arithmetic."""

    name: str
    training: list[ReasonedProblem]
    prompts: list[ReasonedProblem]
    held_out: list[ReasonedProblem]
    num_rejected: int


@step(
    content=(
        "documents/*.parquet",
        *(
            f"{name}.parquet"
            for name in ("chats", "prompts", "tasks", "held_out_tasks", "problems", "held_out", "safety")
        ),
    ),
    distributions=("pyarrow", "numpy"),
)
def synthesize_problems(*, recipe: SynthesisRecipe, output: Output) -> SynthesizedProblems:
    """Write problems whose answers were read from the text and checked. Raises ValueError where there are too few of a
    kind."""
    total = recipe.num_training_problems + sum(recipe.families.values())
    output.report(Progress(0, total, "problems"))
    known = _problems(recipe.num_training_problems + recipe.num_prompts, recipe, for_evaluation=False)
    training, unseen = known[: recipe.num_training_problems], known[recipe.num_training_problems :]
    evaluation = _problems(recipe.num_evaluation_problems, recipe, for_evaluation=True)
    families = [_family_problems(name, count, recipe) for name, count in sorted(recipe.families.items())]
    size = recipe.problems_per_document
    texts = _joined([f"{problem.line}\n" for problem in training], size)
    documents = [(SOURCE, number, text) for number, text in enumerate(texts)]
    texts = _joined([f"{problem.text}\n" for problem in training], size)
    documents += [(WORKED_SOURCE, number, text) for number, text in enumerate(texts)]
    for family in families:
        texts = _joined([f"{problem.text}\n" for problem in family.training], size)
        documents += [(f"synthetic/{family.name}", number, text) for number, text in enumerate(texts)]
    chats = [_chat(number, problem, recipe) for number, problem in enumerate(training[: recipe.num_chats])]
    for family in families:
        asked = family.training[: -(-len(family.training) * recipe.num_chats // recipe.num_training_problems)]
        chats += [_reasoned_chat(family.name, number, problem, recipe) for number, problem in enumerate(asked)]
    tasks, task_chats = task_rows({**recipe.tasks}, recipe.num_task_chats)
    prompts = [(SYNTHETIC, problem.question, problem.result, f"arithmetic {problem.operation}") for problem in unseen]
    prompts += [(SYNTHETIC, each.question, each.answer, family.name) for family in families for each in family.prompts]
    requests = training_requests(recipe.num_safety_chats + recipe.num_safety_prompts)
    shown = enumerate(requests[: recipe.num_safety_chats])
    chats += [*task_chats, *(_safety_chat(number, each, recipe) for number, each in shown)]
    prompts += [_safety_prompt(request) for request in requests[recipe.num_safety_chats :]]
    held_out = [(problem, family.name) for family in families for problem in family.held_out]
    tables = {
        "documents/part-00000.parquet": [_document(*document) for document in documents],
        "chats.parquet": chats,
        "prompts.parquet": [_asked(PROMPT_SOURCE, number, *prompt) for number, prompt in enumerate(prompts)],
        "tasks.parquet": tasks,
        "held_out_tasks.parquet": held_out_task_rows(recipe.tasks, recipe.num_evaluation_tasks),
        "problems.parquet": [_evaluation_problem(number, problem) for number, problem in enumerate(evaluation)],
        "held_out.parquet": [
            _asked(HELD_OUT_SOURCE, number, SYNTHETIC, problem.question, problem.answer, family)
            | {"text": problem.text}
            for number, (problem, family) in enumerate(held_out)
        ],
        "safety.parquet": _held_out_safety(),
    }
    for name, rows in tables.items():
        _write_table(output.path(name), rows, COLUMNS.get(name))
    return SynthesizedProblems(
        num_documents=len(documents),
        num_bytes=sum(len(text.encode()) for *_, text in documents),
        num_training_problems=total,
        num_evaluation_problems=len(evaluation),
        num_chats=len(chats),
        num_prompts=len(prompts),
        num_tasks=len(tasks),
        num_held_out_problems=len(held_out),
        num_held_out_tasks=len(tables["held_out_tasks.parquet"]),
        num_safety_requests=len(tables["safety.parquet"]),
        training_problems_by_family={"arithmetic": len(training)}
        | {family.name: len(family.training) for family in families},
        rejected={family.name: family.num_rejected for family in families if family.num_rejected},
    )


def _held_out_safety() -> list[dict[str, object]]:
    """Rows of safety.parquet."""
    requests = enumerate(held_out_requests())
    return [_asked(SAFETY_SOURCE, number, *_safety_prompt(request)) for number, request in requests]


def _write_table(path: Path, rows: list[dict[str, object]], columns: str | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows, schema=arrow_schema(columns) if columns else None)
    pq.write_table(table.sort_by("id"), path, compression="zstd")


def _joined(texts: list[str], size: int) -> list[str]:
    """Texts joined in groups of `size`."""
    return ["".join(texts[start : start + size]) for start in range(0, len(texts), size)]


def _family_problems(name: str, count: int, recipe: SynthesisRecipe) -> FamilyProblems:
    num_prompts = recipe.num_prompts if name in recipe.prompt_families else 0
    known, num_rejected = choose_reasoned(
        name, FAMILIES[name], count + num_prompts, recipe.difficulty, for_evaluation=False
    )
    held_out, num_more = choose_reasoned(
        name, FAMILIES[name], recipe.num_held_out_problems, recipe.difficulty, for_evaluation=True
    )
    return FamilyProblems(name, known[:count], known[count:], held_out, num_rejected + num_more)


def _problems(count: int, recipe: SynthesisRecipe, for_evaluation: bool) -> list[Problem]:
    """`count` different verified problems of one side."""
    import numpy as np

    operation, a, b = choose_problems(count, recipe.max_operand, recipe.operations, for_evaluation)
    results = answers(operation, a, b).astype(np.str_).tolist()
    signs = [OPERATIONS[index] for index in operation.tolist()]
    works = worked(operation, a, b)
    columns = (signs, terms(operation, a, b).tolist(), results, works.tolist())
    problems = [Problem(*values) for values in zip(*columns, strict=True)]
    lines = np.array([problem.line for problem in problems])
    wrong = lines[~verify_worked(lines, works)]
    assert not len(wrong), wrong[:3]
    return problems


def _document(source: str, number: int, text: str) -> dict[str, object]:
    identity = document_id(source, number, 0)
    address = {
        "id": identity,
        "source": source,
        "offset": number,
        "piece": 0,
        "collection": source,
        "url": "",
        "licence": "",
    }
    address |= {"repository": "", "path": ""}
    sizes = {"content_digest": content_digest(text), "num_chars": len(text), "num_bytes": len(text.encode())}
    return {
        **address,
        "domain": SYNTHETIC,
        "lang": "",
        "text": text,
        **sizes,
        "cluster": identity,
        "split": TRAIN,
        **UNSCORED,
    }


def _chat(number: int, problem: Problem, recipe: SynthesisRecipe) -> dict[str, object]:
    share = sampling_hash(document_id(CHAT_SOURCE, number, 0)) / NUM_HASHES
    reasoning = problem.worked if share < recipe.thinking_share * recipe.worked_share else problem.line
    return _conversation(CHAT_SOURCE, number, problem.question, reasoning, problem.result, "arithmetic", recipe)


def _reasoned_chat(family: str, number: int, problem: ReasonedProblem, recipe: SynthesisRecipe) -> dict[str, object]:
    return _conversation(
        f"synthetic/{family}-chats", number, problem.question, problem.reasoning, problem.answer, family, recipe
    )


def _conversation(
    source: str, number: int, question: str, reasoning: str, answer: str, kind: str, recipe: SynthesisRecipe
) -> dict[str, object]:
    """One question and its answer, with reasoning where the hash of its id is in `thinking_share`."""
    identity = document_id(source, number, 0)
    thought = reasoning if sampling_hash(identity) < recipe.thinking_share * NUM_HASHES else ""
    answered = {"role": "assistant", "content": answer, "reasoning": thought, "tool_calls": []}
    messages = canonical_json([{"role": "user", "content": question, "reasoning": "", "tool_calls": []}, answered])
    address = {
        "id": identity,
        "source": source,
        "offset": number,
        "piece": 0,
        "collection": source,
        "licence": "",
        "kind": kind,
    }
    return {**address, "messages": messages, "tools": "[]"}


def _safety_chat(number: int, request: SafetyRequest, recipe: SynthesisRecipe) -> dict[str, object]:
    return _conversation(SAFETY_CHAT_SOURCE, number, request.text, request.reasoning, request.answer, SAFETY, recipe)


def _safety_prompt(request: SafetyRequest) -> tuple[str, str, str, str]:
    """(domain, question, what the verifier expects, label)"""
    return SAFETY, request.text, expected_behaviour(request.label, request.known), request.label


def _asked(source: str, number: int, domain: str, question: str, answer: str, family: str) -> dict[str, object]:
    """A prompt, or a problem or request that is held out."""
    return {
        "id": document_id(source, number, 0),
        "domain": domain,
        "prompt": question,
        "answer": answer,
        "family": family,
    }


def _evaluation_problem(number: int, problem: Problem) -> dict[str, object]:
    """`prompt` and `answer` continue plain text, `question` asks the same in a conversation, `text` works it out."""
    texts = {"prompt": f"{problem.terms} =", "answer": f" {problem.result}", "question": problem.question}
    texts["text"] = problem.text
    return {"id": document_id(EVALUATION_SOURCE, number, 0), "operation": problem.operation, **texts}
