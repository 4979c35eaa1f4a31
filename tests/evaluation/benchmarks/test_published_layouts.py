"""Records as the hub publishes them are asked as lm-evaluation-harness asks them, from Parquet and from the hub."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from lm_eval.tasks._yaml_loader import load_yaml
from typer.testing import CliRunner

from configs.load import load_suite
from flows.cli.command import app
from tasks.data.sources.list_sources import list_sources
from tasks.evaluation.benchmarks.run_suite import read_suite_items
from tasks.evaluation.harness import QuietTask
from tests.evaluation.benchmarks.toy_suite import write_toy_model
from tests.support.cluster.model_hub import COMMIT, model_hub
from tests.support.data_inputs import write_jsonl

LIKELIHOOD, MATH = load_suite("hellaswag"), load_suite("math")
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "[header] How to fix a roof [title] Climb up. [step] A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "[header] How to fix a roof [title] Climb up. [step] A man is sitting on a roof. he",
    "endings": ["starts pulling up  roofing.", "is [substeps] ripping tiles off.", "sings.", "sleeps on it."],
    "label": "1",
}
ARC = {
    "id": "Mercury_1",
    "question": "Which gas do plants take in?",
    "choices": {"text": ["carbon dioxide", "oxygen", "helium"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
PIQA = {"goal": "Cool a soup.", "sol1": "Stir it.", "sol2": "Boil it.", "label": 0}
BOOLQ = {"question": "is the sky blue", "passage": "The sky is blue.", "answer": True}
WINOGRANDE = {"sentence": "Sarah thanked Maria, because _ had helped.", "option1": "Sarah", "option2": "Maria"}
MMLU_PRO = {
    "question_id": 70,
    "question": "Which is a prime?",
    "options": ["4", "6", "7", "8", "9"],
    "answer": "C",
    "answer_index": 2,
    "category": "math",
}
GPQA = {
    "Question": "Which gas do plants take in? ",
    "Correct Answer": "carbon dioxide",
    "Incorrect Answer 1": "oxygen\n",
    "Incorrect Answer 2": "helium",
    "Incorrect Answer 3": "neon",
    "Explanation": "Photosynthesis.",
}
TRUTHFULQA = {"question": "Can pigs fly?", "mc1_targets": {"choices": ["They can.", "No."], "labels": [0, 1]}}
LAMBADA = {"text": "He looked at the moon.\n\nThe night was cold and he missed the sun"}
ALGEBRA = {
    "problem": "What is $1+1$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"It is $\boxed{\frac{4}{2}}$.",
}
CEVAL = {
    "id": 0,
    "question": "植物吸收哪种气体？ ",
    "A": "二氧化碳",
    "B": "氧气",
    "C": "氦气",
    "D": "氖气",
    "answer": "A",
}
CMMLU = {"": "0", "Question": "哪个是质数？", "A": "4", "B": "6", "C": "7", "D": "8", "Answer": "C"}
PUBLISHED = [
    ("hellaswag/hellaswag", "choice", HELLASWAG),
    ("arc/arc_easy", "choice", ARC),
    ("piqa/piqa", "choice", PIQA),
    ("super_glue/boolq/default", "choice", BOOLQ | {"label": 1}),
    ("winogrande/default", "context_choice", WINOGRANDE | {"answer": "2"}),
    ("lambada/lambada_openai", "last_word", LAMBADA),
    ("ceval/ceval-valid_law", "lettered_choice", CEVAL),
    ("cmmlu/cmmlu_college_law", "lettered_choice", CMMLU),
    ("hendrycks_math/hendrycks_math_algebra", "math", ALGEBRA),
    ("hendrycks_math/hendrycks_math_algebra", "math", ALGEBRA | {"solution": r"So $x=\boxed 2$ is right."}),
]


def read(directory, kind, record, write=write_jsonl, name="test.jsonl"):
    """What a file of one record, or of several, asks."""
    write(directory / name, record if isinstance(record, list) else [record])
    (directory / "glm46-data.yaml").write_text('version: 1\nentries:\n  - {files: "test.*", role: evaluation}\n')
    suite = MATH if kind == "math" else LIKELIHOOD
    benchmark = suite.benchmarks[0].model_copy(update={"name": "published", "kind": kind, "file": name})
    asked = read_suite_items("published", suite.model_copy(update={"benchmarks": [benchmark]}), str(directory), None)
    return [item.question for item in asked.items["published"].items]


def write_parquet(path, records):
    pq.write_table(pa.Table.from_pylist(records), path)


@pytest.mark.parametrize(("task", "kind", "record"), PUBLISHED)
def test_a_published_record_is_asked_as_the_harness_asks_it(tmp_path, task, kind, record):
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / f"{task}.yaml")
    for name in ("dataset_path", "dataset_name", "training_split", "validation_split", "fewshot_split", "tag"):
        config.pop(name, None)
    rows = {"test": Dataset.from_list([record])}
    theirs: Any = QuietTask(config={**config, "test_split": "test", "custom_dataset": lambda **options: rows})
    (asked,) = theirs.test_docs()
    (ours,) = read(tmp_path, kind, record, write_parquet, "test.parquet")
    if kind == "choice":
        assert ours.prompt == theirs.doc_to_text(asked)
        assert list(ours.choices) == theirs.doc_to_choice(asked)
        assert ours.right == int(theirs.doc_to_target(asked))
    elif kind == "lettered_choice":
        letters = theirs.doc_to_choice(asked)
        assert ours.prompt == theirs.doc_to_text(asked)
        assert list(ours.choices) == letters and ours.right == letters.index(ours.expected) == theirs.doc_to_target(
            asked
        )
    elif kind == "context_choice":
        assert list(ours.choices) == theirs.doc_to_choice(asked) and ours.right == theirs.doc_to_text(asked)
        assert ours.expected == theirs.doc_to_target(asked)
    elif kind == "last_word":
        assert (ours.prompt, f" {ours.expected}") == (theirs.doc_to_text(asked), theirs.doc_to_target(asked))
    else:
        assert ours.prompt.startswith(asked["problem"]) and ours.expected == asked["answer"]


@pytest.mark.parametrize(
    ("kind", "record", "asked", "expected"),
    [
        ("choice", {"question_stem": "Gas?", "choices": ARC["choices"], "answerKey": "3"}, "Question: Gas?", "helium"),
        ("lettered_choice", ARC, "B. oxygen", "B"),
        ("choice", MMLU_PRO, "Question: Which is a prime?", "7"),
        ("lettered_choice", MMLU_PRO, "C. 7\nD. 8\nE. 9", "C"),
        ("choice", CEVAL, "Question: 植物吸收哪种气体？", "二氧化碳"),
        ("choice", GPQA, "Question: Which gas do plants take in?\n", "carbon dioxide"),
        ("choice", TRUTHFULQA, "Question: Can pigs fly?", "No."),
        ("math", {"ID": "2024-I-1", "Problem": "What is $9$?", "Solution": "9", "Answer": 9}, "What is $9$?", "9"),
        ("math", {"id": "0", "problem": "What is $70$?", "answer": "70"}, "What is $70$?", "70"),
    ],
)
def test_layouts_that_the_harness_does_not_read(tmp_path, kind, record, asked, expected):
    (question,) = read(tmp_path, kind, record)
    assert asked in question.prompt and question.expected == expected


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("choice", HELLASWAG | {"label": ""}, "label '' does not number one of its 4 choices from 0"),
        ("choice", HELLASWAG | {"endings": "one"}, "it has no list of texts in endings"),
        ("choice", ARC | {"answerKey": "E"}, "answerKey 'E' is none of the labels 1, 2, 3"),
        ("choice", ARC | {"choices": {"text": ["a"], "label": []}}, "choices has no lists text and label"),
        ("choice", PIQA | {"label": -1}, "label -1 does not number one of its 2 choices from 0"),
        ("choice", BOOLQ | {"answer": "yes"}, "answer 'yes' is neither true nor false"),
        ("choice", MMLU_PRO | {"answer_index": 5}, "answer_index 5 does not number one of its 5 choices from 0"),
        ("lettered_choice", CEVAL | {"answer": ""}, "answer '' is none of A, B, C, D"),
        ("lettered_choice", CMMLU | {"B": None}, "it has no text in B"),
        ("choice", GPQA | {"Incorrect Answer 2": " "}, "it has no text in Incorrect Answer 2"),
        ("choice", GPQA | {"Incorrect Answer 2": "oxygen"}, "two of its answers are the same"),
        ("choice", TRUTHFULQA | {"mc1_targets": {"choices": ["a", "b"], "labels": [1, 1]}}, "mc1_targets marks 2 of"),
        ("context_choice", WINOGRANDE | {"answer": "0"}, "answer '0' does not number one of its 2 choices from 1"),
        ("context_choice", WINOGRANDE | {"answer": "1", "sentence": "No gap."}, "sentence has no _ for the option"),
        ("last_word", {"text": "word "}, "text has no words before the last one"),
        ("math", ALGEBRA | {"solution": "It is 2."}, r"solution has no answer in \\boxed{}"),
        ("choice", {"stem": "Gas?", "key": "A"}, "it has no query or question, .*its fields are key, stem: correct"),
        ("math", {"stem": "Gas?"}, r"cannot be asked as kind math \(no_question\); its fields are stem: correct"),
    ],
)
def test_a_record_that_its_layout_does_not_describe_is_named(tmp_path, kind, record, message):
    good = next(record for _, name, record in PUBLISHED if name == kind)
    with pytest.raises(ValueError, match=rf"^test\.jsonl, record 2: {message}"):
        read(tmp_path, kind, [good, record])


def test_gpqa_is_read_from_the_csv_file_that_is_published(tmp_path):
    """The place of the right answer is that of a hash: it says nothing."""
    records = [
        {**{name: f"{value} {number}" for name, value in GPQA.items()}, "Question": f'What, "{number}"?\nOf these:'}
        for number in range(200)
    ]

    def write_csv(path, records):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*GPQA])
            writer.writeheader()
            writer.writerows(records)

    asked = read(tmp_path, "lettered_choice", records, write_csv, "test.csv")
    assert [question.choices[question.right] for question in asked] == [question.expected for question in asked]
    for question, record in zip(asked, records, strict=True):
        assert question.prompt.startswith(record["Question"])
        assert f"\n{question.expected}. {record['Correct Answer']}\n" in question.prompt
    shares = Counter(question.expected for question in asked)
    assert set(shares) == set("ABCD") and max(shares.values()) < 80


def test_mmlu_is_read_from_its_csv_files_whose_first_row_is_a_question(tmp_path):
    rows = [
        ['Find all c in Z_3 such that Z_3[x]/(x^2 + c), "a ring",\nis a field.', "0", "1", "2", "3", "B"],
        [
            "Statement 1 | All rings are fields. Statement 2 | All fields are rings.",
            "T, T",
            "F, F",
            "T, F",
            "F, T",
            "D",
        ],
    ]

    def write_csv(path, records):
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(records)

    first, second = read(tmp_path, "lettered_choice", rows, write_csv, "test.csv")
    assert first.prompt == f"{rows[0][0]}\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer:" and first.expected == "B"
    assert "\nD. F, T\nAnswer:" in second.prompt and second.expected == "D"
    with pytest.raises(
        ValueError, match=r"test\.csv, record 1: it has no query or question, .*its fields are A, B, C, D"
    ):
        read(tmp_path, "lettered_choice", [["A", "B", "C", "D"], ["1", "2", "3", "4"]], write_csv, "test.csv")


def test_a_broken_parquet_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^test\.parquet, record 1: broken_parquet .*: correct the file"):
        read(tmp_path, "choice", HELLASWAG, write_jsonl, "test.parquet")


LIVECODEBENCH = {
    "question_content": "Print the number that is read.",
    "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A dataset without a glm46-data.yaml, as the hub holds HellaSwag, MATH, AIME and LiveCodeBench."""
    files = {}
    for benchmark in (*LIKELIHOOD.benchmarks, *MATH.benchmarks):
        assert benchmark.kind != "retrieval"
        path = tmp_path / "dataset" / benchmark.file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(path, [HELLASWAG] if benchmark.name == "hellaswag" else [ALGEBRA])
        files[benchmark.file] = path.read_bytes()
    files["data/train-00000-of-00001.parquet"] = files["data/validation-00000-of-00001.parquet"]
    files["test6.jsonl"] = json.dumps(LIVECODEBENCH).encode()
    files["test.jsonl"] = json.dumps({"problem": "What is $70$?", "answer": "70", "id": "0"}).encode()
    siblings = [
        {"rfilename": name, "size": len(body), "blobId": hashlib.sha1(body).hexdigest()} for name, body in files.items()
    ]
    described = {"id": "owner/name", "sha": COMMIT, "siblings": siblings}

    def answer(path):
        return described if path.startswith("/api/datasets/owner/name") else None

    with model_hub(files, answer, tmp_path / "cache", monkeypatch):
        yield "hf://owner/name"


@pytest.mark.parametrize("name", ["hellaswag", "math", "aime", "livecodebench"])
def test_a_suite_of_the_hub_reads_the_datasets_held_out_split(hub, name):
    suite = load_suite(name)
    asked = read_suite_items(name, suite, hub, None)
    assert all(len(asked.items[benchmark.name].items) == 1 for benchmark in suite.benchmarks)
    trained = [file.name for file in list_sources(hub, needed="sft").files]
    assert trained == ["data/train-00000-of-00001.parquet"]


def test_a_suite_is_evaluated_over_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    model = write_toy_model(tmp_path / "model")
    options = ["--suite", "hellaswag", "--data", hub, "--output", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, ["eval", str(model), *options])
    assert done.exit_code == 0, done.stderr
    (item,) = (json.loads(line) for line in (tmp_path / "out.items.jsonl").read_text().splitlines())
    assert item["prompt"].startswith("Roof shingle removal: ") and len(item["log_probabilities"]) == 4


def test_a_training_split_of_the_hub_is_not_asked(hub):
    trained = LIKELIHOOD.benchmarks[0].model_copy(update={"file": "data/train-00000-of-00001.parquet"})
    with pytest.raises(ValueError, match=r"data/train-.* has the role pretrain, so it may be trained on"):
        read_suite_items("trained", LIKELIHOOD.model_copy(update={"benchmarks": [trained]}), hub, None)
