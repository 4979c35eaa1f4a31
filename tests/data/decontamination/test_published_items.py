"""An evaluation record in its benchmark's published layout is protected like one in the fields of the kinds."""

from __future__ import annotations

import json

import pytest

from configs.schema import DecontaminationRecipe
from tasks.data.decontamination.item_views import ASKED, INCIDENTAL, views
from tasks.data.decontamination.protected_items import index_items
from tasks.data.prompts.published_layouts import LAYOUTS
from tasks.data.records.documents import JSON_RECORD
from tests.support.data_inputs import prose

RECIPE = DecontaminationRecipe(ngram_size=13, code_ngram_size=20, max_items_per_run=20, max_documents_per_run=3)
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roofing",
    "ctx_a": "A man sits on a roof.",
    "ctx_b": "he",
    "ctx": "A man sits on a roof. he",
    "endings": ["pulls up [substeps] tiles.", "sings."],
    "label": "0",
}
CHOICES = {"text": ["carbon dioxide", "pure oxygen"], "label": ["1", "2"]}
ARC = {"question": "Which gas do plants take in?", "choices": CHOICES, "answerKey": "1"}
OPENBOOK = {"question_stem": ARC["question"], "choices": CHOICES, "answerKey": "1"}
PIQA = {"goal": "How is a soup cooled?", "sol1": "Stir it slowly.", "sol2": "Boil it again.", "label": 0}
MMLU_PRO = {
    "question": "Which number is a prime?",
    "options": ["four", "six", "seven"],
    "answer": "C",
    "answer_index": 2,
}
GPQA = {
    "Question": "Which gas do plants take in?",
    "Correct Answer": "carbon dioxide",
    "Incorrect Answer 1": "pure oxygen",
    "Incorrect Answer 2": "helium",
    "Incorrect Answer 3": "neon",
}
CEVAL = {"question": GPQA["Question"], "A": "carbon dioxide", "B": "pure oxygen", "C": "helium", "D": "neon"}
CEVAL |= {"answer": "A"}
CMMLU = {
    "Question": "植物从空气里吸收哪种气体？",
    "A": "二氧化碳",
    "B": "氧气",
    "C": "氦气",
    "D": "氖气",
    "Answer": "A",
}
TRUTHFULQA = {
    "question": "Can pigs fly over the moon?",
    "mc1_targets": {"choices": ["They can.", "No pig flies."], "labels": [0, 1]},
}
BOOLQ = {"passage": "The sky over the sea is blue.", "question": "is the sky blue", "answer": True}
WINOGRANDE = {"sentence": "Sarah thanked Maria gladly because _ had helped.", "option1": "Sarah", "option2": "Maria"}
WINOGRANDE["answer"] = "2"
LAMBADA = {"text": "He looked at the moon and missed the sun"}
ALGEBRA = {"problem": "What is $1+1$?", "solution": r"Both ones together are $\boxed{2}$."}
AIME = {"ID": "2024-I-1", "Problem": "Find the least prime number above 90 million.", "Answer": 90000049}
SVAMP = {"Body": "Paco had 26 cookies.", "Question": "How many are left after 17?", "Answer": 9.0}
ASDIV = {"body": "Paco had 26 cookies.", "question": "How many are left after 17?", "answer": "9 (cookies)"}
SUM = "first = int(input())\nsecond = int(input())\nprint(sum(value for value in (first, second) if value > 0))"
APPS = {
    "question": "Read two numbers and print the sum of those that are above zero.",
    "solutions": json.dumps([SUM]),
    "input_output": json.dumps({"inputs": [" ".join(map(str, range(40)))], "outputs": ["780"]}),
}
LIVECODEBENCH = {
    "question_content": APPS["question"],
    "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
}
QUOTATIONS = [
    ("HellaSwag", HELLASWAG, "A man sits on a roof. He pulls up tiles."),
    ("HellaSwag", HELLASWAG, "Roofing: A man sits on a roof. He pulls up tiles."),
    ("HellaSwag", HELLASWAG | {"label": ""}, "A man sits on a roof. He pulls up tiles."),
    ("ARC, CommonsenseQA", ARC, "Which gas do plants take in?\nA. carbon dioxide\nB. pure oxygen"),
    ("OpenBookQA", OPENBOOK, "Which gas do plants take in?\nA. carbon dioxide\nB. pure oxygen"),
    ("OpenBookQA", OPENBOOK, "Which gas do plants take in?\nAnswer: carbon dioxide"),
    ("PIQA", PIQA, "How is a soup cooled?\nStir it slowly.\nBoil it again."),
    ("PIQA", PIQA, "How is a soup cooled?\nAnswer: Stir it slowly."),
    ("PIQA", PIQA | {"label": -1}, "How is a soup cooled? Stir it slowly."),
    ("MMLU-Pro", MMLU_PRO, "Which number is a prime?\nA. four\nB. six\nC. seven"),
    ("GPQA", GPQA, "Which gas do plants take in?\nAnswer: carbon dioxide"),
    ("GPQA", GPQA, "Which gas do plants take in?\nThe answer is pure oxygen"),
    (
        "C-Eval, MMLU's .csv",
        CEVAL,
        "Which gas do plants take in?\nA. carbon dioxide\nB. pure oxygen\nC. helium\nD. neon",
    ),
    ("CMMLU", CMMLU, "植物从空气里吸收哪种气体？\nA. 二氧化碳\nB. 氧气\nC. 氦气\nD. 氖气"),
    ("TruthfulQA", TRUTHFULQA, "Can pigs fly over the moon?\nA: No pig flies."),
    ("BoolQ", BOOLQ, "The sky over the sea is blue.\nQuestion: is the sky blue?"),
    ("WinoGrande", WINOGRANDE, "Sarah thanked Maria gladly because Maria had helped."),
    (
        "WinoGrande",
        WINOGRANDE | {"sentence": f"Today {WINOGRANDE['sentence']}"},
        "Today Sarah thanked Maria gladly because _ had helped.",
    ),
    ("LAMBADA", LAMBADA, LAMBADA["text"]),
    ("MATH", ALGEBRA, "What is $1+1$?\nBoth ones together are $2$."),
    ("AIME", AIME, "Find the least prime number above 90 million."),
    ("SVAMP", SVAMP, "Paco had 26 cookies. How many are left after 17?"),
    ("ASDiv", ASDIV, "Paco had 26 cookies. How many are left after 17?"),
]


@pytest.mark.parametrize(("layout", "record", "quotation"), QUOTATIONS)
def test_a_document_that_quotes_a_published_item_whole_is_found(layout, record, quotation):
    assert first_hits(record, quotation) == [0, -1]


def test_every_published_layout_is_quoted():
    assert {name for name, _, _ in QUOTATIONS} == {layout.dataset for layout in LAYOUTS} | {"SVAMP", "ASDiv"}


def first_hits(record, quotation):
    row = {"id": "x", "source": "s", "offset": 0, "text": json.dumps(record), "markup": JSON_RECORD}
    _, index = index_items([row], (), RECIPE)
    return index.first_hits([f"{prose(1)}\n{quotation}\n{prose(2)}", f"{prose(1)}\n{prose(2)}"]).tolist()


@pytest.mark.parametrize(
    ("record", "quotation"), [(APPS, APPS["question"]), (APPS, SUM), (LIVECODEBENCH, APPS["question"])]
)
def test_a_document_that_quotes_a_published_program_is_found_by_question_and_solution(record, quotation):
    assert first_hits(record, quotation) == [0, -1]


def test_a_record_whose_tests_cannot_be_read_is_protected_as_any_other():
    record = {"description": APPS["question"], "tests": {"first": "Every word of this sentence belongs to one test."}}
    kind, texts = views(json.dumps(record), JSON_RECORD)
    assert kind == "code_task" and (record["tests"]["first"], INCIDENTAL) in texts


def test_a_list_of_numbers_is_no_quotation_of_a_programs_input():
    assert first_hits(APPS, " ".join(map(str, range(40)))) == [-1, -1]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (APPS, "code_task"),
        (LIVECODEBENCH, "code_task"),
        (HELLASWAG, "choice_question"),
        (PIQA, "choice_question"),
        (GPQA, "choice_question"),
        (CEVAL, "choice_question"),
        (CMMLU, "choice_question"),
        (TRUTHFULQA, "choice_question"),
        (WINOGRANDE, "choice_question"),
        (ALGEBRA, "maths_problem"),
        (AIME, "maths_problem"),
        (SVAMP, "maths_problem"),
        (LAMBADA, "evaluation_text"),
    ],
)
def test_a_published_record_is_named_by_its_kind(record, kind):
    assert views(json.dumps(record), JSON_RECORD)[0] == kind


def test_a_record_that_only_has_fields_of_the_same_names_stays_as_it_is():
    record = {"problem": "Sort the list.", "solution": "sorted(values)"}
    assert views(json.dumps(record), JSON_RECORD)[1] == [("Sort the list.", ASKED), ("sorted(values)", INCIDENTAL)]
    record = {"passage": "Mars is red.", "question": "Which planet is red?", "answer": "Mars"}
    kind, protected = views(json.dumps(record), JSON_RECORD)
    assert kind == "evaluation_text" and ("Mars is red.", INCIDENTAL) in protected
    record = ALGEBRA | {"tests": "assert add(1, 1) == 2"}
    assert {text for text, _ in views(json.dumps(record), JSON_RECORD)[1]} == set(record.values())
