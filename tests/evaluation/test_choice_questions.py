"""Which records are questions, which are chosen, and what is asked where no file holds any."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest

from tasks.data.sources.list_sources import SourceListing
from tasks.evaluation.choice_questions import (
    order_hash,
    published_question,
    questions_from_documents,
    questions_from_files,
)
from tasks.evaluation.safety_questions import choose_requests
from tests.evaluation.benchmarks.test_published_layouts import ARC, HELLASWAG, PIQA, write_parquet
from tests.support.evaluation_fakes import benchmark_files

LABELS = ("harmful", "harmless")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"query": "He ran, so", "choices": ["a", "b"], "gold": 1}, ("He ran, so", 1)),
        ({"query": "Question: why?\n", "choices": ["a", "b"], "gold": 0}, ("Question: why?\nAnswer:", 0)),
        ({"query": "Question: why?\nAnswer:", "choices": ["a", "b"], "gold": 0}, ("Question: why?\nAnswer:", 0)),
        ({"question": "why?", "choices": ["x", "y", "z"], "answer": "C"}, ("Question: why?\nAnswer:", 2)),
        ({"question": "why?", "choices": ["x", "y"], "answer": "y"}, ("Question: why?\nAnswer:", 1)),
        ({"question": "why?", "choices": ["B", "A"], "answer": "A"}, ("Question: why?\nAnswer:", 1)),
    ],
)
def test_shapes_of_questions(record, expected):
    parsed = published_question(record)
    assert parsed is not None and (parsed[0], parsed[2]) == expected and parsed[1] == record["choices"]


@pytest.mark.parametrize(
    "record",
    [
        {"query": "q", "choices": ["a", "b"], "gold": 2},
        {"query": "q", "choices": ["a", "b"], "gold": True},
        {"query": "q", "choices": ["a"], "gold": 0},
        {"query": "q", "choices": ["a", " "], "gold": 0},
        {"query": " ", "choices": ["a", "b"], "gold": 0},
        {"question": "q", "choices": ["a", "b"], "answer": "C"},
        {"question": "q", "choices": ["a", "b"]},
        {"question": "q", "answer": "b"},
        ARC | {"answerKey": "4"},
        HELLASWAG | {"label": ""},
    ],
)
def test_what_is_no_question_is_not_asked(record):
    """Also a test split whose answers are not published."""
    assert published_question(record) is None


@pytest.mark.parametrize(
    ("record", "text", "right"),
    [
        (ARC, "Question: Which gas do plants take in?\nAnswer:", "oxygen"),
        (HELLASWAG, "Roof shingle removal: ", "is ripping tiles off."),
        (PIQA, "Question: Cool a soup.\nAnswer:", "Stir it."),
    ],
)
def test_published_layouts_are_read_from_parquet_and_json_lines(tmp_path, record, text, right):
    (lines,) = benchmark_files(tmp_path, [record]).files
    write_parquet(tmp_path / "toy_bench.parquet", [record])
    table = replace(lines, name="toy_bench.parquet", path=str(tmp_path / "toy_bench.parquet"), format="parquet")
    for file in (lines, table):
        (question,) = questions_from_files([file], 10)
        assert question.text.startswith(text) and question.choice_list[int(question.answer)] == right


def test_broken_records_are_passed_over(tmp_path):
    (file,) = benchmark_files(tmp_path, [PIQA]).files
    path = tmp_path / "toy_bench.jsonl"
    path.write_text('["choices"]\n{"question": "q", "choices": ["a", "b"], "answer": "bro\n' + path.read_text())
    broken = replace(file, sha256="", path=str(path))
    assert len(questions_from_files([broken], 10)) == 1
    table = tmp_path / "broken.parquet"
    table.write_bytes(b"PAR1 and no more")
    assert questions_from_files([replace(file, name=table.name, path=str(table), format="parquet")], 10) == []


def _files(tmp_path, sizes):
    files = []
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        rows = [{"query": f"{name} {number}", "choices": ["a", "b"], "gold": number % 2} for number in range(size)]
        (file,) = benchmark_files(tmp_path / name, rows).files
        files.append(type(file)(**{**vars(file), "name": f"bench/{name}.jsonl"}))
    return SourceListing(tuple(files)).files


def test_every_file_gives_its_share_and_within_it_the_smallest_hashes(tmp_path):
    files = _files(tmp_path, {"large": 300, "small": 3})
    everything = questions_from_files(files, 1000)
    chosen = questions_from_files(files, 20)
    assert len(everything) == 303 and len(chosen) == 20
    of = {
        name: [question.item_id for question in chosen if f"/{name}/" in question.item_id]
        for name in ("large", "small")
    }
    assert len(of["small"]) == 3
    ordered = sorted((q.item_id for q in everything if "/large/" in q.item_id), key=order_hash)
    assert set(of["large"]) == set(ordered[:17])


def test_files_of_one_name_in_different_directories_are_different_benchmarks(tmp_path):
    """On the Hub every dataset has a file of this name."""
    tables = _files(tmp_path, {"mmlu": 2, "arc": 2, "piqa": 2})
    names = ("hf://cais/mmlu/all/test-0.jsonl", "hf://ai2/arc/test-0.jsonl", "bench/piqa.jsonl.gz")
    files = [replace(file, name=name) for file, name in zip(tables[:2], names[:2], strict=True)]
    questions = questions_from_files([*files, tables[2]], 10)
    named = {question.item_id.split("/")[1] for question in questions}
    assert named == {"hf-cais-mmlu-all-test-0", "hf-ai2-arc-test-0", "piqa"}


def test_a_broken_archive_gives_what_is_before_the_break(tmp_path):
    (file,) = _files(tmp_path, {"large": 3000})
    data = gzip.compress((tmp_path / "large/toy_bench.jsonl").read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(data[: len(data) // 2])
    cut = type(file)(**{**vars(file), "name": "bench/large.jsonl.gz", "path": str(tmp_path / "cut.jsonl.gz")})
    assert 0 < len(questions_from_files([cut], 10_000)) < 3000


def test_requests_are_read_from_parquet_as_from_json_lines(tmp_path):
    rows = [{"prompt": f"{label} {number}", "label": label} for label in LABELS for number in range(3)]
    (lines,) = (replace(file, kind="safety") for file in benchmark_files(tmp_path, rows).files)
    write_parquet(tmp_path / "requests.parquet", rows)
    table = replace(lines, name="requests.parquet", path=str(tmp_path / "requests.parquet"), format="parquet")
    for file in (lines, table):
        assert {each.text for each in choose_requests([file], tmp_path, 3)} == {row["prompt"] for row in rows}


def test_training_files_are_never_asked(tmp_path):
    (file,) = _files(tmp_path, {"large": 3})
    assert questions_from_files([type(file)(**{**vars(file), "role": "pretrain"})], 10) == []


def test_continuations_are_of_the_documents_and_the_right_one_is_after_its_context():
    texts = {f"d{number}": " ".join(f"word{number}x{index}" for index in range(60)) for number in range(6)}
    rows = [{"id": name, "unit": f"record of {name}", "domain": "web", "text": text} for name, text in texts.items()]
    questions = questions_from_documents(
        [*rows, {"id": "short", "unit": "short", "domain": "web", "text": "too short"}], 100
    )
    assert len(questions) == 6 and len({question.answer for question in questions}) > 1
    for question in questions:
        text = texts[question.item_id.split("/")[-1]]
        right = question.choice_list[int(question.answer)]
        assert text.startswith(f"{question.text} {right}") and len(question.choice_list) == 4 == len(
            set(question.choice_list)
        )
        assert {len(choice) for choice in question.choice_list} == {60}
        assert all(any(choice in other for other in texts.values()) for choice in question.choice_list)
    assert questions_from_documents(rows, 2) == questions[:2]


def test_too_few_documents_of_a_domain_give_no_question():
    rows = [
        {"id": str(number), "unit": str(number), "domain": "web", "text": f"{number} " * 400} for number in range(3)
    ]
    assert questions_from_documents(rows, 10) == []
