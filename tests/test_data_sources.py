"""Which files are read, in which role."""

from __future__ import annotations

import shutil

import pytest

from tasks.data.data_directory import _glob_pattern
from tasks.data.list_sources import list_sources
from tests.data_inputs import SHARED_DATA, write_corpus, write_jsonl


def write_manifest(directory, entries: str) -> None:
    (directory / "glm46-data.yaml").write_text(f"version: 1\nentries:\n{entries}")


def roles(directory) -> dict[str, str]:
    return {file.name: file.role for file in list_sources(directory).files}


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("*.md", "a.md", True),
        ("*.md", "x/a.md", False),
        ("**", "x/y/a.md", True),
        ("bench/**", "bench/x/a.md", True),
        ("bench/**", "benches/a.md", False),
        ("**/a.md", "a.md", True),
        ("**/a.md", "x/y/a.md", True),
        ("{text,more}/*.txt", "more/a.txt", True),
        ("{text,more}/*.txt", "other/a.txt", False),
        ("x/{a,b*}.txt", "x/bcd.txt", True),
        ("a?.txt", "ab.txt", True),
        ("a.txt", "aXtxt", False),
    ],
)
def test_globs(glob, name, matches):
    assert bool(_glob_pattern(glob).fullmatch(name)) is matches


def test_the_first_matching_entry_wins_and_the_rest_is_ignored(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "d.bin"):
        (tmp_path / name).write_text("text")
    write_manifest(
        tmp_path, "  - {files: a.txt, role: evaluation}\n  - {files: b.txt, role: ignore}\n  - {files: '*.txt', role: pretrain}\n"
    )
    assert roles(tmp_path) == {"a.txt": "evaluation", "c.txt": "pretrain"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{files: '*', role: train}", r"entry 1 \(\*\): unknown role 'train'; allowed are pretrain"),
        ("{files: '*', role: pretrain, lable: x}", "unknown key 'lable'; allowed are files, role"),
        ("{files: '*', role: pretrain, domain: poems}", "unknown domain 'poems'"),
        ("{files: '*', role: pretrain, format: xml}", "unknown format 'xml'"),
        ("{role: pretrain}", "at least `files` and `role`"),
        ("{files: '*.bin', role: pretrain}", "a.bin has role pretrain, but its ending names no format: add `format:"),
    ],
)
def test_a_mistake_in_the_manifest_is_named(tmp_path, entry, message):
    (tmp_path / "a.bin").write_text("text")
    write_manifest(tmp_path, f"  - {entry}\n")
    with pytest.raises(ValueError, match=message):
        list_sources(tmp_path)


def test_without_a_manifest_only_text_like_files_are_read(tmp_path):
    for name in ("a.txt", "b.md", "src/c.py", "d.bin", ".hidden/e.txt", "f.txt.gz", "g.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    write_jsonl(tmp_path / "h.jsonl", [{"text": "x"}])
    assert {file.name: file.domain for file in list_sources(tmp_path).files} == {
        "a.txt": "web", "b.md": "web", "src/c.py": "code", "f.txt.gz": "web", "h.jsonl": "web",
    }  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "choices": ["a"], "answer": "a"},
        {"question": "q", "answer": "a"},
        {"prompt": "p", "canonical_solution": "s", "test": "t"},
    ],
)
def test_a_benchmark_without_a_role_stops_the_run(tmp_path, record):
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "bench.jsonl.gz", [record])
    with pytest.raises(ValueError, match=r"bench\.jsonl\.gz: has the fields of a benchmark.*files: 'bench\.jsonl\.gz', role: evaluation"):
        list_sources(tmp_path)
    write_manifest(tmp_path, "  - {files: 'bench.jsonl.gz', role: evaluation}\n  - {files: '*.txt', role: pretrain}\n")
    assert roles(tmp_path) == {"a.txt": "pretrain", "bench.jsonl.gz": "evaluation"}


def test_a_missing_or_empty_directory_is_one_message(tmp_path):
    with pytest.raises(ValueError, match="does not exist or is no directory"):
        list_sources(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no text to train on"):
        list_sources(tmp_path)


def test_the_digest_follows_content_and_roles_but_not_the_place(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    write_corpus(first)
    shutil.copytree(first, second)
    digest = list_sources(first).digest
    assert list_sources(second).digest == digest
    (second / "module_0.py").write_text("changed = True\n")
    assert list_sources(second).digest != digest
    manifest = first / "glm46-data.yaml"
    manifest.write_text(manifest.read_text().replace("lang: en", "lang: fr"))
    assert list_sources(first).digest != digest


def test_the_embedded_default_is_the_library_without_tests_and_the_same_each_time():
    listing = list_sources(None)
    names = [file.name for file in listing.files]
    assert "python/argparse.py" in names and "pydoc/topics.py" in names and any(name.startswith("packages/numpy-") for name in names)
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "site-packages" in name]
    assert not [name for name in names if name.startswith("packages/glm46")]
    assert list_sources(None).digest == listing.digest


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="../shared/data is not there")
def test_the_shared_data_has_no_benchmark_among_the_training_text():
    files = list_sources(SHARED_DATA).files
    found = {file.name: file.role for file in files}
    assert {found[name] for name in found if name.startswith("bench/") and name != "bench/mbpp_train.jsonl.gz"} == {"evaluation"}
    assert found["text/wikitext2_valid.txt.gz"] == "evaluation" and found["text/c4_sample.jsonl.gz"] == "pretrain"
    assert not [name for name in found if name.startswith(("html/", "warc/", "dedup/"))]
    assert {file.domain for file in files if file.role == "pretrain"} == {"web", "multilingual", "code", "commit"}
