"""Reads problems with a checkable answer from source files with role `prompts`, kind `math` or `code_with_tests`.

A seed may bring its own worked solution. Programs are checked by running them (code_sandbox), mathematics by
comparing the final answer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from infra.step import canonical_json
from tasks.data.readers.record_lines import record_lines
from tasks.data.readers.source_bytes import HashingReader, is_listed, open_source
from tasks.data.records.documents import document_id
from tasks.data.records.record_fields import media_of, with_turns
from tasks.data.sandbox.code_sandbox import PASSED, UNVERIFIABLE, isolation, judge_solution
from tasks.data.seeds.code_answers import program_of
from tasks.data.seeds.math_answers import answers_agree, boxed_answers, false_annotations, final_answer
from tasks.data.seeds.problem_kinds import CODE, MATH
from tasks.data.seeds.program_tests import MODULE, assertions, published_solution, published_tests

if TYPE_CHECKING:
    from tasks.data.sources.list_sources import SourceFile

QUESTION_FIELDS = (
    *(
        "question",
        "problem",
        "problem_description",
        "quiz",
        "instructions",
        "instruction",
        "text",
        "prompt",
        "query",
        "Problem",
    ),
    *("Question", "question_content", "description"),
)
ANSWER_FIELDS = ("answer_number", "solution_text", "answer", "Answer", "expected_answer", "final_answer")
NO_ANSWERS = ("proof", "notfound", "nan", "inf", "-inf")
"""What NuminaMath and tables write where there is none."""
TRUTH_FIELDS = ("ground_truth", "label", "target")
"""Fields of a mathematical answer in data for other trainers."""
GSM_MARK = "####"
MEASURED = re.compile(r"([\d.,:/]+) \([^()\d]+\)")
"""A number with its unit in brackets, `9 (apples)`, as ASDiv has it."""
BYTES = re.compile(r"b'[^'\n]*'|b\"[^\"\n]*\"")
IMPORTS_SOLUTION = re.compile(rf"^(?:from|import) {MODULE}\b", re.MULTILINE)


class CodeParts(NamedTuple):
    tests: str
    solution: str
    """Of the record; empty where it has none."""
    module: str
    """What the tests import; empty where they use the solution's names, STANDARD_INPUT where they are inputs and
    outputs."""
    told: str
    """What the question is followed by, since a program could not be written without it."""


@dataclass(frozen=True)
class Seed:
    id: str
    source: str
    offset: int
    collection: str
    licence: str
    kind: str
    question: str
    """Empty for a program that is asked in several turns: its own solution is checked, and no conversation made."""
    answer: str
    """The final answer for mathematics; the tests for code."""
    solution: str
    """Worked solution of the record; empty where it has none."""
    module: str
    """As in CodeParts."""


def require_sandbox(files: Sequence[SourceFile]) -> None:
    """Raises ValueError where the sources hold programs to run and this machine has no sandbox."""
    if any(file.role == "prompts" and file.kind == CODE for file in files):
        isolation()


def read_seeds(files: Sequence[SourceFile]) -> list[Seed]:
    """The seeds of all files, sorted by id. Records without a question or without an answer are skipped. Raises
    ValueError for a changed file."""
    seeds = [
        seed for file in files if file.role == "prompts" and file.kind in (MATH, CODE) for seed in _file_seeds(file)
    ]
    return sorted(seeds, key=lambda seed: seed.id)


def _file_seeds(file: SourceFile) -> Iterator[Seed]:
    with open_source(file.path, file.sha256) as raw:
        hashing = HashingReader(raw)
        for line in record_lines(file.format, file.name, file.path, file.sha256, hashing):
            seed = None if line.record is None else _seed(file, line.offset, line.record)
            if seed is not None:
                yield seed
        if not is_listed(hashing, file.sha256):
            raise ValueError(
                f"source {file.name} changed while it was read: run again when nothing writes to the directory"
            )


def _seed(file: SourceFile, offset: int, record: dict[str, Any]) -> Seed | None:
    if media_of(record):
        return None
    record = with_turns(record)
    question = asked_question(record)
    is_in_turns = file.kind == CODE and any(isinstance(record.get(name), list) for name in ("prompt", "messages"))
    if file.kind == CODE:
        answer, solution, module, told = code_parts(record)
        question = f"{question}\n{told}" if question else ""
    else:
        answer, solution = math_parts(record)
        module = ""
    if not (question.strip() or is_in_turns) or not answer.strip():
        return None
    return Seed(
        document_id(file.name, offset, 0),
        file.name,
        offset,
        file.collection,
        file.licence,
        file.kind,
        question.strip(),
        answer,
        solution,
        module,
    )


def asked_question(record: Mapping[str, Any]) -> str:
    """The question of a record; empty where it has none."""
    record = with_turns(record)
    if parted := parted_question(record):
        return parted
    asked = next((_decoded(record[name]) for name in QUESTION_FIELDS if isinstance(record.get(name), str)), "")
    return asked or only_question(record.get("prompt")) or only_question(record.get("messages"))


def parted_question(record: Mapping[str, Any]) -> str:
    """The question after its body, which SVAMP and ASDiv have in a field of its own; empty where there is none."""
    for body, question in (("Body", "Question"), ("body", "question")):
        if isinstance(record.get(body), str) and isinstance(record.get(question), str):
            return f"{record[body].rstrip('. ')}. {record[question]}"
    return ""


def only_question(turns: object) -> str:
    """The question of a list of messages, where it is one turn of one user, after what a system says; else empty."""
    messages = turns if isinstance(turns, list) else []
    texts = [message.get("content") for message in messages if isinstance(message, dict)]
    roles = tuple(message.get("role") for message in messages if isinstance(message, dict))
    is_asked = roles in (("user",), ("system", "user")) and all(isinstance(text, str) for text in texts)
    return "\n\n".join(text.strip() for text in texts if isinstance(text, str)).strip() if is_asked else ""


def math_parts(record: Mapping[str, Any]) -> tuple[str, str]:
    """(final answer, worked solution); empty where the record has none. The answer may be that of `reward_model`,
    as in data for verl, or of `verification_info`, JSON of SYNTHETIC-1, in a field of TRUTH_FIELDS, or in the last box
    of a solution, as in MATH."""
    truth = _object(record.get("reward_model") or record.get("verification_info")).get("ground_truth")
    fields = record if truth is None else {**record, "ground_truth": truth}
    names = (*ANSWER_FIELDS, *TRUTH_FIELDS)
    given = next((fields[name] for name in names if _is_answer(fields.get(name))), "")
    answer = f"{given:.15g}" if isinstance(given, float) else _decoded(_one_of(given))
    if answer.strip().lower() in NO_ANSWERS:
        return "", ""
    if GSM_MARK in answer:
        solution, _, answer = answer.rpartition(GSM_MARK)
        return answer.strip(), solution.strip()
    solution = record["solution"] if isinstance(record.get("solution"), str) else ""
    if parted_question(record) and (measured := MEASURED.fullmatch(answer.strip())):
        answer = measured[1]
    boxes = [] if answer.strip() else boxed_answers(solution)
    return (boxes[-1] if boxes else answer).strip(), solution


def _object(value: object) -> dict[str, Any]:
    """A mapping, also as JSON; empty for any other value."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _decoded(text: str) -> str:
    """The text of bytes as Python writes them, `b'-6\\n'`, which DeepMind's mathematics has for texts."""
    if not BYTES.fullmatch(text):
        return text
    try:
        return ast.literal_eval(text).decode().strip()
    except (SyntaxError, ValueError):
        return text


def _is_answer(given: object) -> bool:
    is_list = isinstance(given, list) and bool(given) and all(isinstance(each, str) for each in given)
    return is_list or isinstance(given, str | int | float)


def _one_of(given: str | int | list[Any]) -> str:
    """The answer of a list of answers, as OlympiadBench has them, or of one in JSON, as Skywork-OR1; empty where they
    are several. Anything else is the answer."""
    try:
        answers = json.loads(given) if isinstance(given, str) and given.lstrip().startswith('["') else given
    except ValueError:
        return str(given)
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        return "" if isinstance(given, list) else str(given)
    return answers[0] if answers and all(answers_agree(answer, answers[0]) for answer in answers[1:]) else ""


def code_parts(record: Mapping[str, Any]) -> CodeParts:
    """Tests are empty where the record has none that can be run."""
    solution = next((record[name] for name in ("code", "solution") if isinstance(record.get(name), str)), "")
    published = published_tests(record)
    if published is not None:
        return CodeParts(published.tests, solution or published_solution(record), published.module, published.told)
    tests, module = assertions(record), record.get("module_file")
    name = module.removesuffix(".py") if isinstance(module, str) else ""
    name = name or (MODULE if IMPORTS_SOLUTION.search(tests) else "")
    return CodeParts(tests, solution, name, "" if name else f"It passes these tests:\n{tests}")


def check_solution(seed: Seed, text: str) -> str:
    """The reason to reject a worked solution of a seed; empty where it is right. Raises ValueError for code on a
    machine without a sandbox."""
    if seed.kind == CODE:
        verdict = judge_solution(program_of(text), seed.answer, seed.module)
        return {PASSED: "", UNVERIFIABLE: "unverifiable_tests"}.get(verdict, "tests_failed")
    if false_annotations(text):
        return "false_calculation"
    answer = final_answer(text)
    if not answer:
        return "no_final_answer"
    return "" if answers_agree(answer, seed.answer) else "wrong_answer"


def conversation(seed: Seed, suffix: str, reasoning: str, content: str, piece: int = 0) -> dict[str, object]:
    """A seed and a verified answer, as chats.parquet holds them (CHAT_COLUMNS without num_bytes)."""
    answered = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": []}
    messages = canonical_json([{"role": "user", "content": seed.question, "reasoning": "", "tool_calls": []}, answered])
    source = f"{seed.source}{suffix}"
    address = {"id": document_id(source, seed.offset, piece), "source": source, "offset": seed.offset, "piece": piece}
    address |= {"collection": f"{seed.collection}{suffix}", "licence": seed.licence, "kind": seed.kind}
    return {**address, "messages": messages, "tools": json.dumps([])}
