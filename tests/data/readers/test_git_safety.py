"""A git tree that somebody else made runs nothing here, fetches nothing, and shows nothing of what is outside of the
data directory."""

from __future__ import annotations

import os
import subprocess

import pytest

from tasks.data.readers import git_trees
from tasks.data.readers.git_trees import commit_records
from tasks.data.sources.list_sources import list_sources
from tests.data.sources.test_sources import git, write_manifest

SECRET = "a private word"


@pytest.fixture
def canary(tmp_path):
    """A program that leaves a file when it is run."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    write_manifest(tmp_path / "data", "  - {files: '**', role: pretrain, format: git, commits: 9}\n")
    return tmp_path / "data"


def made(tree, attributes="", text="x = 1\n"):
    """A repository of two commits."""
    tree.mkdir(parents=True)
    git(tree, "init")
    for number in range(2):
        (tree / ".gitattributes").write_text(attributes)
        (tree / "a.py").write_text(text * (number + 1))
        git(tree, "add", ".")
        git(tree, "commit", "-m", f"Change {number}")
    return tree


def partial_clone(tmp_path, data):
    """A clone that lacks every blob and asks its origin for what it needs."""
    origin = made(tmp_path / "origin", "*.py linguist-generated=false\n")
    git(origin, "config", "uploadpack.allowFilter", "true")
    git(data, "clone", "--filter=blob:none", "--no-checkout", f"file://{origin}", str(data / "tree"))
    git(data / "tree", "read-tree", "HEAD")
    (data / "tree" / "a.py").write_text("x = 1\n")
    return data / "tree"


def read_all(data, tree):
    """Everything that the pipeline asks git about a tree."""
    records = list(commit_records("tree/.git", str(tree), "", "", 9, 10**6))
    try:
        return records, list_sources(data).files
    except ValueError as error:
        assert "git cannot read the working tree" in str(error)
        return records, ()


def transports(program, origin):
    allowed = {f"protocol.{name}.allow": "always" for name in ("ext", "ssh", "file", "git")}
    ssh, ext = {"remote.origin.url": "ssh://host/x"}, f"ext::{program} %S"
    return {
        "ext": {"remote.origin.url": ext, **allowed},
        "ssh": {**ssh, "core.sshCommand": str(program), **allowed},
        "uploadpack": {"remote.origin.url": f"file://{origin}", "remote.origin.uploadpack": str(program), **allowed},
        "proxy": {"remote.origin.url": "git://host/x", "core.gitProxy": str(program), **allowed},
        "another name": {"remote.origin.url": "https://host/x", f"url.{ext}.insteadOf": "https://host/x", **allowed},
    }


@pytest.mark.parametrize("way", ["ext", "ssh", "uploadpack", "proxy", "another name"])
@pytest.mark.parametrize("kept", ["GIT_ALLOW_PROTOCOL", "GIT_NO_LAZY_FETCH", ""])
def test_a_partial_clone_runs_no_transport(way, kept, tmp_path, data, canary, monkeypatch):
    """Each of the two variables is enough: an older git knows only the first."""
    tree = partial_clone(tmp_path, data)
    for key, value in transports(canary, tmp_path / "origin")[way].items():
        git(tree, "config", key, value)
    subprocess.run(["git", "-C", str(tree), "log", "--patch"], capture_output=True, check=False)
    assert (tmp_path / "ran").exists(), "git by itself runs it"
    (tmp_path / "ran").unlink()
    whole = git_trees._environment
    dropped = {"GIT_ALLOW_PROTOCOL", "GIT_NO_LAZY_FETCH"} - {kept} if kept else set()
    monkeypatch.setattr(
        git_trees, "_environment", lambda tree: {k: v for k, v in whole(tree).items() if k not in dropped}
    )
    records, _ = read_all(data, tree)
    assert not (tmp_path / "ran").exists() and records[-1].reason == "broken_repository"


def test_no_setting_of_a_tree_runs_a_program(tmp_path, data, canary):
    tree = made(data / "tree", "*.py diff=evil filter=evil merge=evil\n")
    plain, plain_files = read_all(data, tree)
    settings = {
        **dict.fromkeys(
            ("core.fsmonitor", "core.pager", "core.editor", "core.askPass", "core.alternateRefsCommand", "pager.log"),
            canary,
        ),
        **dict.fromkeys(
            ("diff.external", "diff.evil.command", "diff.evil.textconv", "merge.evil.driver", "gpg.program"), canary
        ),
        **dict.fromkeys(
            ("filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "credential.helper"), canary
        ),
        **{f"alias.{name}": f"!{canary}" for name in ("log", "ls-files", "check-attr", "rev-parse", "config")},
        "log.showSignature": "true",
        "core.hooksPath": tmp_path / "hooks",
        "filter.evil.required": "true",
        "log.showRoot": "false",
        "extensions.worktreeConfig": "true",
        "submodule.recurse": "true",
        "core.worktree": "/",
    }
    (tree / "a.py").write_text("changed = 1\n")
    for directory in (tmp_path / "hooks", tree / ".git" / "hooks"):
        directory.mkdir(exist_ok=True)
        for hook in (
            "post-index-change",
            "post-checkout",
            "fsmonitor-watchman",
            "query-watchman",
            "pre-auto-gc",
            "reference-transaction",
        ):
            (directory / hook).write_bytes(canary.read_bytes())
            (directory / hook).chmod(0o755)
    for name in ("config", "config.worktree", "included"):
        with open(tree / ".git" / name, "a") as file:
            for key, value in settings.items():
                section, _, variable = key.rpartition(".")
                head, _, sub = section.partition(".")
                file.write(f'[{head} "{sub}"]\n' if sub else f"[{head}]\n")
                file.write(f"\t{variable} = {value}\n")
            if name == "config":
                file.write("[include]\n\tpath = included\n")
    records, files = read_all(data, tree)
    assert not (tmp_path / "ran").exists()
    assert [record.text for record in records] == [record.text for record in plain] and len(records) == 2
    assert [file.name for file in files] == [file.name for file in plain_files] == ["tree/.git", "tree/a.py"]


def private(tmp_path):
    return made(tmp_path / "private", text=f"{SECRET}\n")


def by_file(tree, private):
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {private}/.git\n")


def by_link(tree, private):
    tree.mkdir()
    (tree / ".git").symlink_to(private / ".git")


def by_alternates(tree, private):
    made(tree)
    (tree / ".git" / "objects" / "info" / "alternates").write_text(f"{private}/.git/objects\n")
    head = subprocess.run(["git", "-C", str(private), "rev-parse", "HEAD"], capture_output=True, check=True).stdout
    (tree / ".git" / "HEAD").write_bytes(head)


def by_quoted_alternates(tree, private):
    by_alternates(tree, private)
    (tree / ".git" / "objects" / "info" / "alternates").write_text(f'"\\057{str(private)[1:]}/.git/objects"\n')


def by_alternates_of_alternates(tree, private):
    by_alternates(tree, private)
    between = tree.parent / "objects" / "info"
    between.mkdir(parents=True)
    (between / "alternates").write_text(f"{private}/.git/objects\n")
    (tree / ".git" / "objects" / "info" / "alternates").write_text("../../../objects\n")


def by_common_directory(tree, private):
    made(tree)
    (tree / ".git" / "commondir").write_text(f"{private}/.git\n")


def by_linked_references(tree, private):
    made(tree)
    (tree / ".git" / "refs" / "heads").rename(tree / "heads")
    (tree / ".git" / "refs" / "heads").symlink_to(private / ".git" / "refs" / "heads")


def by_linked_objects(tree, private):
    made(tree)
    (tree / ".git" / "objects").rename(tree / "objects")
    (tree / ".git" / "objects").symlink_to(private / ".git" / "objects")


@pytest.mark.parametrize(
    "borrow",
    [
        by_file,
        by_link,
        by_alternates,
        by_quoted_alternates,
        by_alternates_of_alternates,
        by_common_directory,
        by_linked_references,
        by_linked_objects,
    ],
)
def test_a_tree_that_leads_to_a_repository_outside_is_refused(borrow, tmp_path, data):
    borrow(data / "tree", private(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"working tree .*tree (has its git directory outside|leads)|git directory of the working tree .*tree "
        r"leads",
    ):
        list_sources(data)


def test_a_worktree_and_a_submodule_are_read_without_the_repository_that_they_belong_to(tmp_path):
    whole, tools = made(tmp_path / "whole"), made(tmp_path / "tools")
    git(whole, "worktree", "add", str(tmp_path / "data"))
    git(whole, "-c", "protocol.file.allow=always", "submodule", "add", str(tools), "sub")
    assert [file.name for file in list_sources(tmp_path / "data").files] == ["a.py"]
    assert [file.name for file in list_sources(whole / "sub").files] == ["a.py"]


def test_a_link_to_what_git_keeps_of_its_own_is_no_text(tmp_path, data):
    tree = made(data / "tree")
    (tree / "settings.txt").symlink_to(".git/config")
    assert "tree/settings.txt" not in {file.name for file in list_sources(data).files}


def test_a_pipe_among_the_hidden_files_is_not_waited_for(tmp_path, data, monkeypatch):
    monkeypatch.setattr(git_trees, "GIT_SECONDS", 1)
    tree = made(data / "tree")
    (tree / ".gitattributes").unlink()
    os.mkfifo(tree / ".gitattributes")
    with pytest.raises(
        ValueError, match=r"git did not answer within 1 s about the working tree .*tree: look for a pipe"
    ):
        list_sources(data)
