"""Decontamination drops what was planted in training text, and nothing else."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from configs.files.stored_files import given_file
from configs.schema import DecontaminationRecipe
from tasks.data.decontamination import item_views
from tasks.data.decontamination.decontaminate_documents import decontaminate_documents
from tasks.data.decontamination.item_views import ASKED, CUED, INCIDENTAL, PROGRAM, views
from tasks.data.decontamination.overlap import (
    MIN_WORDS_OF_PROBLEM,
    MIN_WORDS_OF_TEXT,
    ProtectedTexts,
    Protection,
    build_index,
)
from tasks.data.decontamination.protected_items import _problems, index_items
from tasks.data.privacy.mask_personal_data import MaskedDocuments
from tasks.data.problems.safety_requests import training_requests
from tasks.data.problems.synthesize_problems import SAFETY_SOURCE, synthesize_problems
from tasks.data.prompts.collect_prompts import collect_prompts
from tasks.data.records.documents import JSON_RECORD, PREPARED_COLUMNS, arrow_schema, document_id
from tasks.data.seeds.verify_solutions import verify_solutions
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import RECIPE, RESOURCES, compute, prose, rows, write_jsonl

SIZE = 13
MANY = 1 << 30


def index_of(items: list[str] = (), problems: list[str] = (), max_items: int = MANY):
    texts = ProtectedTexts(list(items), list(range(len(items))), Protection(MIN_WORDS_OF_TEXT, SIZE, False))
    stated = ProtectedTexts(list(problems), list(range(len(problems))), Protection(MIN_WORDS_OF_PROBLEM, MANY, True))
    return build_index([texts, stated], max_items)


def hits(texts: list[str], items: list[str] = (), problems: list[str] = ()) -> list[int]:
    """The item that each text overlaps with, or -1."""
    return index_of(items, problems).first_hits(texts).tolist()


def words(count: int, seed: int = 1) -> list[str]:
    return prose(seed, count).replace(".", "").lower().split()


@pytest.mark.parametrize(
    "text",
    ["\n" * 200_000, " " * 200_000 + "x", " \n" * 100_000 + "x", "A " * 100_000 + "x", "A:" + " " * 200_000 + "x"],
)
def test_the_cues_of_an_item_are_looked_for_in_one_pass(text):
    began = time.process_time()
    assert item_views.PROGRAM_TEXT.search(text) is None and item_views.CUES.sub("", text) == text
    assert time.process_time() - began < 5


def test_one_shared_run_of_n_words_is_found_and_n_minus_one_are_not():
    item = words(40)
    around = words(20, seed=2)
    for length, expected in ((SIZE, 0), (SIZE - 1, -1)):
        text = " ".join([*around, *item[10 : 10 + length], *around])
        assert hits([text], [" ".join(item)]) == [expected]


def test_digits_of_another_script_are_the_same_digits():
    item = "Ali sells 37 baskets of plums at 14 coins each and buys 12 identical lamps"
    for digits in ("٠١٢٣٤٥٦٧٨٩", "۰۱۲۳۴۵۶۷۸۹", "०१२३४५६७८९", "๐๑๒๓๔๕๖๗๘๙"):
        assert hits([item.translate(str.maketrans("0123456789", digits))], [item]) == [0]


def test_runs_agree_with_a_search_word_by_word():
    items = [" ".join(words(30, seed)) for seed in range(8)] + [" ".join(words(10, seed)) for seed in range(20, 24)]
    pool = [
        items[seed].split()[start : start + size]
        for seed in range(12)
        for start in (0, 5)
        for size in (7, 9, 10, 12, 13, 16)
    ]
    generator = random.Random(46)
    texts = [
        " ".join([*generator.choice(pool), *words(3, 90 + n), *generator.choice(pool), *words(3, 91 + n)])
        for n in range(80)
    ]

    def holds(text: str, item: str) -> bool:
        runs = item.split()
        wanted = [runs] if len(runs) < SIZE else [runs[start : start + SIZE] for start in range(len(runs) - SIZE + 1)]
        return any(f" {' '.join(run)} " in f" {text} " for run in wanted)

    expected = [next((number for number, item in enumerate(items) if holds(text, item)), -1) for text in texts]
    assert hits(texts, items) == expected and len(set(expected)) > 5


def test_the_shared_words_are_shown_as_the_document_writes_them():
    item = words(20)
    text = "Before. " + ", ".join(word.title() for word in item[2:15]) + " behind"
    shown = index_of([" ".join(item)]).hits(["nothing", text])
    assert shown.texts.tolist() == [1] and shown.shared == [", ".join(word.title() for word in item[2:15])]


def test_case_punctuation_and_line_breaks_do_not_hide_an_item():
    item = words(20)
    assert hits([" -- ".join(word.upper() for word in item).replace("KA", "KA\n")], [" ".join(item)]) in ([0], [-1])
    assert hits(["\n".join(f"“{word.title()}”," for word in item)], [" ".join(item)]) == [0]


def test_mathematics_is_found_however_it_is_set():
    item = (
        r"What is the value of $\frac{3}{4} + \left( 1,250 \cdot x \right)$ if $x$ is the number of balls in "
        r"\textbf{each} box?"
    )
    plain = "what is the value of 3/4 + (1250 x) if x is the number of balls in each box"
    other = "what is the value of 3/5 + (1250 x) if x is the number of bolls in each box"
    assert hits([plain, other, item], [item]) == [0, -1, 0] and hits([item], [plain]) == [0]


QUIZ = "Which rose grows fast?\n(A) the red one\n(B) the seven white ones\n(C) none"


@pytest.mark.parametrize(
    "text",
    [
        "Which rose grows fast?\n1. the red one\n2. the seven white ones\n3. none",
        "Which rose grows fast? a) the red one b) the seven white ones c) none",
        "which rose grows fast A the red one B the 7 white ones C none",
        json.dumps({"q": QUIZ, "a": "C"}),
        json.dumps({"q": QUIZ.replace(" ", "\u2009")}),
    ],
)
def test_letters_numbers_and_escapes_do_not_hide_choices(text):
    assert hits([text, text.replace("white", "black")], [QUIZ]) == [0, -1]


def test_a_number_that_ends_a_sentence_marks_no_choice():
    item = " ".join(words(6)) + " they had 5. Then they left the house"
    assert hits([item, item.replace("5.", "8."), item.replace("5", "five")], [item]) == [0, -1, 0]


@pytest.mark.parametrize(("count", "expected"), [(MIN_WORDS_OF_TEXT, 0), (MIN_WORDS_OF_TEXT - 1, -1)])
def test_a_short_item_is_found_as_a_whole_if_it_is_no_everyday_phrase(count, expected):
    item = words(count)
    text = " ".join([*words(10, seed=2), *item, *words(10, seed=3)])
    assert hits([text], [" ".join(item)]) == [expected]
    assert hits([text.replace(item[-1], "other")], [" ".join(item)]) == [-1]


def test_scripts_without_spaces_need_runs_of_phrases_not_of_characters():
    item = "小明有三十六个苹果，他把其中的四分之一给了妹妹，又买了十五个，然后把剩下的苹果平均放进九个篮子里。"
    assert hits([f"问题：{item}答案是", item[:30] + "别的", "他把其中的四分之一给了妹妹"], [item]) == [0, -1, -1]


def test_an_evaluated_equation_is_found_and_its_neighbours_are_not():
    problem = ["12 + 7 = 19", "3 - 7 = -4"]
    assert hits(["so 12 + 7 = 19\nand more", "3 - 7 = -4\n"], problems=problem) == [0, 1]
    harmless = [
        "7 + 12 = 19\n",
        "12 - 7 = 5\n",
        "5 + 7 = 12\n7 + 19 = 26\n",
        "112 + 7 = 119\n",
        "12 + 7 = 190\n",
        "3 - 7 = 4",
    ]
    assert hits(harmless, problems=problem) == [-1] * len(harmless)


def test_rows_that_repeat_themselves_and_tables_of_numbers_protect_nothing():
    numbers = " ".join(map(str, range(40)))
    texts = ["0 " * 50, "- - " * 20, "=" * 80, f"table {numbers}"]
    assert hits(texts, ["0 " * 30, "= " * 30, "=" * 80, f"assert {numbers}"]) == [-1, -1, -1, -1]
    assert (
        hits(
            ["(a) A (b) B (c) C (d) D (e) E", "9 8 7 6 5 4 3 2", "yes no " * 6],
            ["A B C D E F G H", "9 8 7 6 5 4 3 2", "yes no " * 4],
        )
        == [-1] * 3
    )


def test_what_many_items_share_tells_nothing():
    shared = " ".join(words(20))
    items = [f"{shared} {' '.join(words(20, 50 + number))}" for number in range(4)]
    assert index_of(items, max_items=4).first_hits([shared]).tolist() == [0]
    assert index_of(items, max_items=3).first_hits([shared, items[2]]).tolist() == [-1, 2]


def test_the_smallest_item_is_named_whatever_the_batch():
    items = [" ".join(words(40, seed)) for seed in range(20)]
    texts = [f"{prose(100 + seed)} {items[seed]} {items[(seed + 7) % 20]}" for seed in range(20)] + [prose(500)]
    expected = [*(min(seed, (seed + 7) % 20) for seed in range(20)), -1]
    order = list(range(21))
    random.Random(1).shuffle(order)
    assert hits(texts, items) == expected
    assert hits([texts[index] for index in order], items) == [expected[index] for index in order]
    assert [hits([text], items)[0] for text in texts] == expected


def test_without_evaluation_items_nothing_is_found():
    assert hits(["some text", ""]) == [-1, -1]


def test_a_record_is_protected_as_it_would_be_quoted():
    choice = {"question": "What is red?", "choices": ["the rose of my garden", "grass"], "answer": 0}
    kind, protected = views(json.dumps(choice), JSON_RECORD)
    texts = {text for text, role in protected if role == ASKED}
    assert kind == "choice_question" and "What is red?\nthe rose of my garden\ngrass" in texts
    assert {
        ("What is red?\nA. the rose of my garden\nB. grass", CUED),
        ("What is red?\nthe rose of my garden", CUED),
    } <= set(protected)
    patch = (
        "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,3 @@\n import os\n-old = 1\n+new = 2\n+more "
        "= 3\n unchanged = 4\n"
    )
    kind, protected = views(json.dumps({"problem_statement": "It breaks", "patch": patch}), JSON_RECORD)
    assert kind == "code_task" and set(protected) == {("It breaks", PROGRAM), ("new = 2\nmore = 3\n", PROGRAM)}
    assert views("A plain text.", "") == ("evaluation_text", [("A plain text.", ASKED)])
    asked = json.dumps({"description": "How many of the doors are red?", "note": "They are red."})
    assert {("How many of the doors are red?", ASKED), ("They are red.", INCIDENTAL)} <= set(
        views(asked, JSON_RECORD)[1]
    )
    assert ("quoted", INCIDENTAL) in views(json.dumps({"question": "Q?", "files": {"a.txt": "quoted"}}), JSON_RECORD)[1]


CHOICE = {
    "question": "Which planet that we know has rings?",
    "choices": ["the planet Saturn", "the Moon", "Mercury"],
    "answer": "A",
}
TASK = {
    "task_id": "T/1",
    "entry_point": "sum_of_odd_squares",
    "prompt": "def sum_of_odd_squares(values: list) -> int:\n"
    '    """Add the squares of the odd values, and take those that are negative as zero."""\n',
    "canonical_solution": "    return sum(v * v for v in values if v % 2 and v > 0)\n",
    "test": "assert sum_of_odd_squares([1, 2, 3]) == 10\nassert sum_of_odd_squares([5, -1, 4, 7]) == 74\n",
}
MATHS = {
    "problem": r"A train of length $\frac{1}{2}$ km passes a tunnel of 1,500 m at 60 km per hour; how long does it "
    r"take?",
    "answer": "2",
}
PLAIN = {"text": prose(77, 40)}
PHRASE = " ".join(words(16, seed=78))
QUOTING = {"text": f"{PHRASE}. {prose(79, 40)}"}
LICENCE = (
    "# Licensed under the Apache License, Version 2.0 (the 'License'); you may not use this file except in compliance "
    "with the License.\n"
    "import os\nimport sys\nimport json\nfrom collections import defaultdict\nfrom typing import Any, Dict, List, "
    "Optional, Tuple\n"
)
CHANGE = {
    "problem_statement": "Wrong result",
    "instance_id": "x-1",
    "patch": f"--- a/m.py\n+++ b/m.py\n@@ -1,9 +1,10 @@\n {LICENCE.replace(chr(10), chr(10) + ' ')}\n"
    "+def mended(value):\n+    return value + 1\n",
}
CONTACT = {"question": "Ask jane.doe@posteo.de or 0151 for the red keys, she is in", "answer": "no"}
RECORDS = (CHOICE, TASK, MATHS, PLAIN, QUOTING, CHANGE, CONTACT)
PLANTED = {
    "masked": f"{prose(13)} Ask <EMAIL> or 0151 for the red keys, she is in {prose(14)}",
    "reordered": f"{prose(15)}\nWhich planet that we know has rings?\n1) Mercury\n2) the planet Saturn\n3) the Moon\n",
    "answered": f"{prose(16)}\nWhich planet that we know has rings? The answer is the planet Saturn.",
    "as_json": json.dumps({"text": MATHS["problem"].replace(" of ", "\nof ")}),
    "choice": f"{prose(1)} Quiz. Which planet that we know has rings? (A) the planet Saturn (B) the Moon (C) Mercury "
    f"{prose(2)}",
    "choice_pair": f"{prose(3)} Q: Which planet that we know has rings? A: the planet Saturn. {prose(4)}",
    "code": f"# a copy\n{TASK['prompt']}    total = 0\n    return total\n",
    "tests": f"{prose(5)}\nassert sum_of_odd_squares( [1,2,3] )==10\nassert sum_of_odd_squares([5,-1,4,7])==74\n",
    "maths": f"{prose(6)} A train of length 1/2 km passes a tunnel of 1500 m at 60 km per hour; how long does it "
    f"take? {prose(7)}",
    "plain": f"{prose(8)} {' '.join(prose(77, 40).split()[5:25])} {prose(9)}",
}
HONEST = {
    "licence": f"{LICENCE}\ndef other(value):\n    return [number for number in value if number > 0]\n",
    "tests": "assert other([1, 2]) == 3\nassert other([4]) == 4\n",
    "near": f"{prose(10)} Which planet has a moon? The planet Mars has two. {prose(11)}",
    **{f"phrase {number}": f"{PHRASE}. {prose(200 + number)}" for number in range(4)},
}
SEARCHES = [
    {"question": "Where is it?", "answer": "here", "passages": [prose(21), PLANTED["maths"]]},
    {"question": "Where was it?", "answer": "there", "passages": [prose(22), prose(23)]},
]
"""Prompts whose passages a policy may read; one of them is evaluated."""
WANTED = {
    "choice": (CHOICE, "choice_question"),
    "choice_pair": (CHOICE, "choice_question"),
    "code": (TASK, "code_task"),
    "tests": (TASK, "code_task"),
    "maths": (MATHS, "maths_problem"),
    "plain": (PLAIN, "evaluation_text"),
    "masked": (CONTACT, "evaluation_text"),
    "reordered": (CHOICE, "choice_question"),
    "answered": (CHOICE, "choice_question"),
    "as_json": (MATHS, "maths_problem"),
}


@pytest.fixture(scope="module")
def decontaminated(tmp_path_factory):
    root, data = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("data")
    families = {"families": {"systems": 30}, "prompt_families": ("systems",), "difficulty": 2}
    problems = compute(synthesize_problems, root, recipe=RECIPE.synthesize.model_copy(update=families))
    for number, record in enumerate(RECORDS):
        write_jsonl(data / "bench" / f"{number}.jsonl", [{"note": "first"}, record])
    write_jsonl(
        data / "bench" / "prompt.jsonl",
        [{"text": max((row["prompt"] for row in rows(problems, "prompts.parquet")), key=len)}],
    )
    write_jsonl(data / "train.jsonl", [{"text": "unused"}])
    write_jsonl(data / "search.jsonl", SEARCHES)
    (data / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: 'bench/**', role: evaluation}\n  - {files: train.jsonl, role: pretrain}\n"
        "  - {files: search.jsonl, role: prompts, kind: search}\n"
    )
    ingested = compute(ingest_documents, root, sources=list_sources(data), recipe=RECIPE.ingest, resources=RESOURCES)
    recipe = DecontaminationRecipe(ngram_size=SIZE, code_ngram_size=20, max_items_per_run=20, max_documents_per_run=3)
    texts = {f"planted/{name}": text for name, text in PLANTED.items()} | {
        f"honest/{name}": text for name, text in HONEST.items()
    }
    documents = prepared(root, texts)
    sources = {"sources": list_sources(data)}
    solutions = compute(verify_solutions, root, **sources)
    prompts = compute(collect_prompts, root, **sources, synthetic=problems, solutions=solutions, recipe=RECIPE.prompts)
    given = {"documents": documents, "synthetic": problems, "prompts": prompts, "ingested": ingested}
    return compute(decontaminate_documents, root, **given, recipe=recipe, resources=RESOURCES), problems


def prepared(root, texts: dict[str, str]):
    """Documents as masking leaves them, in a folder that looks like an artifact."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(PREPARED_COLUMNS)
    blank = {field.name: "" if pa.types.is_string(field.type) else 0 for field in schema}
    table = [
        {
            **blank,
            "id": document_id(name, 0, 0),
            "source": name,
            "text": text,
            "num_bytes": len(text),
            "split": "train",
            "domain": "web",
        }
        for name, text in texts.items()
    ]
    path = root / "given.parquet"
    pq.write_table(pa.Table.from_pylist(table, schema=schema).sort_by("id"), path)

    class Given:
        record = MaskedDocuments.model_construct(num_documents=len(texts), num_bytes=sum(map(len, texts.values())))
        digest = "0" * 64

        def files(self, pattern: str):
            return [given_file(path)]

    return Given()


def test_a_planted_item_of_each_kind_is_dropped_and_named_by_file_and_record(decontaminated):
    made, _ = decontaminated
    dropped = {row["id"]: row for row in rows(made, "dropped.parquet")}
    evidence = {row["id"]: row for row in rows(made, "contaminated.parquet")}
    for name, (record, kind) in WANTED.items():
        row = dropped[document_id(f"planted/{name}", 0, 0)]
        source = f"bench/{RECORDS.index(record)}.jsonl"
        offset = len('{"note": "first"}\n')
        assert (row["reason"], row["item"]) == (f"overlaps_{kind}", f"{source} at {offset}"), name
        assert row["kept_id"] == document_id(source, offset, 0)
        shown = evidence[row["id"]]
        assert (shown["item_source"], shown["item_offset"], shown["item_kind"], shown["item_id"]) == (
            source,
            offset,
            kind,
            row["kept_id"],
        )
        assert re.findall(r"\w+", shown["shared"].lower())[0] in PLANTED[name].lower() and shown["num_runs"] >= 1
    assert set(dropped) == {document_id(f"planted/{name}", 0, 0) for name in PLANTED}


def test_a_prompt_of_reinforcement_learning_that_is_evaluated_is_dropped_and_named(decontaminated):
    made, problems = decontaminated
    given = rows(problems, "prompts.parquet")
    evaluated = max(given, key=lambda row: len(row["prompt"]))
    dropped = {row["id"]: row["item"] for row in rows(made, "dropped_prompts.parquet")}
    searches = [document_id("search.jsonl", offset, 0) for offset in (0, len(json.dumps(SEARCHES[0])) + 1)]
    offset = len('{"note": "first"}\n')
    maths = f"bench/{RECORDS.index(MATHS)}.jsonl at {offset}"
    assert dropped == {evaluated["id"]: "bench/prompt.jsonl at 0", searches[0]: maths}
    left = {row["id"]: (row["prompt"], row["answer"]) for row in rows(made, "prompts.parquet")}
    assert left.pop(searches[1])[0] == SEARCHES[1]["question"]
    assert left == {row["id"]: (row["prompt"], row["answer"]) for row in given if row != evaluated}
    assert (made.record.num_prompts, made.record.num_dropped_prompts) == (len(given), 2)


def test_a_held_out_request_is_protected_as_a_whole_and_no_training_request_overlaps(decontaminated):
    _, problems = decontaminated
    asked = [row["prompt"] for row in rows(problems, "safety.parquet")]
    items, overlaps = index_items((), _problems(problems), RECIPE.decontaminate)
    hits = overlaps.first_hits([*asked, *(request.text for request in training_requests(400))])
    assert {items.sources[number] for number in hits[: len(asked)]} == {SAFETY_SOURCE}
    assert (hits[len(asked) :] < 0).all()


def test_licences_imports_context_lines_and_common_phrases_drop_nothing(decontaminated):
    made, problems = decontaminated
    kept = [row["source"] for row in rows(made, "documents/*.parquet")]
    assert {f"honest/{name}" for name in HONEST} <= set(kept)
    assert made.record.num_common_runs == len(rows(made, "common_runs.parquet")) > 0
    assert problems.record.num_documents == sum(source.startswith("synthetic/") for source in kept)
    assert (
        made.record.num_documents + sum(made.record.dropped.values())
        == len(PLANTED) + len(HONEST) + problems.record.num_documents
    )
