"""The texts in which an evaluation record would appear elsewhere: none of them may be trained on. Pure, per record.

A multiple-choice question appears followed by its choices, lettered or not (overlap.py treats all letters as one), or
with one of them. A code task appears as its prompt, its tests or its solution. A change appears as its message and
the lines that it adds (those around them are honest source code). A record of a published layout also appears as the
question that its benchmark asks (published_layouts.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from string import ascii_uppercase
from typing import Any

from tasks.data.prompts.published_layouts import LAST_WORD, LAYOUTS, LacksError
from tasks.data.records.documents import JSON_RECORD
from tasks.data.seeds.program_tests import FIELDS, SOLUTIONS, published_solutions, published_tests
from tasks.data.seeds.seed_problems import GSM_MARK, parted_question

TEXT, CHOICE, CODE, MATHS = "evaluation_text", "choice_question", "code_task", "maths_problem"
QUESTION_FIELDS = (
    *("question", "query", "problem", "problem_description", "context", "input", "prompt", "quiz", "instruction"),
    *("description", "question_content"),
)
CHOICE_FIELDS = ("choices", "options", "context_options", "endings")
ANSWER_FIELDS = ("text", "answer", "target", "continuation", "turns", "reference")
SOLUTION_FIELDS = ("canonical_solution", "code", "solution", "patch", "test_patch")
CODE_FIELDS = ("test", "tests", "test_list", "test_patch", "patch", "canonical_solution", "entry_point")
TOPIC = "activity_label"
"""Field of HellaSwag that its question begins with: a page may quote the item without it."""
ANSWER_CUES = ("", "A: ", "Answer: ", "The answer is ")
LONG_QUESTION_WORDS = 16
"""Words of a question that is recognised without its answer or choices."""
PROGRAM_TEXT = re.compile(
    r"```|^[^\S\n]*(?:Traceback \(most|def \w+\(|class \w+[(:]|import \w+|from \w+ import)", re.MULTILINE
)
PATCH = re.compile(r"^(?:diff --git|--- |@@ )", re.MULTILINE)
ADDED_LINES = re.compile(r"(?:^\+(?!\+\+).*\n?)+", re.MULTILINE)
CUES = re.compile(r"^\s*(?:Question|Q)\s*:\s*|(?<!\s)\s*(?:Answer|A)\s*:\s*$")

ASKED, CUED, INCIDENTAL, PROGRAM = "asked", "cued", "incidental", "program"
"""Role of a text in its record. ASKED: a question or an answer, however short. CUED: both joined in one of several
ways. INCIDENTAL: another text (a file's content, an argument), which may hold everyday phrases. PROGRAM: program text,
whose short runs occur in honest programs."""
View = tuple[str, str]
"""(text, role)"""


def views(text: str, markup: str) -> tuple[str, list[View]]:
    """(kind of item, its texts) of an evaluation record as ingestion left it."""
    if markup != JSON_RECORD:
        return TEXT, [(text, ASKED)]
    record = json.loads(text)
    program = published_tests(record)
    if program is not None and program.tests:
        return CODE, _distinct(_program_texts(record))
    kind = _kind(record)
    forms, fields = ([], set()) if kind == CODE else _published_forms(record)
    asked = fields.union(QUESTION_FIELDS, CHOICE_FIELDS, ANSWER_FIELDS)
    texts = [*_leaves(record, kind, asked), *_asked_with_choices(record)]
    for form in forms:
        texts += [*_leaves(form, _kind(form), asked), *_asked_with_choices(form)]
    kind = _kind(forms[0]) if kind == TEXT and forms else kind
    return kind, _distinct(texts)


def _distinct(texts: Iterable[View]) -> list[View]:
    return [view for view in dict.fromkeys(texts) if view[0].strip()]


def _program_texts(record: Mapping[str, Any]) -> Iterator[View]:
    """Without inputs and outputs: they are lists of numbers, which honest pages have too."""
    others = {name: value for name, value in record.items() if name not in (*FIELDS, SOLUTIONS)}
    yield from _leaves(others, CODE, {*QUESTION_FIELDS})
    yield from ((program, PROGRAM) for program in published_solutions(record))


def _published_forms(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], set[str]]:
    """(the record as the benchmarks of its layouts ask it, the fields that these layouts have)"""
    forms: list[dict[str, Any]] = []
    fields: set[str] = set()
    if question := parted_question(record):
        forms.append({"question": question, "answer": record.get("Answer", record.get("answer"))})
    for layout in LAYOUTS:
        # A record of LAMBADA is a text, which is protected as it is.
        if LAST_WORD in layout.kinds or not layout.describes(record):
            continue
        try:
            forms += [layout.asked(record), layout.asked({key: record[key] for key in record if key != TOPIC})]
        except LacksError:
            continue  # a field holds something else: the record only has fields of the same names
        fields.update(layout.fields)
    for form in forms:
        if isinstance(form.get("answer"), str):
            form["answer"] = form["answer"].partition(f"\n{GSM_MARK} ")[0]
    return forms, fields


def _kind(record: Mapping[str, Any]) -> str:
    if any(record.get(name) for name in CODE_FIELDS):
        return CODE
    if any(_choices(record, name) for name in CHOICE_FIELDS):
        return CHOICE
    answer = str(record.get("answer", record.get("Answer", "")))
    asked = record.get("problem", _question(record))
    return MATHS if asked and re.search(r"\d|\\", answer) else TEXT


def _leaves(record: Mapping[str, Any], kind: str, asked: Set[str]) -> Iterator[View]:
    """Every string by itself, and lists of strings also as one text: short tests are quoted one after the other.
    `asked` names the fields that hold questions and answers."""
    is_change = kind == CODE and "patch" in record
    for name, value in record.items():
        if kind == CODE and name in SOLUTION_FIELDS and isinstance(value, str):
            added = ADDED_LINES.findall(value) if PATCH.search(value) else [value]
            yield from ((re.sub(r"^\+", "", lines, flags=re.MULTILINE), PROGRAM) for lines in added)
        else:
            role = ASKED if name in asked else INCIDENTAL
            for text in _strings(value):
                is_program = is_change or (kind != CODE and PROGRAM_TEXT.search(text))
                yield CUES.sub("", text), PROGRAM if is_program else role


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        yield from value
        yield "\n".join(value)
    elif isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _strings(child)


def _asked_with_choices(record: Mapping[str, Any]) -> Iterator[View]:
    question = CUES.sub("", _question(record))
    is_short = bool(question) and len(question.split()) < LONG_QUESTION_WORDS
    continuation = record.get("continuation")
    if isinstance(continuation, str) and question:
        yield f"{question} {continuation}", ASKED
    answer = record.get("answer")
    if isinstance(answer, str) and is_short:
        yield from ((f"{question}\n{cue}{answer}", CUED) for cue in ANSWER_CUES)
    for name in CHOICE_FIELDS:
        choices = _choices(record, name)
        if not choices:
            continue
        if isinstance(continuation, str):
            yield from ((f"{choice} {continuation}", ASKED) for choice in choices)
        if is_short:
            yield from ((f"{question}\n{cue}{choice}", CUED) for choice in choices for cue in ANSWER_CUES)
        if question:
            yield "\n".join([question, *choices]), ASKED
            yield (
                "\n".join(
                    [
                        question,
                        *(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)),
                    ]
                ),
                CUED,
            )


def _question(record: Mapping[str, Any]) -> str:
    return next((record[name] for name in QUESTION_FIELDS if isinstance(record.get(name), str)), "")


def _choices(record: Mapping[str, Any], name: str) -> list[str]:
    """The choices in a field, which is a list of strings or {text: [...], label: [...]}; empty for anything else."""
    given = record.get(name)
    given = given.get("text") if isinstance(given, dict) else given
    return given if isinstance(given, list) and all(isinstance(choice, str) for choice in given) else []
