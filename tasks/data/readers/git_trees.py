"""Reads git working trees: their files without the ignored ones, their licence, and commits as message and patch.

Git is asked without hooks, monitors, external differs, text converters or transports. So a tree that somebody else
made can run no program here, and a partial clone cannot fetch. Nor can a tree show what is outside of the data
directory: git directories, links in them and borrowed objects (git_directories). Git's answers depend only on the
repository: not on the settings of the user, nor on the variables that git sets for its hooks. Runs in executors
(commit_records): imports no Spark.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.data.readers.git_directories import refuse_outside
from tasks.data.readers.parsed_records import Parsed, rejection, too_long
from tasks.data.readers.source_bytes import BLOCK_BYTES
from tasks.data.readers.text_records import text_record

GIT_DIRECTORY, GIT_COMMITS = ".git", "git_commits"
SAFE = (
    "git",
    "-c",
    "safe.directory=*",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.quotePath=false",
    "-c",
    "log.showSignature=false",
    "-c",
    "protocol.allow=never",
    "-c",
    "core.excludesFile=/dev/null",
    "-c",
    "core.attributesFile=/dev/null",
    "-c",
    "core.abbrev=7",
    "-c",
    "diff.suppressBlankEmpty=false",
    "-c",
    "submodule.recurse=false",
    "-c",
    "log.showRoot=true",
    "--no-replace-objects",
    "--no-pager",
)
LOG = (
    "log",
    "--patch",
    "--no-merges",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--no-relative",
    "--encoding=UTF-8",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=default",
    "--indent-heuristic",
    "--submodule=short",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "-O/dev/null",
)
"""Options that fix the form of a patch, whatever the repository's own settings are."""
GIT_SECONDS = 600
"""Time limit of one git command: git would wait for ever for a pipe that it takes for a file."""
LICENCE_CHARACTERS = 1 << 16
LEFT_OUT_ATTRIBUTES = ("linguist-generated", "linguist-vendored")
"""Attributes by which .gitattributes marks generated and vendored files."""
LICENCE_NAMES = ("LICENSE", "LICENCE", "COPYING", "UNLICENSE")
LICENCE_HEADERS = (
    ("AGPL-3.0", r"GNU AFFERO GENERAL PUBLIC LICENSE\s+Version 3"),
    ("LGPL-3.0", r"GNU LESSER GENERAL PUBLIC LICENSE\s+Version 3"),
    ("LGPL-2.1", r"GNU LESSER GENERAL PUBLIC LICENSE\s+Version 2\.1"),
    ("GPL-3.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 3"),
    ("GPL-2.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 2"),
    ("Apache-2.0", r"Apache License\s+Version 2\.0"),
    ("MPL-2.0", r"Mozilla Public License\s+Version 2\.0"),
    ("EPL-2.0", r"Eclipse Public License - v 2\.0"),
    ("BSL-1.0", r"Boost Software License - Version 1\.0"),
    ("CC0-1.0", r"CC0 1\.0 Universal"),
    ("Unlicense", r"This is free and unencumbered software released into the public domain"),
    ("CC-BY-SA-4.0", r"Attribution-ShareAlike 4\.0 International"),
    ("CC-BY-4.0", r"Attribution 4\.0 International"),
    ("MIT", r"Permission is hereby granted, free of charge, to any person obtaining a copy\s+of this software"),
    (
        "ISC",
        r"Permission to use, copy, modify, and(?:/or)? distribute this software for any\s+purpose with or without fee",
    ),
    ("BSD-3-Clause", r"Redistribution and use in source and binary forms[\s\S]*Neither the name"),
    ("BSD-2-Clause", r"Redistribution and use in source and binary forms"),
)
"""SPDX identifiers with a pattern of their texts, the more specific ones first."""

GITHUB = re.compile(r"(?:^|[/@])(?:www\.)?github\.com[:/]")
"""Matches origins on GitHub: other hosts have other addresses for a commit."""


@dataclass(frozen=True)
class GitTree:
    """A working tree below a data directory."""

    root: str
    """Relative to the data directory; empty where it is the data directory."""
    path: str
    """Absolute path."""
    name: str
    """owner/name of its origin, else its directory; `repository` for a data directory without an origin."""
    licence: str
    head: str
    """The commit checked out; empty before the first one."""
    files: frozenset[str]
    """Tracked files and new files that are not ignored, relative to the data directory."""
    left_out: frozenset[str]
    """Generated and vendored files, and links: their target is another file of the tree or outside of it."""


def read_tree(directory: Path, root: str) -> GitTree:
    """The working tree at `root` below `directory`. Raises ValueError where git is missing or cannot read the tree, and
    where its git directory leads out of `directory`."""
    tree = directory / root
    git_dir, common_dir = (Path(_path_of(tree, name)) for name in ("--absolute-git-dir", "--git-common-dir"))
    refuse_outside(directory, tree, git_dir, tree / common_dir)
    listed = (
        _git(tree, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        .decode("utf-8", "surrogateescape")
        .split("\0")
    )
    left_out = {name for name in listed if name and _is_foreign_link(tree, name)} | _marked_files(tree, listed)
    prefix = f"{root}/" if root else ""
    origin = _origin_of(tree)
    named = re.search(r"([^/:]+/[^/:]+?)(?:\.git)?/?$", origin) if "/" in origin or ":" in origin else None
    return GitTree(
        root=root,
        path=str(tree.absolute()),
        name=named[1] if named else root or "repository",
        licence=_licence_of(tree),
        head=_git(tree, "rev-parse", "--verify", "HEAD", may_fail=True).decode().strip(),
        files=frozenset(f"{prefix}{name}" for name in listed if name and name not in left_out),
        left_out=frozenset(prefix + name for name in left_out),
    )


def _is_foreign_link(tree: Path, name: str) -> bool:
    """Whether a name is a link, except one into .git/annex: that is a file that git-annex keeps there."""
    path = tree / name
    return path.is_symlink() and not (
        path.is_file() and path.resolve().is_relative_to((tree / GIT_DIRECTORY / "annex").resolve())
    )


def _marked_files(tree: Path, names: list[str]) -> set[str]:
    asked = "\0".join(names).encode("utf-8", "surrogateescape")
    answer = (
        _git(tree, "check-attr", "--stdin", "-z", *LEFT_OUT_ATTRIBUTES, given=asked)
        .decode("utf-8", "surrogateescape")
        .split("\0")
    )
    return {name for name, value in zip(answer[0::3], answer[2::3], strict=False) if value in ("set", "true")}


def _origin_of(tree: Path) -> str:
    return _git(tree, "config", "--get", "remote.origin.url", may_fail=True).decode().strip()


def commits_digest(head: str, limit: int) -> str:
    """A digest of what commit_records gives: a commit's name covers its whole history."""
    return hashlib.sha256(f"{head}\n{limit}".encode()).hexdigest()


def head_of(path: str) -> str:
    """The commit that is checked out."""
    return _git(Path(path), "rev-parse", "--verify", "HEAD", may_fail=True).decode().strip()


def commit_records(
    name: str, path: str, repository: str, licence: str, limit: int, max_record_bytes: int
) -> Iterator[Parsed]:
    """The newest commits without merges, one per record: message, then patch. The commit is part of the record's
    source; its offset is 0."""
    head, shallow = head_of(path), _shallow_commits(Path(path))
    command = [*SAFE, "-C", path, *LOG, f"--max-count={limit}", f"--format=%x00{head} %H%n%B", head]
    is_on_github = GITHUB.search(_origin_of(Path(path))) is not None
    with tempfile.TemporaryFile() as problems:  # git would block on a full pipe after 64 KB of warnings
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=problems, env=_environment(Path(path)))
        assert process.stdout is not None
        try:
            for commit, data, size in _commits(process.stdout, commit_mark(head), max_record_bytes):
                source = f"{name}!{commit}"
                if commit in shallow:
                    yield rejection(
                        source,
                        0,
                        "shallow_commit",
                        "this clone ends here, so its patch is the whole tree: git fetch --unshallow",
                    )
                elif size > max_record_bytes:
                    yield too_long(source, 0, size, max_record_bytes)
                else:
                    url = f"https://github.com/{repository}/commit/{commit}" if is_on_github else ""
                    yield replace(text_record(source, 0, data), url=url, licence=licence, repository=repository)
            if process.wait() != 0:
                problems.seek(0)
                yield rejection(
                    name, 0, "broken_repository", problems.read(BLOCK_BYTES).decode(errors="replace").strip()
                )
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _shallow_commits(tree: Path) -> set[str]:
    """The oldest commits of a shallow clone, which git shows as commits without a parent."""
    path = tree / _path_of(tree, "--git-path", "shallow")
    return {*path.read_text().split()} if path.is_file() else set()


def _path_of(tree: Path, *which: str) -> str:
    return _git(tree, "rev-parse", *which).decode("utf-8", "surrogateescape").removesuffix("\n")


def commit_mark(head: str) -> bytes:
    """The mark before each commit in git's output: no file committed up to `head` can hold the name of `head`."""
    return b"\x00" + head.encode() + b" "


def _commits(stream: object, mark: bytes, max_record_bytes: int) -> Iterator[tuple[str, bytes, int]]:
    """(commit, message and patch, bytes) of git's output; at most `max_record_bytes` of a commit are kept in memory."""
    buffer, skipped, is_last = bytearray(), 0, False
    while not is_last:
        block = stream.read(BLOCK_BYTES)  # pyright: ignore[reportAttributeAccessIssue]
        is_last = not block
        buffer += block
        while (end := buffer.find(mark, len(mark))) >= 0 or (is_last and buffer):
            end = len(buffer) if end < 0 else end
            head = bytes(buffer[len(mark) : end])
            commit, _, text = head.partition(b"\n")
            message, between, patch = text.partition(b"\ndiff --git ")
            yield (
                commit.decode(),
                message.strip() + b"\n" + between + patch.rstrip(b"\n") + (b"\n" if patch else b""),
                len(text) + skipped,
            )
            del buffer[:end]
            skipped = 0
        if len(buffer) > max_record_bytes + BLOCK_BYTES:
            cut = len(buffer) - len(mark)
            skipped += cut - max_record_bytes
            del buffer[max_record_bytes:cut]


def _licence_of(tree: Path) -> str:
    """The SPDX identifier of the tree's licence file, by its header; empty where there is no file or it is unknown."""
    names = sorted(
        entry.name for entry in tree.iterdir() if entry.name.upper().split(".")[0] in LICENCE_NAMES and entry.is_file()
    )
    for name in names:
        with open(tree / name, encoding="utf-8", errors="replace") as file:
            text = file.read(LICENCE_CHARACTERS)
        stated = re.search(r"SPDX-License-Identifier:\s*([\w.+-]+)", text)
        licence = (
            stated[1]
            if stated
            else next((spdx for spdx, header in LICENCE_HEADERS if re.search(header, text, re.I)), "")
        )
        if licence:
            return licence
    return ""


def _environment(tree: Path) -> dict[str, str]:
    """Environment that ties git to this tree: not to a hook's GIT_DIR, a repository above a broken .git, or a directory
    in the tree's settings. GIT_ALLOW_PROTOCOL overrides the tree's own protocol.NAME.allow."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    tree = tree.absolute()
    return kept | {
        "GIT_DIR": str(tree / GIT_DIRECTORY),
        "GIT_WORK_TREE": str(tree),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }


def _git(tree: Path, *arguments: str, given: bytes = b"", may_fail: bool = False) -> bytes:
    try:
        completed = subprocess.run(
            [*SAFE, "-C", str(tree), *arguments],
            input=given,
            capture_output=True,
            check=False,
            env=_environment(tree),
            timeout=GIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"git did not answer within {GIT_SECONDS} s about the working tree {tree}: look for a pipe among its "
            f"hidden files, or remove "
            f"its {GIT_DIRECTORY}"
        ) from error
    except FileNotFoundError as error:
        raise ValueError(
            f"{tree} is a git working tree, but there is no program `git`: install git, or remove {tree}/.git"
        ) from error
    if completed.returncode and not may_fail:
        problem = completed.stderr.decode(errors="replace").strip()
        raise ValueError(
            f"git cannot read the working tree {tree}: {problem}: repair it, or remove its {GIT_DIRECTORY}"
        )
    return b"" if completed.returncode else completed.stdout
