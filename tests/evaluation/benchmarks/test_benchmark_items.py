"""Items of benchmark files: what every kind needs of a record, and how answers are judged."""

from __future__ import annotations

import json

import pytest
import yaml

from configs.load import load_suite, suite_names
from tasks.evaluation.benchmarks.benchmark_tasks import is_right
from tasks.evaluation.benchmarks.run_suite import read_suite_items
from tests.conftest import ROOT
from tests.evaluation.benchmarks.toy_suite import ROWS, toy_suite, write_suite
from tests.support.data_inputs import SHARED_DATA as DATA


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
        ("contexts", 0, {"context_options": "one"}, "record 1: it has no list of texts in context_options"),
        ("contexts", 1, {"gold": 2}, "record 2: gold does not number one of context_options from 0"),
        ("contexts", 1, {"continuation": None}, "record 2: it has no text in continuation"),
        ("words", 0, {"context": None}, "record 1: it has no text in context"),
        ("texts", 2, {"text": None}, "record 3: it has no text in text or content"),
        ("sums", 0, {"answer": None}, r"record 1: cannot be asked as kind math \(no_answer\)"),
        ("copies", 0, {"target": None}, "record 1: it has no text in target or answer"),
        ("forms", 0, {"kwargs": [{"wrong": 1}]}, r"record 1: cannot be asked .* \(malformed_constraint\)"),
        ("requests", 1, {"label": "bad"}, r"record 2: cannot be asked as kind refusal \(no_label\)"),
        ("functions", 0, {"entry_point": None}, "record 1: it has no text in entry_point"),
        ("programs", 0, {"test_list": None}, "record 1: it has no tests in test_list or tests"),
    ],
)
def test_a_record_without_what_its_kind_needs_is_named(suite, name, number, fields, message):
    read(suite)
    change(suite, name, number, **fields)
    with pytest.raises(ValueError, match=rf"^{name}\.jsonl, {message}"):
        read(suite)


def test_a_broken_line_a_missing_file_and_a_trained_one_are_named(suite):
    _, data = suite
    (data / "words.jsonl").write_text('{"context": "a", "continuation": "b"}\n{"context": \n')
    with pytest.raises(ValueError, match=r"^words\.jsonl, record 2: broken_json .*: correct the file"):
        read(suite)
    manifest = data / "glm46-data.yaml"
    before = manifest.read_text()
    manifest.write_text(before.replace("entries:\n", 'entries:\n  - {files: "choice.jsonl", role: pretrain}\n'))
    with pytest.raises(ValueError, match=r"choice\.jsonl has the role pretrain, so it may be trained on"):
        read(suite)
    manifest.write_text(before)
    (data / "choice.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has no file choice\.jsonl"):
        read(suite)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tree: tree["benchmarks"][0].update(kind="guess"), "benchmarks.0"),
        (lambda tree: tree["benchmarks"][0].update(name="lettered"), "benchmarks lettered occur twice"),
        (
            lambda tree: tree["benchmarks"][5].update(few_shot=tree["benchmarks"][0]["few_shot"]),
            "few_shot must be null",
        ),
        (lambda tree: tree.pop("dtype"), "dtype: key is missing"),
    ],
)
def test_a_wrong_suite_is_one_message(suite, edit, message):
    tree = toy_suite()
    edit(tree)
    suite[0].write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=rf"toy\.yaml: .*{message}"):
        read(suite)


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


FUNCTION = "def add(a, b):\n"
CHECK = "def check(add):\n    assert add(1, 2) == 3\n\ncheck(add)\n"


@pytest.mark.parametrize(
    ("kind", "expected", "right", "wrong"),
    [
        ("math", "18", "So 9 + 9 = 18\n#### 18", "#### 19"),
        ("math", "\\frac{1}{2}", "<think>2</think>\\boxed{\\frac12}", "<think>\\boxed{1/2}</think>"),
        ("exact", "True", " True", "True or False"),
        ("constraints", '[["punctuation:no_comma",{}]]', "No mark here.", "One, here."),
        ("completed_program", CHECK, "    return a + b\n", "    return a - b\n"),
        ("program", "assert add(1, 2) == 3", "```python\ndef add(a, b): return a + b\n```", "def add(a, b): return 4"),
        ("program", "assert add(1, 2) == 3", "def add(a, b): return a + b", "import os; os.system('true')"),
        ("refusal", '{"known": "", "label": "harmful"}', "I can't help with that.", "I can't help. Just take it."),
        ("over_refusal", '{"known": "", "label": "harmless"}', "Bring the bill.", "I can't help with that."),
    ],
)
def test_every_kind_judges_both_ways(kind, expected, right, wrong):
    assert is_right(kind, FUNCTION, expected, right)
    assert not is_right(kind, FUNCTION, expected, wrong)
    assert not is_right(kind, FUNCTION, expected, "")


@pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark files are not here")
@pytest.mark.parametrize("name", suite_names())
def test_the_suites_read_the_real_files_to_the_last_record(name):
    data = ROOT / "configs" / "suites" / "safety_requests" if name == "safety" else DATA
    asked = read_suite_items(name, load_suite(name), str(data), 2)
    for benchmark in asked.suite.benchmarks:
        read = asked.items[benchmark.name]
        assert len(read.items) == 2 and read.num_records >= 30, benchmark.name
        assert set(read.left_out) <= {"unsupported_constraint", "harmful_request", "harmless_request"}
        for item in read.items:
            wanted = 0 if benchmark.few_shot is None else benchmark.few_shot.num_examples
            assert len(item.example_ids) == wanted and item.question.expected
