"""The suites that shipped scales name: which files a run reads for them, from where, and what is said before it."""

from __future__ import annotations

import hashlib

import pytest

from configs.load import load_scale, load_suite, scale_names
from flows.assess_suite import find_suite_files, with_suite_files
from tasks.data.sources.list_sources import SourceListing
from tasks.data.sources.remote_sources import dataset_and_file
from tasks.evaluation.benchmarks.run_suite import read_suite_items
from tasks.training.plan.plan_training import plan_training
from tests.evaluation.benchmarks.test_published_layouts import HELLASWAG, LIKELIHOOD, WINOGRANDE, write_parquet
from tests.support.cluster.model_hub import COMMIT, model_hub

HUMANEVAL = {"test": "def check(add):\n    assert add(1, 2) == 3\n", "entry_point": "add"}


@pytest.fixture
def release_hub(tmp_path, monkeypatch):
    """The datasets of suite `release`, each with the files that it names and 40 records or more."""
    sums = [{"question": f"What is {a} + 1?", "answer": f"#### {a + 1}"} for a in range(40)]
    lettered = [{**each, "subject": "sums", "choices": ["1", "2"], "answer": 0} for each in sums]
    keyed = [{**each, "choices": {"text": ["1", "2"], "label": ["A", "B"]}, "answerKey": "A"} for each in sums]
    add = "def add(a, b):\n    return a + b\n"
    programs = [{"text": f"Add {a}.", "code": add, "test_list": [f"assert add({a}, 1) == {a + 1}"]} for a in range(40)]
    rows = {
        "cais/mmlu": lettered,
        "allenai/ai2_arc": [{key: row[key] for key in ("question", "choices", "answerKey")} for row in keyed],
        "Rowan/hellaswag": [HELLASWAG | {"ctx_b": f"he is {a}"} for a in range(40)],
        "allenai/winogrande": [WINOGRANDE | {"answer": "1", "option1": f"Sarah {a}"} for a in range(40)],
        "openai/gsm8k": sums,
        "openai/openai_humaneval": [HUMANEVAL | {"prompt": f"def add{a}(a, b):\n"} for a in range(40)],
        "google-research-datasets/mbpp": programs,
    }
    files: dict[str, bytes] = {}
    described: dict[str, dict[str, object]] = {}
    for address in load_suite("release").hub_files:
        dataset, name = dataset_and_file(address)
        path = tmp_path / "release" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(path, rows[dataset.removeprefix("hf://")])
        files[name] = path.read_bytes()
        sibling = {"rfilename": name, "size": path.stat().st_size, "blobId": hashlib.sha1(files[name]).hexdigest()}
        known = described.setdefault(dataset.removeprefix("hf://"), {"sha": COMMIT, "siblings": []})
        known["siblings"] = [*known["siblings"], sibling]  # pyright: ignore[reportGeneralTypeIssues]

    def answer(path):
        dataset = "/".join(path.removeprefix("/api/datasets/").split("/")[:2]).split("?")[0]
        return {"id": dataset, **described[dataset]} if dataset in described else None

    with model_hub(files, answer, tmp_path / "cache", monkeypatch):
        yield described


def test_the_suite_of_large_scales_is_read_from_the_hub_and_kept_out_of_training(release_hub):
    scale = load_scale("full")
    files = find_suite_files(scale, SourceListing(()))
    assert files is not None
    suite = load_suite("release")
    roles = {file.name: file.role for file in files.files}
    assert roles.keys() == suite.hub_files.keys()
    asked = {benchmark.file for benchmark in suite.benchmarks if benchmark.file is not None}
    assert {roles[name] for name in asked} == {"evaluation"}
    trained = "hf://openai/gsm8k/main/train-00000-of-00001.parquet"
    assert roles[trained] == "pretrain", "examples come from a training split"
    sources = with_suite_files(SourceListing(()), files)
    assert {file.role for file in sources.files} == {"evaluation"} and trained not in {f.name for f in sources.files}
    assert with_suite_files(sources, files) == sources and with_suite_files(sources, None) == sources
    items = read_suite_items("release", suite, None, 20).items
    assert {len(read.items) for read in items.values()} == {20}
    assert all(len(item.example_ids) == 5 for item in items["mmlu"].items)


def test_what_the_hub_does_not_give_is_said_before_anything_runs(release_hub, monkeypatch):
    scale, (files, *_) = load_scale("full"), release_hub["cais/mmlu"]["siblings"]
    release_hub["cais/mmlu"]["siblings"] = [files]
    with pytest.raises(ValueError, match=r"benchmark mmlu: hf://cais/mmlu has no file all/test-.*: correct the suite"):
        find_suite_files(scale, SourceListing(()))
    del release_hub["cais/mmlu"]
    with pytest.raises(ValueError, match=r"benchmark mmlu: dataset hf://cais/mmlu cannot be listed .*: check the name"):
        find_suite_files(scale, SourceListing(()))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"benchmark mmlu: .* or download it and name the directory in a suite of your"
    ):
        find_suite_files(scale, SourceListing(()))


def test_an_address_of_the_hub_without_a_file_is_refused():
    asked = LIKELIHOOD.benchmarks[0].model_copy(update={"file": "hf://cais/mmlu"})
    with pytest.raises(ValueError, match="hf://cais/mmlu names no file of a dataset: write hf://owner/name/file"):
        read_suite_items("short", LIKELIHOOD.model_copy(update={"benchmarks": [asked]}), None, None)
    pinned = "hf://openai/gsm8k@refs/convert/parquet/main/test/0000.parquet"
    assert dataset_and_file(pinned) == ("hf://openai/gsm8k@refs/convert/parquet", "main/test/0000.parquet")


@pytest.mark.parametrize("name", [name for name in scale_names() if load_scale(name).evaluation.suite is not None])
def test_every_shipped_suite_needs_no_file_of_the_user_and_has_its_bounds(name):
    wanted = load_scale(name).evaluation.suite
    assert wanted is not None
    suite = load_suite(wanted.name)
    assert not suite.own_files
    assert wanted.bounds.keys() == {benchmark.name for benchmark in suite.benchmarks}


def test_a_plan_says_what_a_release_is_asked_and_what_it_reads():
    said = plan_training(load_scale("full")).describe()
    assert "; is asked mmlu, arc_challenge, " in said and "from the Hugging Face Hub Rowan/hellaswag, " in said
    assert "no file: every item is made" in plan_training(load_scale("nightly")).release
    scale = load_scale("tiny")
    assert "is asked" not in plan_training(scale).release
    wanted = load_scale("nightly").evaluation.suite
    assert wanted is not None
    asked = scale.evaluation.model_copy(update={"suite": wanted.model_copy(update={"name": "hellaswag"})})
    said = plan_training(scale.model_copy(update={"evaluation": asked})).release
    assert said.endswith("from --data, with the role evaluation, data/validation-00000-of-00001.parquet")
