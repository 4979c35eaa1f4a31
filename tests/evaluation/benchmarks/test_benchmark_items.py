"""Items of benchmark files: what every kind needs of a record, and how answers are judged."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

from configs.load import load_suite
from configs.schema import FewShot, LikelihoodBenchmark, RetrievalBenchmark
from infra.storage.store import hash_file
from tasks.data.prompts.benchmark_records import read_records
from tasks.data.prompts.function_calls import write_calls
from tasks.data.sources.held_out_splits import subject_of
from tasks.evaluation.benchmarks.benchmark_tasks import is_right
from tasks.evaluation.benchmarks.question_forms import READERS
from tasks.evaluation.benchmarks.retrieval_items import retrieval_items
from tasks.evaluation.benchmarks.run_suite import read_suite_items
from tests.conftest import ROOT
from tests.evaluation.benchmarks.toy_suite import NEEDLE, ROWS, toy_suite, write_suite
from tests.support.data_inputs import SHARED_DATA as DATA
from tests.support.evaluation_fakes import benchmark_files

SUITES = ROOT / "configs" / "suites"
OF_THE_HUB = ("release", "aime", "hellaswag", "livecodebench", "math")
"""Suites that test_published_layouts.py and test_release_suite.py read."""


@pytest.fixture
def suite(tmp_path):
    return write_suite(tmp_path)


def read(suite, limit=None):
    path, data = suite
    return read_suite_items("toy", load_suite(str(path)), str(data), limit)


def change(suite, name, number, **fields):
    """Replace fields of a record; None removes one."""
    rows = [dict(row) for row in ROWS[name]]
    for key, value in fields.items():
        rows[number].pop(key, None)
        rows[number] |= {} if value is None else {key: value}
    (suite[1] / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "number", "fields", "message"),
    [
        ("choice", 1, {"choices": None}, "record 2: it has no query or question, no list of choices"),
        ("choice", 0, {"gold": 7}, "record 1: it has no query or question, no list of choices, or no gold"),
        ("lettered", 3, {"question": None}, "record 4: it has no query or question"),
        ("lettered", 0, {"choices": ["x"] * 27, "gold": 0}, "record 1: it has no list of at most 26 choices"),
        ("contexts", 0, {"context_options": "one"}, "record 1: it has no list of texts in context_options"),
        ("contexts", 1, {"gold": 2}, "record 2: gold does not number one of context_options from 0"),
        ("contexts", 1, {"continuation": None}, "record 2: it has no text in continuation"),
        ("words", 0, {"context": None}, "record 1: it has no text in context"),
        ("texts", 2, {"text": None}, "record 3: it has no text in text or content"),
        ("sums", 0, {"answer": None}, r"record 1: cannot be asked as kind math \(no_answer\)"),
        ("copies", 0, {"target": None}, "record 1: it has no text in target or answer"),
        ("forms", 0, {"kwargs": [{"wrong": 1}]}, r"record 1: cannot be asked .* \(malformed_constraint\)"),
        ("calls", 0, {"function": None}, r"record 1: cannot be asked as kind tools \(no_tools\)"),
        ("calls", 1, {"ground_truth": [7]}, r"record 2: cannot be asked as kind tools \(no_answer\)"),
        ("requests", 1, {"label": "bad"}, r"record 2: cannot be asked as kind refusal \(no_label\)"),
        ("functions", 0, {"entry_point": None}, "record 1: it has no text in entry_point"),
        ("programs", 0, {"test_list": None}, "record 1: it has no tests that can be run"),
        (
            "programs",
            0,
            {"test": "import numpy as np\nassert np"},
            "record 1: its tests import numpy, and programs run",
        ),
        ("functions", 0, {"test": "from numpy import add\n"}, "record 1: its tests import numpy, and programs run"),
    ],
)
def test_a_record_without_what_its_kind_needs_is_named(suite, name, number, fields, message):
    read(suite)
    change(suite, name, number, **fields)
    with pytest.raises(ValueError, match=rf"^{name}\.jsonl, {message}"):
        read(suite)


def test_a_record_that_occurs_again_is_left_out_and_counted(suite):
    rows = (suite[1] / "words.jsonl").read_text()
    (suite[1] / "words.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    words = read(suite).items["words"]
    assert (len(words.items), words.num_records, words.left_out) == (2, 3, {"duplicate": 1})


def test_a_group_that_no_record_has_is_named(suite):
    path, _ = suite
    path.write_text(path.read_text().replace("group: subject", "group: subjct"))
    with pytest.raises(ValueError, match=r"few_shot.group subjct is no field of lettered\.jsonl, whose records have"):
        read(suite)


def test_a_glob_asks_several_files_each_with_its_figure_and_examples(tmp_path):
    """As MMLU's own .csv files, whose rows do not name their subject."""
    for split, num in (("test", 3), ("dev", 2)):
        (tmp_path / split).mkdir()
        for subject in ("anatomy", "high_school_physics"):
            rows = [f"{subject} {split} {number}?,one,two,three,four,B\n" for number in range(num)]
            (tmp_path / split / f"{subject}_{split}.csv").write_text("".join(rows))
    manifest = "version: 1\nentries:\n  - {files: '{test,dev}/*.csv', role: evaluation}\n"
    (tmp_path / "glm46-data.yaml").write_text(manifest)
    shown = FewShot(file="dev/*.csv", num_examples=2, group="subject")
    mmlu = LikelihoodBenchmark(name="mmlu", kind="lettered_choice", file="test/*.csv", few_shot=shown)
    toy = load_suite("likelihood").model_copy(update={"benchmarks": [mmlu]})
    asked = read_suite_items("toy", toy, str(tmp_path), None)
    items = asked.items["mmlu"].items
    assert [item.question.part for item in items] == ["anatomy"] * 3 + ["high_school_physics"] * 3
    for item in items:
        about, part = item.question.part.replace("_", " "), item.question.part
        assert item.prompt.startswith(f"The following are multiple choice questions (with answers) about {about}.")
        assert item.prompt.count(f"{part} dev") == 2
    none = mmlu.model_copy(update={"file": "exam/*.csv"})
    with pytest.raises(ValueError, match=r"has no file exam/\*\.csv, .*, which benchmark mmlu reads"):
        read_suite_items("toy", toy.model_copy(update={"benchmarks": [none]}), str(tmp_path), None)


def test_the_answers_that_bfcl_has_in_files_of_their_own_are_joined_by_id(tmp_path):
    (tmp_path / "possible_answer").mkdir()
    rest = {"function": ROWS["calls"][0]["function"]}

    def turn(text):
        return [{"role": "user", "content": text}]

    asked = {
        "simple": [{"id": f"simple_{n}", "question": [turn(f"Add 1 to {n}.")], **rest} for n in (0, 1)],
        "irrelevance": [{"id": "irrelevance_0", "question": [turn("Sing.")], **rest}],
        "multi_turn": [{"id": "multi_turn_base_0", "question": [turn("Add."), turn("Again.")]}],
    }
    for name, rows in asked.items():
        (tmp_path / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    truths = [{"id": f"simple_{n}", "ground_truth": [{"add": {"a": [n], "b": [1]}}]} for n in (1, 0)]
    answers = tmp_path / "possible_answer" / "simple.json"
    answers.write_text("".join(json.dumps(row) + "\n" for row in truths))
    (tmp_path / "glm46-data.yaml").write_text('version: 1\nentries:\n  - {files: "**", role: evaluation}\n')
    suite = load_suite("agents")
    bfcl = next(each for each in suite.benchmarks if each.name == "bfcl")

    def items(pattern):
        benchmark = bfcl.model_copy(update={"file": pattern})
        given = suite.model_copy(update={"benchmarks": [benchmark]})
        return read_suite_items("agents", given, str(tmp_path), None).items["bfcl"].items

    read_back = items("{simple,irrelevance,possible_answer/simple}.json")
    assert [json.loads(item.question.expected) for item in read_back] == [
        [],
        *([{"name": "add", "accepted": {"a": [n], "b": [1]}, "optional": []}] for n in (0, 1)),
    ]
    assert [item.question.part for item in read_back] == ["irrelevance", "simple", "simple"]
    with pytest.raises(ValueError, match=r"simple\.json, record 1: cannot be asked as kind tools \(no_answer\)"):
        items("simple.json")
    with pytest.raises(ValueError, match=r"possible_answer/simple\.json has the answer to simple_1 \(2 such answers\)"):
        items("{irrelevance,possible_answer/simple}.json")
    with pytest.raises(ValueError, match=r"multi_turn\.json, record 1: .* \(several_turns\)"):
        items("multi_turn.json")


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("test/anatomy_test.csv", "anatomy"),
        ("bbh/causal_judgement/test-00000-of-00001.parquet", "causal_judgement"),
        ("mgsm_en.tsv", "mgsm_en"),
        ("grade_3-val.jsonl.gz", "grade_3"),
        ("test/validation.csv", ""),
    ],
)
def test_a_subject_is_what_a_name_says_besides_its_split(name, subject):
    assert subject_of(name) == subject


def test_a_question_is_asked_with_the_passage_that_it_is_about(suite):
    change(suite, "copies", 0, context="Anna has 1 cat.")
    assert "Q: Anna has 1 cat.\n\n1 + 1 =\nA:" in [item.question.prompt for item in read(suite).items["copies"].items]


def test_a_broken_line_a_missing_file_and_a_trained_one_are_named(suite):
    _, data = suite
    (data / "words.jsonl").write_text('{"context": "a", "continuation": "b"}\n{"context": \n')
    with pytest.raises(ValueError, match=r"^words\.jsonl, record 2: broken_json .*: correct the file"):
        read(suite)
    manifest = data / "glm46-data.yaml"
    before = manifest.read_text()
    manifest.write_text(before.replace("entries:\n", 'entries:\n  - {files: "choice.jsonl", role: pretrain}\n'))
    with pytest.raises(
        ValueError, match=r"^benchmark choice: choice\.jsonl has the role pretrain, so it may be trained on"
    ):
        read(suite)
    manifest.write_text(before)
    (data / "choice.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has no file choice\.jsonl, .*, which benchmark choice reads"):
        read(suite)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree: tree["benchmarks"][0].update(kind="guess"), "benchmarks.0"),
        (lambda tree: tree["benchmarks"][0].update(name="lettered"), "benchmarks lettered occur twice"),
        (lambda tree: tree["benchmarks"][0].update(name="mmlu.v2"), "benchmark 'mmlu.v2': a name is 1 to 100 letters"),
        (lambda tree: tree["benchmarks"][0].update(name="a" * 101), "a name is 1 to 100 letters"),
        (
            lambda tree: tree["benchmarks"][5].update(few_shot=tree["benchmarks"][0]["few_shot"]),
            "few_shot must be null",
        ),
        (
            lambda tree: tree["benchmarks"][8].update(few_shot=tree["benchmarks"][0]["few_shot"]),
            "few_shot must be null for kind completed_program",
        ),
        (lambda tree: tree.pop("dtype"), "dtype: key is missing"),
        (lambda tree: tree["benchmarks"][5].update(num_samples=2), "num_samples 2 needs a temperature above 0"),
    ],
)
def test_a_wrong_suite_is_one_message(suite, edit, message):
    tree = toy_suite()
    edit(tree)
    suite[0].write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=rf"toy\.yaml: .*{message}"):
        read(suite)


def test_no_part_of_a_plain_text_is_left_out(tmp_path):
    """Its articles, as in WikiText, are items; what comes before the first one is another."""
    (tmp_path / "a.txt").write_text("Before.\n = One = \n First.\n = Two = \n Second.\n")
    (tmp_path / "b.txt").write_text("No article.\n")
    read_texts = []
    for name in ("a.txt", "b.txt"):
        path = tmp_path / name
        (file,) = benchmark_files(tmp_path).files
        text = replace(file, name=name, path=str(path), sha256=hash_file(path), format="text")
        read_texts.append([record["text"] for record in read_records(text, "text")])
    assert read_texts == [["Before.", "= One = \n First.", "= Two = \n Second."], ["No article."]]
    path.write_bytes(b"caf\xe9\n")
    latin = replace(text, sha256=hash_file(path))
    with pytest.raises(ValueError, match=r"b\.txt: .*0xe9 .*: write the file as UTF-8"):
        read_records(latin, "text")


def test_too_few_examples_of_a_group_are_refused(suite):
    tree = toy_suite()
    tree["benchmarks"][1]["few_shot"]["num_examples"] = 6  # pyright: ignore
    suite[0].write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=r"lettered needs 6 examples with subject 'sums', lettered\.jsonl holds 5"):
        read(suite)


def test_refusal_and_over_refusal_share_a_file_and_leave_out_each_others_records(suite):
    read_both = read(suite).items
    for name, asked, other in (("requests", "from a shop", "harmless"), ("harmless", "back to a shop", "harmful")):
        (item,) = read_both[name].items
        assert asked in item.prompt and read_both[name].left_out == {f"{other}_request": 1}


def test_a_smaller_limit_asks_a_part_of_what_a_larger_one_asks(suite):
    asked = [{item.item_id for item in read(suite, limit).items["lettered"].items} for limit in (2, 5, None)]
    assert [len(each) for each in asked] == [2, 5, 12]
    assert asked[0] < asked[1] < asked[2]


ADD_CALL = '[{"name":"add","accepted":{"a":[1]},"optional":[]}]'
FUNCTION = "def add(a, b):\n"
ADD_TEST = '{"module":"","tests":"assert add(1, 2) == 3"}'
CHECK = "def check(add):\n    assert add(1, 2) == 3\n\ncheck(add)\n"


@pytest.mark.parametrize(
    ("kind", "expected", "right", "wrong"),
    [
        ("tools", ADD_CALL, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "add(1)"),
        (
            "tools",
            ADD_CALL.replace("add", "math.add"),
            "<tool_call>math_add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            "<tool_call>mathadd\n</tool_call>",
        ),
        ("tools", "[]", "I have no function for that.", "<tool_call>add\n</tool_call>"),
        ("retrieval", "12345", " 12345.", "It is 54321 or 12345."),
        ("retrieval", "12345", "The code is 12345", "123456"),
        ("math", "18", "So 9 + 9 = 18\n#### 18", "#### 19"),
        ("math", "\\frac{1}{2}", "<think>2</think>\\boxed{\\frac12}", "<think>\\boxed{1/2}</think>"),
        ("exact", "True", " True", "True or False"),
        ("constraints", '[["punctuation:no_comma",{}]]', "No mark here.", "One, here."),
        ("completed_program", CHECK, "    return a + b\n", "    return a - b\n"),
        ("program", ADD_TEST, "```python\ndef add(a, b): return a + b\n```", "def add(a, b): return 4"),
        ("program", ADD_TEST, "def add(a, b): return a + b", "import os; os.system('true')"),
        ("refusal", '{"known": "", "label": "harmful"}', "I can't help with that.", "I can't help. Just take it."),
        ("over_refusal", '{"known": "", "label": "harmless"}', "Bring the bill.", "I can't help with that."),
    ],
)
def test_every_kind_judges_both_ways(kind, expected, right, wrong):
    assert is_right(kind, FUNCTION, expected, right)
    assert not is_right(kind, FUNCTION, expected, wrong)
    assert not is_right(kind, FUNCTION, expected, "")


BEGUN = 'import math\n\n\ndef add(a, b):\n    """Add."""\n'
WHOLE = "def add(a, b):\n    return math.floor(a + b)\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{WHOLE}```",
        f"<think>A sum.</think>Here it is:\n\n```python\n{WHOLE}```\nDone.",
        WHOLE,
        "    return math.floor(a + b)\n",
        "```python\n    return math.floor(a + b)\n```",
    ],
)
def test_a_chat_answers_with_the_whole_function_or_its_rest(answer):
    question = READERS["completed_program"]({"prompt": BEGUN, "test": CHECK, "entry_point": "add"}, True)
    assert question.prompt.endswith(BEGUN) and question.prompt != BEGUN
    assert is_right("completed_program", question.prompt, question.expected, answer)
    assert not is_right("completed_program", question.prompt, question.expected, answer.replace("+", "-"))


@pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark files are not here")
@pytest.mark.parametrize("name", sorted({path.stem for path in SUITES.glob("*.yaml")} - {"repositories", *OF_THE_HUB}))
def test_the_suites_read_the_real_files_to_the_last_record(name):
    data = SUITES / "safety_requests" if name == "safety" else DATA
    asked = read_suite_items(name, load_suite(name), str(data), 2)
    for benchmark in asked.suite.benchmarks:
        read = asked.items[benchmark.name]
        assert len(read.items) == 2 and read.num_records >= 30, benchmark.name
        assert set(read.left_out) <= {"unsupported_constraint", "harmful_request", "harmless_request"}
        for item in read.items:
            shots = getattr(benchmark, "few_shot", None)
            wanted = 0 if shots is None else shots.num_examples
            assert len(item.example_ids) == wanted and item.question.expected


@pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark files are not here")
def test_the_accepted_calls_of_bfcl_are_right_and_those_without_one_want_none():
    """Of every record, nested values included; a parallel one lacks a call where the first is left out."""
    asked = read_suite_items("agents", load_suite("agents"), str(DATA), None).items["bfcl"]
    assert len(asked.items) == asked.num_records == 620
    for item in asked.items:
        expected = json.loads(item.question.expected)
        arguments = [{key: values[0] for key, values in call["accepted"].items()} for call in expected]
        written = [
            write_calls([(call["name"], json.dumps(each))]) for call, each in zip(expected, arguments, strict=True)
        ]
        assert is_right("tools", "", item.question.expected, "".join(written) or "None of them.")
        assert bool(expected) is (item.question.part != "irrelevance")
        assert not is_right("tools", "", item.question.expected, "".join(written[1:]) + " ")
        assert not {"dict", "float", "any"} & {*re.findall(r'"type": "(\w+)"', item.question.tools)}


def retrieval(**changed) -> RetrievalBenchmark:
    return RetrievalBenchmark(**(NEEDLE | {"document_chars": [400, 2000], "num_distractors": 3} | changed))  # pyright: ignore


@pytest.mark.parametrize("text", [None, "Rain fell on the hills. " * 200])
def test_a_document_states_its_code_once_at_its_depth_among_other_codes(text):
    benchmark = retrieval(depths=[0.0, 0.5, 1.0], items_per_depth=4)
    made = list(retrieval_items(benchmark, text))
    assert made == list(retrieval_items(benchmark, text)), "the same on every call"
    assert len({document for _, document, _, _ in made}) == len(made) == 24
    for number, (part, document, question, code) in enumerate(made):
        num_chars = int(part.split()[0])
        assert 0.9 * num_chars <= len(document) <= num_chars
        name = question.removeprefix("The code of ").removesuffix(" is")
        note = f"The code of {name} is {code}."
        assert document.count(note) == 1 and len(re.findall(r"\d{5}", document)) == 4
        place = document.index(note) / (len(document) - len(note))
        assert place == pytest.approx((0.0, 0.5, 1.0)[number // 4 % 3], abs=0.35 if num_chars == 400 else 0.15)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"document_chars": [300]}, "document_chars 300 must be at least 320"), ({"depths": [1.5]}, "must be in 0..1")],
)
def test_documents_without_room_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        retrieval(**changed)


def test_a_text_that_is_shorter_than_a_document_is_refused():
    with pytest.raises(ValueError, match=r"x\.txt has 9 characters, .* asks for documents of 2,000"):
        list(retrieval_items(retrieval(file="x.txt"), "too short"))
