"""Rewrites records of benchmarks as their authors publish them to the fields that the kinds read.

LAYOUTS is the table: a record with the fields of a row is rewritten, any other stays as it is. Texts are those of
lm-evaluation-harness, with which tests/evaluation/benchmarks/test_published_layouts.py compares them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.data.prompts.benchmark_records import Record
from tasks.data.readers.csv_lines import LETTERS, MMLU_COLUMNS
from tasks.data.seeds.math_answers import boxed_answers
from tasks.data.seeds.seed_problems import ANSWER_FIELDS, GSM_MARK

WIKIHOW_MARK = re.compile(r"\[.*?\]")
"""Marks of WikiHow in HellaSwag: `[step]`, `[substeps]`."""
UNBRACED_BOX = re.compile(r"\\boxed\s+([^$]+)")
"""`\\boxed 5`, as some solutions of MATH write it."""
CHOICE_KINDS = ("choice", "lettered_choice")
LAST_WORD = "last_word"
PASSAGES = ("article", "passage", "context")
GPQA_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


class LacksError(ValueError):
    """A record without a field that its kind needs."""


@dataclass(frozen=True)
class Layout:
    """Records of a dataset."""

    dataset: str
    kinds: tuple[str, ...]
    fields: tuple[str, ...]
    """Fields that a record of this layout has."""
    asked: Callable[[Record], dict[str, Any]]
    """The record with the fields that the kind reads, without the number of the right choice. Raises LacksError."""
    gold: Callable[[Record, Record], int] | None = None
    """The number, from 0, of the right one of the choices that `asked` gives. Raises LacksError where the answer is not
    published."""
    unless: tuple[str, ...] = ()
    """Fields that only a record in the form of the kind has."""

    def describes(self, record: Record) -> bool:
        """Whether the record has this layout and not the form of the kind."""
        is_written = any(record.get(name) is not None for name in self.unless)
        return not is_written and all(name in record for name in self.fields)

    def rewritten(self, record: Record) -> dict[str, Any]:
        """The record with all fields that the kind reads. Raises LacksError."""
        asked = self.asked(record)
        return asked if self.gold is None else {**asked, "gold": self.gold(record, asked)}


def in_form_of_kind(kind: str, record: Record) -> Record:
    """The record with the fields that the kind reads. Raises LacksError where a field holds something else than its
    layout says, such as the label of a test split whose answers are not published."""
    for layout in LAYOUTS:
        if kind in layout.kinds and layout.describes(record):
            return layout.rewritten(record)
    return record


def given_text(record: Record, names: Sequence[str]) -> str:
    """The first of the fields that holds a text. Raises LacksError where none does."""
    value = next((record[name] for name in names if isinstance(record.get(name), str) and record[name].strip()), None)
    if value is None:
        raise LacksError(f"it has no text in {' or '.join(names)}")
    return value


def _numbered(name: str, first: int, choices: str = "choices") -> Callable[[Record, Record], int]:
    """For layouts with a field that numbers the right choice, counted from `first`."""

    def gold(record: Record, asked: Record) -> int:
        given, of = record[name], asked[choices]
        number = int(given) if isinstance(given, str) and given.isdecimal() else given
        if not isinstance(number, int) or isinstance(number, bool) or not first <= number < first + len(of):
            raise LacksError(f"{name} {given!r} does not number one of its {len(of)} choices from {first}")
        return number - first

    return gold


def _hellaswag(record: Record) -> dict[str, Any]:
    endings = record["endings"]
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise LacksError("it has no list of texts in endings")
    context = given_text(record, ("ctx",))
    topic, start, rest = (record.get(name) for name in ("activity_label", "ctx_a", "ctx_b"))
    if isinstance(start, str) and isinstance(rest, str):
        context = f"{start} {rest.capitalize()}"
    if isinstance(topic, str):
        context = f"{topic}: {context}"
    return {"query": _without_marks(context), "choices": [_without_marks(ending) for ending in endings]}


def _without_marks(text: str) -> str:
    return WIKIHOW_MARK.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _keyed(question: str) -> Callable[[Record], dict[str, Any]]:
    """ARC and datasets in its layout, which differ in the name of the question."""

    def asked(record: Record) -> dict[str, Any]:
        given = record["choices"]
        texts, labels = (given.get("text"), given.get("label")) if isinstance(given, dict) else (None, None)
        if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
            raise LacksError("choices has no lists text and label of the same length")
        return {"question": given_text(record, (question,)), "choices": texts}

    return asked


def _key(record: Record, _: Record) -> int:
    key, labels = record["answerKey"], record["choices"]["label"]
    if key not in labels:
        raise LacksError(f"answerKey {key!r} is none of the labels {', '.join(map(str, labels))}")
    return labels.index(key)


def _piqa(record: Record) -> dict[str, Any]:
    solutions = [given_text(record, (name,)) for name in ("sol1", "sol2")]
    return {"question": given_text(record, ("goal",)), "choices": solutions}


def _mmlu_pro(record: Record) -> dict[str, Any]:
    options = record["options"]
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise LacksError("it has no list of texts in options")
    return {"question": given_text(record, ("question",)), "choices": options}


def _gpqa(record: Record) -> dict[str, Any]:
    question = given_text(record, ("Question",)).strip()
    choices = [given_text(record, (name,)).strip() for name in GPQA_CHOICES]
    return {"question": question, "choices": _by_hash(question, choices)}


def _by_hash(question: str, choices: list[str]) -> list[str]:
    """Choices of which the file has the right one first, in an order by hash."""
    if len({*choices}) < len(choices):
        raise LacksError("two of its answers are the same")
    return sorted(choices, key=lambda choice: hashlib.sha256(f"{question}\n{choice}".encode()).digest())


def _gpqa_right(record: Record, asked: Record) -> int:
    return asked["choices"].index(record[GPQA_CHOICES[0]].strip())


def _lettered(question: str) -> Callable[[Record], dict[str, Any]]:
    """Exams with a column for each choice."""

    def asked(record: Record) -> dict[str, Any]:
        choices = [given_text(record, (letter,)).strip() for letter in LETTERS]
        subject = {"subject": record["subject"]} if "subject" in record else {}
        return {**subject, "question": given_text(record, (question,)), "choices": choices}

    return asked


def _letter(answer: str) -> Callable[[Record, Record], int]:
    def gold(record: Record, _: Record) -> int:
        given = record[answer]
        if given not in LETTERS:
            raise LacksError(f"{answer} {given!r} is none of {', '.join(LETTERS)}")
        return LETTERS.index(given)

    return gold


def _truthfulqa(record: Record) -> dict[str, Any]:
    targets = record["mc1_targets"]
    choices, labels = (targets.get("choices"), targets.get("labels")) if isinstance(targets, dict) else (None, None)
    if not isinstance(choices, list) or not isinstance(labels, list) or len(choices) != len(labels):
        raise LacksError("mc1_targets has no lists choices and labels of the same length")
    if not all(isinstance(choice, str) for choice in choices):
        raise LacksError("mc1_targets has no list of texts in choices")
    question = given_text(record, ("question",))
    return {"question": question, "choices": _by_hash(question, choices)}


def _only_label(record: Record, asked: Record) -> int:
    choices, labels = record["mc1_targets"]["choices"], record["mc1_targets"]["labels"]
    if labels.count(1) != 1:
        raise LacksError(f"mc1_targets marks {labels.count(1)} of its choices as right, not one")
    return asked["choices"].index(choices[labels.index(1)])


def _boolq(record: Record) -> dict[str, Any]:
    if not isinstance(record["answer"], bool):
        raise LacksError(f"answer {record['answer']!r} is neither true nor false")
    passage, question = (given_text(record, (name,)) for name in ("passage", "question"))
    query = f"{passage}\nQuestion: {question}?\nAnswer:"
    return {"query": query, "choices": ["no", "yes"]}


def _truth(record: Record, _: Record) -> int:
    return int(record["answer"])


def _winogrande(record: Record) -> dict[str, Any]:
    options = [given_text(record, (name,)) for name in ("option1", "option2")]
    before, blank, after = given_text(record, ("sentence",)).partition("_")
    if not blank:
        raise LacksError("sentence has no _ for the option")
    return {"context_options": [before + option for option in options], "continuation": after.strip()}


def _lambada(record: Record) -> dict[str, Any]:
    context, _, word = given_text(record, ("text",)).rstrip().rpartition(" ")
    if not context.strip():
        raise LacksError("text has no words before the last one")
    return {"context": context, "continuation": word}


def _math(record: Record) -> dict[str, Any]:
    """In GSM8K's form, so that examples show the solution."""
    solution = given_text(record, ("solution",))
    boxes = boxed_answers(solution.replace("\\fbox{", "\\boxed{")) or UNBRACED_BOX.findall(solution)
    if not boxes or not boxes[-1].strip():
        raise LacksError("solution has no answer in \\boxed{}")
    return {"question": given_text(record, ("problem",)), "answer": f"{solution}\n{GSM_MARK} {boxes[-1].strip()}"}


def _capitalised(record: Record) -> dict[str, Any]:
    return {"problem": record["Problem"], "answer": record["Answer"]}


RIGHT = ("gold", "answer")
LAYOUTS = (
    Layout(
        "HellaSwag", CHOICE_KINDS, ("ctx", "endings", "label"), _hellaswag, _numbered("label", 0), unless=("choices",)
    ),
    Layout(
        "ARC, CommonsenseQA", CHOICE_KINDS, ("question", "choices", "answerKey"), _keyed("question"), _key, unless=RIGHT
    ),
    Layout(
        "OpenBookQA",
        CHOICE_KINDS,
        ("question_stem", "choices", "answerKey"),
        _keyed("question_stem"),
        _key,
        unless=RIGHT,
    ),
    Layout("PIQA", CHOICE_KINDS, ("goal", "sol1", "sol2", "label"), _piqa, _numbered("label", 0), unless=("choices",)),
    Layout(
        "MMLU-Pro",
        CHOICE_KINDS,
        ("question", "options", "answer_index"),
        _mmlu_pro,
        _numbered("answer_index", 0),
        unless=("choices",),
    ),
    Layout("GPQA", CHOICE_KINDS, ("Question", *GPQA_CHOICES), _gpqa, _gpqa_right, unless=("question",)),
    Layout(
        "C-Eval, MMLU's .csv", CHOICE_KINDS, MMLU_COLUMNS, _lettered("question"), _letter("answer"), unless=("choices",)
    ),
    Layout("CMMLU", CHOICE_KINDS, ("Question", *LETTERS, "Answer"), _lettered("Question"), _letter("Answer")),
    Layout("TruthfulQA", CHOICE_KINDS, ("question", "mc1_targets"), _truthfulqa, _only_label, unless=("choices",)),
    Layout("BoolQ", ("choice",), ("passage", "question", "answer"), _boolq, _truth, unless=("choices",)),
    Layout(
        "WinoGrande",
        ("context_choice",),
        ("sentence", "option1", "option2", "answer"),
        _winogrande,
        _numbered("answer", 1, "context_options"),
    ),
    Layout("LAMBADA", (LAST_WORD,), ("text",), _lambada, unless=("context",)),
    Layout("MATH", ("math",), ("problem", "solution"), _math, unless=ANSWER_FIELDS),
    Layout("AIME", ("math",), ("Problem", "Answer"), _capitalised, unless=("problem", "question")),
)


def passage_of(record: Record) -> str:
    """The text that a question is about, as RACE's `article`; empty where the record has none."""
    return next((text.strip() for name in PASSAGES if isinstance(text := record.get(name), str)), "")
