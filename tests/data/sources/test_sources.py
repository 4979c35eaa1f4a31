"""Which files are read, in which role."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.readers.git_trees import _commits, _licence_of, commit_mark, commit_records
from tasks.data.readers.source_bytes import BLOCK_BYTES, ChangedSourceError, open_source
from tasks.data.sources.globs import Glob
from tasks.data.sources.list_sources import list_named, list_sources
from tests.support.cluster.model_hub import COMMIT, model_hub
from tests.support.data_inputs import SHARED_DATA, write_corpus, write_jsonl


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
    assert Glob(glob).fullmatch(name) is matches


def test_the_first_matching_entry_wins_and_the_rest_is_ignored(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt", "d.bin"):
        (tmp_path / name).write_text("text")
    write_manifest(
        tmp_path,
        "  - {files: a.txt, role: evaluation}\n  - {files: b.txt, role: ignore}\n  - {files: '*.txt', role: "
        "pretrain}\n",
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
    for name in ("a.txt", "b.md", "src/c.py", "d.bin", ".hidden/e.txt", "f.txt.gz", "g.csv", "i.ndjson"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    write_jsonl(tmp_path / "h.jsonl", [{"text": "x"}])
    assert {file.name: file.domain for file in list_sources(tmp_path).files} == {
        "a.txt": "web",
        "b.md": "web",
        "src/c.py": "code",
        "f.txt.gz": "web",
        "h.jsonl": "web",
        "i.ndjson": "web",
    }


@pytest.mark.parametrize(
    ("role", "form"), [("sft", "json"), ("preference", "json"), ("prompts", "json"), ("evaluation", "json")]
)
def test_a_json_file_in_a_role_of_records_is_an_array_of_them(tmp_path, role, form):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.json").write_text("[]")
    write_manifest(tmp_path, f"  - {{files: b.json, role: {role}}}\n  - {{files: '*.txt', role: pretrain}}\n")
    assert [file.format for file in list_sources(tmp_path).files] == ["text", form]
    write_manifest(tmp_path, "  - {files: '*', role: pretrain}\n")
    with pytest.raises(ValueError, match=r"b\.json has role pretrain, but its ending names no format"):
        list_sources(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "choices": ["a"], "answer": "a"},
        {"question": "q", "answer": "a"},
        {"prompt": "p", "canonical_solution": "s", "test": "t"},
        {"task_id": 1, "text": "t", "code": "c", "test_list": ["assert 1"]},
        {"question": "q", "input_output": "{}", "text": "t"},
        {"question_content": "q", "public_test_cases": "[]", "private_test_cases": "x" * 2**25},
    ],
)
def test_a_benchmark_without_a_role_stops_the_run(tmp_path, record):
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "bench.jsonl.gz", [record])
    with pytest.raises(
        ValueError,
        match=r"bench\.jsonl\.gz: has the fields of a benchmark.*files: 'bench\.jsonl\.gz', role: evaluation",
    ):
        list_sources(tmp_path)
    write_manifest(tmp_path, "  - {files: 'bench.jsonl.gz', role: evaluation}\n  - {files: '*.txt', role: pretrain}\n")
    assert roles(tmp_path) == {"a.txt": "pretrain", "bench.jsonl.gz": "evaluation"}


def test_a_benchmark_in_parquet_without_a_role_stops_the_run_and_a_broken_file_is_left_to_its_reader(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 broken PAR1")
    assert roles(tmp_path) == {"broken.parquet": "pretrain"}
    table = pa.table({"task_id": [1], "text": ["t"], "test_list": [["assert 1"]]})
    pq.write_table(table, tmp_path / "bench.parquet")
    with pytest.raises(ValueError, match=r"bench\.parquet: has the fields of a benchmark \(test_list, text\)"):
        list_sources(tmp_path)


def test_a_missing_or_empty_directory_is_one_message(tmp_path):
    with pytest.raises(ValueError, match="does not exist: name an existing directory or file"):
        list_sources(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no text to train on"):
        list_sources(tmp_path)


def test_the_digest_follows_content_and_roles_but_not_the_directory(tmp_path):
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
    assert (
        "python/argparse.py" in names
        and "pydoc/topics.py" in names
        and any(name.startswith("packages/numpy-") for name in names)
    )
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "site-packages" in name]
    assert not [name for name in names if name.startswith("packages/glm46")]
    assert list_sources(None).digest == listing.digest


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="../shared/data is not there")
def test_the_shared_data_has_no_benchmark_among_the_training_text():
    files = list_sources(SHARED_DATA).files
    roles = {file.name: file.role for file in files}
    assert {roles[name] for name in roles if name.startswith("bench/") and name != "bench/mbpp_train.jsonl.gz"} == {
        "evaluation"
    }
    assert roles["text/wikitext2_valid.txt.gz"] == "evaluation" and roles["text/c4_sample.jsonl.gz"] == "pretrain"
    assert not [name for name in roles if name.startswith(("html/", "warc/", "dedup/"))]
    assert {file.domain for file in files if file.role == "pretrain"} == {"web", "multilingual", "code", "commit"}


def test_files_that_nobody_reads_are_reported_and_compressed_json_is_json_lines(tmp_path):
    reported = []
    for name in ("a.json.gz", "b.json", "c.tar.gz", "d/e.tar.gz", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "A document."}\n'))
    assert [(file.name, file.format) for file in list_sources(tmp_path, reported.append).files] == [
        ("a.json.gz", "jsonl")
    ]
    (line,) = reported
    assert "4 of 5 files are not read (.tar.gz 2, " in line and "no ending 1" in line and ".json 1" in line


def git(directory: Path, *arguments: str) -> None:
    identity = (
        "-c",
        "user.name=n",
        "-c",
        "user.email=e@example.org",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    )
    subprocess.run(["git", *identity, "-C", str(directory), *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path):
    """A data directory with one git working tree: three commits, an ignored file, a new one and a licence."""
    tools = tmp_path / "data" / "tools"
    tools.mkdir(parents=True)
    git(tools, "init")
    git(tools, "remote", "add", "origin", "https://github.com/owner/tools.git")
    (tools / ".gitignore").write_text("build/\n*.log.txt\n")
    (tools / "LICENSE").write_text(
        "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy\nof this software"
    )
    for number, text in enumerate(("import b\n", "import b, c\n", "import c\n")):
        (tools / "a.py").write_text(text)
        git(tools, "add", ".")
        git(tools, "commit", "-m", f"Change {number}\n\nBecause.")
    (tools / "build").mkdir()
    for name in ("build/made.py", "x.log.txt", "new.py", "README.md", "picture.png"):
        (tools / name).write_text("print(1)\n")
    (tmp_path / "data" / "beside.txt").write_text("Text beside the tree.\n")
    return tmp_path / "data"


def test_a_git_tree_gives_its_files_without_the_ignored_ones_as_a_repository_with_its_licence(tree):
    files = {file.name: file for file in list_sources(tree).files}
    assert set(files) == {"beside.txt", "tools/a.py", "tools/new.py", "tools/README.md"}
    module = files["tools/a.py"]
    assert (module.repository, module.repository_path, module.licence, module.domain) == (
        "owner/tools",
        "a.py",
        "MIT",
        "code",
    )
    assert (files["tools/README.md"].domain, files["tools/README.md"].repository, files["beside.txt"].licence) == (
        "web",
        "",
        "",
    )
    root = {file.name: file for file in list_sources(tree / "tools").files}
    assert root["a.py"].repository == "owner/tools" and "build/made.py" not in root


def test_commits_of_a_tree_are_documents_where_asked_for_and_identified_by_their_head(tree):
    entry = "{files: 'tools/**', role: pretrain, format: git, domain: code, commits: 2}"
    write_manifest(tree, f"  - {entry}\n")
    files = {file.name: file for file in list_sources(tree).files}
    assert set(files) == {"tools/.git", "tools/a.py", "tools/new.py", "tools/README.md"}
    assert files["tools/README.md"].repository == "owner/tools"
    commits = files["tools/.git"]
    assert (commits.domain, commits.format, commits.max_commits) == ("commit", "git_commits", 2)
    read = list(commit_records("tools/.git", commits.path, "owner/tools", "MIT", 2, 10_000))
    texts = [record.text or "" for record in read]
    assert [text.split("\n")[0] for text in texts] == ["Change 2", "Change 1"]
    assert texts[0].endswith("-import b, c\n+import c\n") and "Because.\n" in texts[0]
    assert (
        read[0].url == f"https://github.com/owner/tools/commit/{read[0].source.removeprefix('tools/.git!')}"
        and read[0].licence == "MIT"
    )
    git(tree / "tools", "remote", "set-url", "origin", "git@example.org:owner/tools.git")
    assert [record.url for record in commit_records("tools/.git", commits.path, "owner/tools", "MIT", 2, 10_000)] == [
        "",
        "",
    ]
    assert [record.reason for record in commit_records("g", commits.path, "", "", 3, 100)] == ["record_too_long"] * 3
    git(tree / "tools", "commit", "--allow-empty", "-m", "More")
    assert {file.name: file.sha256 for file in list_sources(tree).files}["tools/.git"] != commits.sha256


def test_links_and_files_that_nobody_wrote_are_left_out_of_a_tree_whatever_they_lead_to(tree, monkeypatch):
    tools, reported = tree / "tools", []
    for name, target in (
        ("link.py", "a.py"),
        ("gone.py", "nowhere.py"),
        ("gone.html", "nowhere.html"),
        ("out.txt", "/etc/hostname"),
    ):
        (tools / name).symlink_to(target)
    (tools / ".git" / "annex").mkdir()
    (tools / ".git" / "annex" / "KEY").write_text("print(2)\n")
    (tools / "annexed.py").symlink_to(".git/annex/KEY")
    (tools / "vendor").mkdir()
    (tools / "vendor" / "v.py").write_text("x = 1\n")
    (tools / "made.html").write_text("<p>made")
    (tools / ".gitattributes").write_text(
        "vendor/** linguist-vendored\nmade.html linguist-generated=true\nnew.py linguist-generated=false\n"
    )
    git(tools, "add", ".")
    expected = {"beside.txt", "tools/a.py", "tools/new.py", "tools/README.md", "tools/annexed.py"}
    assert {file.name for file in list_sources(tree, reported.append).files} == expected
    assert "files are not read" in reported[0]
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert {file.name for file in list_sources(tree).files} == expected


def test_a_bare_repository_is_refused_unless_it_is_ignored(tree):
    subprocess.run(["git", "clone", "--bare", "--quiet", str(tree / "tools"), str(tree / "tools.git")], check=True)
    with pytest.raises(ValueError, match=r"tools\.git is a bare git repository.*`git clone .*tools\.git NEW`"):
        list_sources(tree)
    write_manifest(
        tree, "  - {files: 'tools.git/**', role: pretrain, format: git}\n  - {files: '*.txt', role: pretrain}\n"
    )
    with pytest.raises(ValueError, match=r"tools\.git is a bare git repository"):
        list_sources(tree)
    write_manifest(tree, "  - {files: 'tools.git/**', role: ignore}\n  - {files: '*.txt', role: pretrain}\n")
    assert roles(tree) == {"beside.txt": "pretrain"}


def test_worktrees_and_submodules_are_trees_of_their_own(tree, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    git(whole, "init")
    (whole / "main.py").write_text("import tools\n")
    git(whole, "-c", "protocol.file.allow=always", "submodule", "add", str(tree / "tools"), "libs/tools")
    git(tree / "tools", "worktree", "add", str(whole / "other"), "-b", "other")
    manifest = "  - {files: '**', role: pretrain, format: git, commits: 1}\n"
    write_manifest(whole, manifest)
    git(whole, "commit", "-m", "Begin")
    files = {file.name: file for file in list_sources(whole).files}
    assert set(files) == {".git", "main.py", "libs/tools/.git", "libs/tools/a.py", "other/.git", "other/a.py"}
    assert (files["other/a.py"].repository, files["libs/tools/a.py"].repository_path) == ("owner/tools", "a.py")
    for name in ("libs/tools/.git", "other/.git"):
        (record,) = commit_records(name, files[name].path, "", "", 1, 10_000)
        assert record.text is not None and record.text.startswith("Change 2\n")
    (whole / "main.py").unlink()
    shutil.rmtree(whole / ".git")
    with pytest.raises(
        ValueError, match=r"git cannot read the working tree .*libs/tools: .*: repair it, or remove its \.git"
    ):
        list_sources(whole)


def test_a_broken_tree_is_not_taken_for_the_one_around_it(tree):
    (tree / "tools" / "inner" / ".git").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"git cannot read the working tree .*inner: fatal: not a git repository"):
        list_sources(tree)


def test_the_end_of_a_shallow_clone_is_no_commit(tree, tmp_path):
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "2", f"file://{tree / 'tools'}", str(tmp_path / "clone")], check=True
    )
    records = list(commit_records("c", str(tmp_path / "clone"), "", "", 9, 10_000))
    assert [(record.reason, (record.text or "")[:8]) for record in records] == [
        ("", "Change 2"),
        ("shallow_commit", ""),
    ]
    assert "git fetch --unshallow" in records[1].detail


def test_patches_do_not_follow_anybodys_settings_and_a_mark_inside_one_is_text(tree, tmp_path, monkeypatch):
    tools = tree / "tools"
    before = [record.text for record in commit_records("c", str(tools), "", "", 9, 10_000)]
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[diff]\n\tnoprefix = true\n\tcontext = 0\n[core]\n\tabbrev = 20\n[i18n]\n\tlogOutputEncoding = latin1\n"
    )
    monkeypatch.setenv("HOME", str(home))
    for key, value in (
        ("diff.mnemonicPrefix", "true"),
        ("diff.algorithm", "patience"),
        ("core.abbrev", "20"),
        ("diff.relative", "true"),
    ):
        git(tools, "config", key, value)
    assert [record.text for record in commit_records("c", str(tools), "", "", 9, 10_000)] == before
    head = subprocess.run(
        ["git", "-C", str(tools), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (tools / "a.py").write_bytes(b"x = 1\n" * 2000 + b"\0" + head.encode() + b" " + b"0" * 40 + b"\nforged\n")
    git(tools, "commit", "-am", "Héllo")
    records = list(commit_records("c", str(tools), "", "", 9, 10**6))
    assert [record.reason for record in records] == ["binary", "", "", ""]


def test_warnings_of_git_do_not_stop_it_and_a_broken_repository_is_rejected(tree, tmp_path):
    tools = tree / "tools"
    objects = sorted((tools / ".git" / "objects").glob("??/*"), key=lambda path: path.stat().st_size)
    for path in objects:
        path.chmod(0o644)
        if zlib.decompress(path.read_bytes()).startswith(b"blob 9\0"):
            path.write_bytes(b"broken")
    assert [record.reason for record in commit_records("c", str(tools), "", "", 9, 10_000)][-1] == "broken_repository"


@pytest.mark.parametrize("size", [10, BLOCK_BYTES - 5, 9 * BLOCK_BYTES])
def test_commits_of_any_size_are_separated(size):
    mark = commit_mark("f" * 40)
    output = io.BytesIO(
        b"".join(mark + b"%040d\n" % number + b"x" * length + b"\n" for number, length in enumerate((5, size, 7)))
    )
    commits = list(_commits(output, mark, 2 * BLOCK_BYTES))
    assert [(int(commit), length) for commit, _, length in commits] == [(0, 6), (1, size + 1), (2, 8)]
    assert all(len(data) <= 4 * BLOCK_BYTES for _, data, _ in commits)


def test_a_mistake_about_git_is_named(tree):
    write_manifest(tree, "  - {files: '*.txt', role: pretrain, format: git}\n")
    with pytest.raises(
        ValueError, match=r"\*\.txt has format git, but no git working tree holds files that it matches"
    ):
        list_sources(tree)
    write_manifest(tree, "  - {files: '*.txt', role: pretrain, commits: 5}\n")
    with pytest.raises(ValueError, match=r"commits is 5; allowed is a number, where the entry says `format: git`"):
        list_sources(tree)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Apache License\n   Version 2.0, January 2004", "Apache-2.0"),
        ("GNU GENERAL PUBLIC LICENSE\n   Version 3, 29 June 2007", "GPL-3.0"),
        ("GNU LESSER GENERAL PUBLIC LICENSE\n Version 3, 29 June 2007", "LGPL-3.0"),
        ("Redistribution and use in source and binary forms, with", "BSD-2-Clause"),
        ("Redistribution and use in source and binary forms, with\n3. Neither the name of", "BSD-3-Clause"),
        ("// SPDX-License-Identifier: 0BSD\nanything", "0BSD"),
        ("All rights reserved.", ""),
    ],
)
def test_licences_are_recognized_by_their_text(tmp_path, text, expected):
    assert _licence_of(tmp_path) == ""
    (tmp_path / "LICENSE.txt").write_text(text)
    assert _licence_of(tmp_path) == expected


def put_directory(directory: Path, prefix: str) -> None:
    import boto3

    for path in sorted(directory.rglob("*")):
        if path.is_file():
            boto3.client("s3").upload_file(str(path), "glm46", f"{prefix}/{path.relative_to(directory).as_posix()}")


def test_a_bucket_has_the_roles_and_names_of_the_same_directory_and_follows_its_content(tmp_path, s3_server):
    import boto3

    write_corpus(tmp_path)
    put_directory(tmp_path, "corpus/one")
    local, remote = list_sources(tmp_path), list_sources("s3://glm46/corpus/one/")
    assert [(file.name, file.role, file.format, file.domain, file.size) for file in remote.files] == [
        (file.name, file.role, file.format, file.domain, file.size) for file in local.files
    ]
    assert all(
        file.sha256.startswith("etag:") and file.path.startswith("s3://glm46/corpus/one/") for file in remote.files
    )
    put_directory(tmp_path, "corpus/two")
    assert list_sources("s3://glm46/corpus/two").digest == remote.digest
    boto3.client("s3").put_object(Bucket="glm46", Key="corpus/two/module_0.py", Body=b"changed = True\n")
    assert list_sources("s3://glm46/corpus/two").digest != remote.digest


@pytest.mark.parametrize("address", ["s3://none/prefix", "s3://glm46/empty", "hf://just-a-name"])
def test_an_address_that_does_not_exist_is_one_message(address, s3_server):
    with pytest.raises(ValueError, match=re.escape(address)):
        list_sources(address)


def test_an_object_is_read_by_ranges_and_refused_when_it_changed(s3_server):
    import boto3

    data = np.random.default_rng(1).bytes(300_000)
    tag = boto3.client("s3").put_object(Bucket="glm46", Key="object", Body=data)["ETag"].strip('"')
    with open_source("s3://glm46/object", f"etag:{tag}", buffer_bytes=65536) as file:
        assert file.read(10) == data[:10] and file.seek(-5, 2) == 299_995 and file.read() == data[-5:]
        file.seek(0)
        assert file.read() == data
        boto3.client("s3").put_object(Bucket="glm46", Key="object", Body=data[:-1] + b"x")
        file.seek(0)
        with pytest.raises(ChangedSourceError):
            file.read()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server that answers as the Hugging Face hub does, with one dataset."""
    write_jsonl(tmp_path / "train.jsonl.gz", [{"text": "From the hub."}])
    data, card = (tmp_path / "train.jsonl.gz").read_bytes(), b"---\nlicense: cc0-1.0\n---\n"
    files = {"en/train.jsonl.gz": data, "fr/train.jsonl.gz": data, "en/test.jsonl.gz": data, "README.md": card}
    listed: list[dict] = [{"rfilename": name, "size": len(body), "blobId": "b" * 40} for name, body in files.items()]
    listed[0]["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    described = {"id": "owner/name", "sha": COMMIT, "siblings": listed, "cardData": {"license": "cc0-1.0"}}

    def answer(path):
        return described if path.startswith("/api/datasets/owner/name") else None

    with model_hub(files, answer, tmp_path / "cache", monkeypatch):
        yield COMMIT


def test_a_dataset_of_the_hub_is_listed_by_its_revision_without_what_it_holds_out(hub):
    files = list_sources("hf://owner/name").files
    assert [file.name for file in files] == ["en/train.jsonl.gz", "fr/train.jsonl.gz"]
    assert files[0].path == f"hf://owner/name@{hub}/en/train.jsonl.gz" and files[0].licence == "cc0-1.0"
    assert len(files[0].sha256) == 64 and files[1].sha256 == "etag:" + "b" * 40
    with open_source(files[0].path) as file:
        assert gzip.decompress(file.read()) == b'{"text": "From the hub."}\n'
    assert [file.name for file in list_sources("hf://owner/name/fr").files] == ["fr/train.jsonl.gz"]
    with pytest.raises(ValueError, match=r"has no files under 'de': name one of its directories \(en, fr\)"):
        list_sources("hf://owner/name/de")


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (["c4-train.00000.jsonl", "c4-validation.00000-of-00008.jsonl"], ["c4-train.00000.jsonl"]),
        (
            ["a.jsonl", "val.jsonl", "lambada_test_en.jsonl", "test/b.jsonl", "ast_val/c.jsonl", "testset.jsonl"],
            ["a.jsonl"],
        ),
        (["dev.to/a.jsonl", "hin-dev/train.jsonl"], ["dev.to/a.jsonl", "hin-dev/train.jsonl"]),
        (["test.jsonl"], ["test.jsonl"]),
        (["wiki.train.txt", "wiki.valid.txt", "latest.txt"], ["latest.txt", "wiki.train.txt"]),
        (["a.txt", "test.txt", "tests/test_a.py"], ["a.txt", "test.txt", "tests/test_a.py"]),
        (["a.jsonl", "enwiki-pages-articles-multistream-index.txt"], ["a.jsonl"]),
    ],
)
def test_files_named_as_held_out_splits_are_not_trained_on(tmp_path, files, read):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "Some words."}\n')
    said = []
    assert [file.name for file in list_sources(tmp_path, said.append).files] == read
    held_out = [name for name in files if name not in read and "index" not in name]
    assert bool(held_out) == any(f"; {len(held_out)} named as test or validation splits" in line for line in said)


def test_the_card_of_a_downloaded_dataset_is_no_document(tmp_path):
    card = "---\nlicense: mit\n---\n# A dataset\n"
    for name, text in {"set/README.md": card, "set/data/train.jsonl": '{"text": "Some words."}\n'}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, text in {"notes/README.md": card, "README.md": "# Of all sets\n", "set/data/card.md": card}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    read = [file.name for file in list_sources(tmp_path).files]
    assert read == ["README.md", "notes/README.md", "set/data/card.md", "set/data/train.jsonl"]


def test_a_pointer_of_git_lfs_is_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12345\n")
    with pytest.raises(ValueError, match=r"a\.txt is a pointer of Git LFS, not the file: run `git lfs pull`"):
        list_sources(tmp_path)


@pytest.mark.parametrize("name", ["mbpp.jsonl", "mbpp.json", "mbpp.csv"])
def test_a_benchmark_is_seen_after_a_blank_line_and_where_it_is_named_itself(tmp_path, name):
    record = json.dumps({"text": "Write a function.", "test_list": "[]"})
    texts = {"jsonl": f"\n{record}\n", "json": f"[{record}]", "csv": "text,test_list\nWrite a function.,[]\n"}
    (tmp_path / name).write_text(texts[name.partition(".")[2]])
    with pytest.raises(ValueError, match=r"has the fields of a benchmark \(test_list, text\)"):
        list_sources(tmp_path / name)


def test_a_dataset_without_a_network_is_one_message(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"dataset hf://owner/name cannot be listed.*network.*or download it and name the directory"
    ):
        list_sources("hf://owner/name")


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.data.sources.list_sources.REPORTED_BYTES", 10**8)
    for number in range(5):
        with open(tmp_path / f"{number}.txt", "wb") as file:
            file.truncate(6 * 10**7)
    reported = []
    list_sources(tmp_path, reported.append)
    assert reported == ["sources: 0.1 of 0.3 GB hashed", "sources: 0.2 of 0.3 GB hashed"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            "{files: 'bnech/*.txt', role: evaluation}",
            r"entry 1 \(bnech/\*\.txt, role evaluation\): no file matches it: .*correct the glob",
        ),
        (
            "{files: '**', role: pretrain}\n  - {files: 'bench/*', role: evaluation}",
            r"entry 2 .*bench/b\.txt\) belongs to the earlier",
        ),
        (
            "{files: ['*.txt', '*.md'], role: pretrain}",
            r"files is \['\*\.txt', '\*\.md'\]; allowed is one string: give each glob an entry",
        ),
        (
            "{files: '*.txt', role: pretrain, lang: no}",
            r"lang is False; allowed is one string: write it in quotes .*lang: 'no'",
        ),
        (
            "{files: '*.txt', role: pretrain, text: {a: b}}",
            r"text is \{'a': 'b'\}; allowed is the name of a field or a list",
        ),
        ("{files: '*.txt', role: pretrain, text: []}", r"text is \[\]; allowed"),
    ],
)
def test_a_slip_of_the_pen_in_the_manifest_is_no_silence(tmp_path, entries, message):
    (tmp_path / "bench").mkdir()
    for name in ("a.txt", "bench/b.txt"):
        (tmp_path / name).write_text("text")
    write_manifest(tmp_path, f"  - {entries}\n")
    with pytest.raises(ValueError, match=message):
        list_sources(tmp_path)


def test_an_idle_entry_that_ignores_is_allowed(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    write_manifest(
        tmp_path, "  - {files: 'drafts/**', role: ignore}\n  - {files: '*.txt', role: pretrain, lang: 'no'}\n"
    )
    assert [file.lang for file in list_sources(tmp_path).files] == ["no"]


def test_a_key_that_occurs_twice_in_a_manifest_is_named(tmp_path):
    """The last one would win: a benchmark would be training text."""
    (tmp_path / "bench.txt").write_text("text")
    write_manifest(tmp_path, "  - {files: '*.txt', role: evaluation, role: pretrain}\n")
    with pytest.raises(ValueError, match=r"glm46-data\.yaml is not a YAML file: key 'role' occurs twice"):
        list_sources(tmp_path)
    write_manifest(
        tmp_path,
        "  - &first {files: '*.md', role: ignore, lang: en}\n  - {<<: *first, files: '*.txt', role: pretrain}\n",
    )
    assert [(file.name, file.lang) for file in list_sources(tmp_path).files] == [("bench.txt", "en")]


def test_a_glob_of_many_stars_reads_a_name_once(tmp_path):
    name = "a/" * 100 + "a" * 3000
    assert not any(
        Glob(glob).fullmatch(name)
        for glob in ("**" * 30 + "x", "*a" * 200 + "b", "**/" * 100 + "x", "{*,**}" * 9 + "x")
    )
    with pytest.raises(ValueError, match=r"glm46-data\.yaml: glob .* has 1024 alternatives, at most 1000"):
        write_manifest(tmp_path, f"  - {{files: '{'{a,b}' * 10}', role: pretrain}}\n")
        list_sources(tmp_path)


def test_a_manifest_under_another_ending_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "glm46-data.yml").write_text("version: 1\nentries: []\n")
    with pytest.raises(ValueError, match=r"glm46-data\.yml: roles are read from glm46-data\.yaml: rename it"):
        list_sources(tmp_path)


def test_directories_are_read_once_by_their_own_name_and_links_out_of_them_are_named_and_not_followed(tmp_path):
    data, other, reported = tmp_path / "data", tmp_path / "other", []
    for path in (data / "b" / "own.txt", data / ".kept" / "linked.txt", other / "deep" / "foreign.txt"):
        path.parent.mkdir(parents=True)
        path.write_text("text")
    inside = (("a", data / "b"), ("loop", data), ("kept", data / ".kept"), ("b/same.txt", data / "b" / "own.txt"))
    outside = (
        ("up", tmp_path),
        ("more", other),
        ("b/again", other),
        ("x.txt", other / "deep" / "foreign.txt"),
        ("gone.txt", "/nowhere"),
    )
    for name, target in (*inside, *outside):
        (data / name).symlink_to(target)
    files = list_sources(data, reported.append).files
    assert [file.name for file in files] == ["b/own.txt", "b/same.txt", "kept/linked.txt"]
    assert (
        f"5 links lead out of it and are not followed, such as b/again -> {other}: put what they lead to there"
        in reported[-1]
    )
    (tmp_path / "link").symlink_to(data)
    assert len(list_sources(tmp_path / "link").files) == 3


def test_a_directory_of_links_alone_and_a_manifest_elsewhere_are_named(tmp_path):
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    write_corpus(other)
    for path in other.glob("*.jsonl*"):
        (data / path.name).symlink_to(path)
    with pytest.raises(
        ValueError, match=r"holds no text to train on \(\d+ links lead out of it and are not followed, such as .* -> /"
    ):
        list_sources(data)
    write_manifest(other, "  - {files: '**', role: ignore}\n")
    (data / "glm46-data.yaml").symlink_to(other / "glm46-data.yaml")
    with pytest.raises(ValueError, match=r"glm46-data\.yaml is a link out of .*: put the file itself there"):
        list_sources(data)


def test_what_is_no_readable_file_is_named_and_not_waited_for(tmp_path):
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"link\.txt is a link that leads nowhere: remove it"):
        list_sources(tmp_path)
    (tmp_path / "link.txt").unlink()
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt is no regular file"):
        list_sources(tmp_path)
    (tmp_path / "pipe.txt").unlink()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is no regular file"):
        list_sources(tmp_path)
    (tmp_path / "pipe.jsonl").unlink()
    os.mkfifo(tmp_path / "glm46-data.yaml")
    with pytest.raises(ValueError, match=r"glm46-data\.yaml is no regular file"):
        list_sources(tmp_path)
    (tmp_path / "glm46-data.yaml").unlink()
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))).write_text("text")
    with pytest.raises(ValueError, match=r"caf\\xe9\.txt': the name is not UTF-8: rename it"):
        list_sources(tmp_path)


def test_a_first_line_that_nests_too_deep_to_be_looked_at_is_left_to_the_reader(tmp_path):
    (tmp_path / "deep.jsonl").write_text('{"text":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert roles(tmp_path) == {"deep.jsonl": "pretrain"}


def test_a_run_on_conversations_lists_no_other_text(tmp_path):
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    for name, text in (("chats.jsonl", chat), ("page.html", "<p>a"), ("notes.txt", "text"), ("app.py", "x = 1")):
        (tmp_path / name).write_text(text)
    listed = [(file.name, file.role) for file in list_sources(tmp_path, needed="sft").files]
    assert listed == [("chats.jsonl", "sft")]
    assert list_sources(tmp_path / "chats.jsonl", needed="sft").files == list_sources(tmp_path, needed="sft").files
    assert roles(tmp_path)["chats.jsonl"] == "pretrain"
    (tmp_path / "chats.json").write_text("{}")
    assert "chats.json" not in {file.name for file in list_sources(tmp_path, needed="sft").files}, "may be settings"
    (named,) = list_sources(tmp_path / "chats.json", needed="sft").files
    assert (named.role, named.format) == ("sft", "json")
    entries = [{"files": "notes.txt", "role": "pretrain"}, {"files": "chats.jsonl", "role": "evaluation"}]
    (tmp_path / "glm46-data.yaml").write_text(json.dumps({"version": 1, "entries": entries}))
    with pytest.raises(ValueError, match=r"holds no conversations: name a \.jsonl \(one conversation per line\)"):
        list_sources(tmp_path, needed="sft")


def test_a_held_out_split_beside_a_training_split_may_be_evaluated_on(tmp_path):
    for name in ("train.jsonl", "test.jsonl"):
        write_jsonl(tmp_path / name, [{"text": "Some words."}])
    listed = list_named(str(tmp_path), {"test.jsonl": "words", "train.jsonl": "words"})
    assert {file.name: file.role for file in listed.files} == {"test.jsonl": "evaluation", "train.jsonl": "pretrain"}
