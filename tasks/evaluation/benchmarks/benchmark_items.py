"""Reads the items of a benchmark from its file: the prompt with its examples, and what a right answer is.

A record that lacks what its kind needs is an error: a benchmark with fewer items is another benchmark. Only IFEval's
instructions that no program here checks are left out, and counted, as are requests of the other label.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import TYPE_CHECKING

from infra.step import canonical_json
from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.data.prompts.benchmark_records import Record, read_records
from tasks.data.prompts.prompt_records import UnusablePromptError, prompt_of, tool_request
from tasks.data.prompts.published_layouts import LacksError, given_text, in_form_of_kind
from tasks.data.prompts.python_turns import SHOWN_TOOLS
from tasks.data.seeds.math_answers import without_annotations
from tasks.data.seeds.problem_kinds import CONSTRAINTS, MATH, SAFETY, TOOLS
from tasks.data.seeds.seed_problems import asked_question, code_parts
from tasks.evaluation.benchmarks.repository_tasks import RepositoryTask, issue_prompt, task_of
from tasks.evaluation.benchmarks.retrieval_items import retrieval_items
from tasks.evaluation.choice_questions import order_hash, question_of

if TYPE_CHECKING:
    from configs.schema import AnswerBenchmark, Benchmark, FewShot, LikelihoodBenchmark, RetrievalBenchmark
    from tasks.data.sources.list_sources import SourceFile, SourceListing

BETWEEN_EXAMPLES = "\n\n"
CHINESE = re.compile("[\u4e00-\u9fff]")
CHINESE_EXAM = "以下是单项选择题，请选出其中的正确答案。"
"""What is said before the questions of C-Eval and CMMLU, whose files do not name their subject in Chinese."""
LEFT_OUT = ("unsupported_constraint", f"{HARMFUL}_request", f"{HARMLESS}_request")
"""Reasons for which a record is left out; any other is an error."""
BOX = "\nPut the final answer in \\boxed{}."


DOMAINS = ("domain", "source", "subset")
"""Fields of a text of which the first names its part."""


@dataclass(frozen=True)
class Question:
    """One record as its kind asks it."""

    prompt: str
    """Empty for whole texts."""
    expected: str
    """The right choice's text, the ending, the final answer, or what the verifier expects, as JSON."""
    example: str
    """The prompt with its answer, as few-shot examples show it."""
    choices: tuple[str, ...] = ()
    right: int = 0
    """Number of the right choice."""
    before: str = ""
    """What precedes the examples."""
    tools: str = ""
    """The functions that may be called, as a JSON list."""
    task: RepositoryTask | None = None
    """What a patch is judged by."""
    part: str = ""
    """The part of the benchmark with a figure of its own: a category, a length, a domain of texts."""


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
    by_name = {file.name: file for file in files.files}
    file = None if benchmark.file is None else by_name[benchmark.file]
    if file is not None and file.role != "evaluation":
        fix = "give it the role evaluation in glm46-data.yaml, or name a dataset's test or validation split"
        raise ValueError(
            f"benchmark {benchmark.name}: {file.name} has the role {file.role}, so it may be trained on: {fix}"
        )
    left_out: Counter[str] = Counter()
    if benchmark.kind == "retrieval":
        rows = _retrieval_rows(benchmark, file)
    else:
        assert file is not None, benchmark.name
        rows = _rows(benchmark, file, left_out)
    if len({question.task is None or question.task.tree is None for _, _, question in rows}) > 1:
        raise ValueError(f"{benchmark.file} holds records with and without a tree: make two files of them")
    kept = {row[0] for row in rows}
    if limit is not None:
        kept = set(sorted(kept, key=order_hash)[:limit])
    shots = None
    if benchmark.kind != "retrieval" and benchmark.few_shot is not None:
        source = by_name[benchmark.few_shot.file]
        shots = _Shots(benchmark.few_shot, rows if source is file else _rows(benchmark, source, Counter()))
    items = [_item(benchmark.name, row, shots) for row in rows if row[0] in kept]
    return BenchmarkItems(items, len(rows) + sum(left_out.values()), dict(left_out))


class _Shots:
    """Candidates for examples, by the value of the group's field, in hash order."""

    def __init__(self, few_shot: FewShot, rows: Sequence[Row]) -> None:
        self.few_shot = few_shot
        self.by_group: dict[str, list[Row]] = {}
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


def _retrieval_rows(benchmark: RetrievalBenchmark, file: SourceFile | None) -> list[Row]:
    text = None
    if file is not None:
        text = "\n\n".join(_text(record, False).expected for record in read_records(file, "text"))
    rows: dict[str, Row] = {}
    for part, document, asked, code in retrieval_items(benchmark, text):
        prompt = f"{document}{BETWEEN_EXAMPLES}{asked}"
        item_id = _digest(prompt)
        rows[item_id] = (item_id, {}, Question(prompt, code, "", part=part))
    return list(rows.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(benchmark: LikelihoodBenchmark | AnswerBenchmark, file: SourceFile, left_out: Counter[str]) -> list[Row]:
    """Every record of a file as a question, each once."""
    rows: dict[str, Row] = {}
    read = READERS[benchmark.kind]
    is_chat = getattr(benchmark, "is_chat", False)
    for number, record in enumerate(read_records(file, benchmark.kind), 1):
        try:
            question = read(in_form_of_kind(benchmark.kind, record), is_chat)
        except UnusablePromptError as error:
            if error.reason in LEFT_OUT:
                left_out[error.reason] += 1
                continue
            raise ValueError(
                f"{file.name}, record {number}: cannot be asked as kind {benchmark.kind} ({error.reason}); its "
                f"fields are {_fields(record)}: correct it"
            ) from error
        except LacksError as error:
            raise ValueError(
                f"{file.name}, record {number}: {error}; kind {benchmark.kind} needs it, its fields are "
                f"{_fields(record)}: correct the record, or the benchmark's kind"
            ) from error
        item_id = _digest(json.dumps(record, sort_keys=True, ensure_ascii=False, default=str))
        rows.setdefault(item_id, (item_id, record, question))
    if not rows:
        raise ValueError(f"{file.name} holds no item of kind {benchmark.kind}: name another file")
    return list(rows.values())


def _fields(record: Record) -> str:
    return ", ".join(sorted(record)) or "none"


def _parsed_choice(record: Record) -> tuple[str, list[str], int]:
    parsed = question_of(record)
    if parsed is None:
        raise LacksError("it has no query or question, no list of choices, or no gold or answer that names one")
    return parsed


def _choice(record: Record, is_chat: bool) -> Question:
    prompt, choices, right = _parsed_choice(record)
    return Question(prompt, choices[right], f"{prompt} {choices[right]}", tuple(choices), right)


def _lettered_choice(record: Record, is_chat: bool) -> Question:
    """In the form of MMLU, and of C-Eval and CMMLU where the question is Chinese."""
    _, choices, right = _parsed_choice(record)
    if len(choices) > (most := len(ascii_uppercase)):
        raise LacksError(f"it has no list of at most {most} choices, which letters name, but {len(choices)}")
    letters = ascii_uppercase[: len(choices)]
    lines = [f"{letter}. {choice.strip()}" for letter, choice in zip(letters, choices, strict=True)]
    question, subject = given_text(record, ("question", "query")).strip(), record.get("subject")
    about = f" about {subject.replace('_', ' ')}" if isinstance(subject, str) else ""
    told, cue = f"The following are multiple choice questions (with answers){about}.", "Answer:"
    if CHINESE.search(question):
        told, cue = CHINESE_EXAM, "答案："
    before, prompt = f"{told}{BETWEEN_EXAMPLES}", "\n".join([question, *lines, cue])
    return Question(prompt, letters[right], f"{prompt} {letters[right]}", tuple(letters), right, before)


def _context_choice(record: Record, is_chat: bool) -> Question:
    """WinoGrande's fields: `context_options`, `continuation` and `gold`."""
    contexts, right = record.get("context_options"), record.get("gold")
    if not isinstance(contexts, list) or len(contexts) < 2 or not all(isinstance(each, str) for each in contexts):
        raise LacksError("it has no list of texts in context_options")
    if type(right) is not int or not 0 <= right < len(contexts):
        raise LacksError("gold does not number one of context_options from 0")
    ending = given_text(record, ("continuation",))
    return Question("", ending, f"{contexts[right]} {ending}", tuple(contexts), right)


def _last_word(record: Record, is_chat: bool) -> Question:
    context, word = given_text(record, ("context",)), given_text(record, ("continuation",))
    return Question(context, word, f"{context} {word}")


def _text(record: Record, is_chat: bool) -> Question:
    text = given_text(record, ("text", "content"))
    named = [record[name] for name in DOMAINS if isinstance(record.get(name), str)]
    # The source of a crawled text is its address: a figure of one text says nothing.
    return Question("", text, text, part=next((name for name in named if name and "://" not in name), ""))


def _math(record: Record, is_chat: bool) -> Question:
    read = prompt_of(MATH, record)
    if is_chat:
        return Question(read.question + BOX, read.answer, "")
    worked = record["answer"] if isinstance(record.get("answer"), str) else read.answer
    prompt = f"Question: {read.question}\nAnswer:"
    return Question(prompt, read.answer, f"{prompt} {without_annotations(worked)}")


def _math_with_python(record: Record, is_chat: bool) -> Question:
    return replace(_math(in_form_of_kind("math", record), is_chat), tools=SHOWN_TOOLS)


def _exact(record: Record, is_chat: bool) -> Question:
    asked, answer = given_text(record, ("input", "question", "prompt")), given_text(record, ("target", "answer"))
    prompt = asked if is_chat else f"Q: {asked}\nA:"
    return Question(prompt, answer, f"{prompt} {answer}")


def _constraints(record: Record, is_chat: bool) -> Question:
    read = prompt_of(CONSTRAINTS, record)
    return Question(read.question, read.answer, "")


def _request(record: Record, label: str) -> Question:
    """`prompt` or `question`, and `label`; a harmless one may have an `answer`."""
    read = prompt_of(SAFETY, record)
    given = json.loads(read.answer)["label"]
    if given != label:
        raise UnusablePromptError(f"{given}_request")
    return Question(read.question, read.answer, "")


def _completed_program(record: Record, is_chat: bool) -> Question:
    """HumanEval's fields: `prompt`, `test` and `entry_point`."""
    prompt, test, entry = (given_text(record, (name,)) for name in ("prompt", "test", "entry_point"))
    return Question(prompt, f"{test}\ncheck({entry})\n", "")


def _program(record: Record, is_chat: bool) -> Question:
    """MBPP's fields: `text`, `test_list` and, for examples, `code`; or a layout of program_tests."""
    tests, solution, module, told = code_parts(record)
    if not tests:
        raise LacksError("it has no tests that can be run, in test_list, tests or a published layout")
    stated = asked_question(record).strip()
    if not stated:
        raise LacksError("it has no question")
    asked = f"{stated}\n{told}\n" if module else f"{stated} Your code should pass these tests:\n\n{tests}\n"
    expected = canonical_json({"tests": tests, "module": module})
    if is_chat:
        return Question(asked, expected, "")
    prompt = f"You are an expert Python programmer, and here is your task: {asked}[BEGIN]\n"
    return Question(prompt, expected, f"{prompt}{solution}\n[DONE]")


def _tools(record: Record, is_chat: bool) -> Question:
    """BFCL's fields: `question`, `function`, `ground_truth`, which is null where no call is right, and `category`."""
    if record.get("ground_truth", "") is None:
        (asked, tools), expected = tool_request(record), "[]"
    else:
        read = prompt_of(TOOLS, record)
        asked, tools, expected = read.question, read.tools, read.answer
    category = record.get("category")
    return Question(asked, expected, "", tools=tools, part=category if isinstance(category, str) else "")


def _patch(record: Record, is_chat: bool) -> Question:
    """SWE-bench's fields: `instance_id`, `problem_statement`, `patch`; with `tree` also `test_patch` and the tests."""
    try:
        task = task_of(record)
    except ValueError as error:
        raise LacksError(str(error)) from error
    return Question(issue_prompt(record, task.tree), record["patch"], "", task=task)


READERS: dict[str, Callable[[Record, bool], Question]] = {
    "choice": _choice,
    "lettered_choice": _lettered_choice,
    "context_choice": _context_choice,
    "last_word": _last_word,
    "text": _text,
    "math": _math,
    "math_with_python": _math_with_python,
    "exact": _exact,
    "constraints": _constraints,
    "completed_program": _completed_program,
    "program": _program,
    "tools": _tools,
    "patch": _patch,
    "refusal": lambda record, is_chat: _request(record, HARMFUL),
    "over_refusal": lambda record, is_chat: _request(record, HARMLESS),
}
"""Functions (record, whether it is asked in a chat) -> question, by kind of benchmark."""
