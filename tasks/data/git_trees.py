"""Git working trees as sources: their files without the ignored ones, their licence, and commits as message and patch.

Runs in executors (commit_records): imports no Spark. Git is asked without hooks, monitors, external differs or text converters: a tree
that somebody else made must not run a program here.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.parsed_records import Parsed, rejection, too_long
from tasks.data.source_bytes import BLOCK_BYTES

GIT_DIRECTORY, GIT_COMMITS = ".git", "git_commits"
SAFE = (
    "git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false",
    "-c", "log.showSignature=false", "--no-pager",
)  # fmt: skip
MARK = b"\x00\x01commit "
"""Between commits: git shows no patch of a file that holds a NUL character."""
LICENCE_NAMES = ("LICENSE", "LICENCE", "COPYING", "UNLICENSE")
LICENCE_HEADERS = (
    ("AGPL-3.0", r"GNU AFFERO GENERAL PUBLIC LICENSE\s+Version 3"), ("LGPL-3.0", r"GNU LESSER GENERAL PUBLIC LICENSE\s+Version 3"),
    ("LGPL-2.1", r"GNU LESSER GENERAL PUBLIC LICENSE\s+Version 2\.1"), ("GPL-3.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 3"),
    ("GPL-2.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 2"), ("Apache-2.0", r"Apache License\s+Version 2\.0"),
    ("MPL-2.0", r"Mozilla Public License\s+Version 2\.0"), ("EPL-2.0", r"Eclipse Public License - v 2\.0"),
    ("BSL-1.0", r"Boost Software License - Version 1\.0"), ("CC0-1.0", r"CC0 1\.0 Universal"),
    ("Unlicense", r"This is free and unencumbered software released into the public domain"),
    ("CC-BY-SA-4.0", r"Attribution-ShareAlike 4\.0 International"), ("CC-BY-4.0", r"Attribution 4\.0 International"),
    ("MIT", r"Permission is hereby granted, free of charge, to any person obtaining a copy\s+of this software"),
    ("ISC", r"Permission to use, copy, modify, and(?:/or)? distribute this software for any\s+purpose with or without fee"),
    ("BSD-3-Clause", r"Redistribution and use in source and binary forms[\s\S]*Neither the name"),
    ("BSD-2-Clause", r"Redistribution and use in source and binary forms"),
)  # fmt: skip
"""SPDX identifiers by what their texts say, the more specific ones first."""

GITHUB = re.compile(r"(?:^|[/@])(?:www\.)?github\.com[:/]")
"""In the address of an origin: other hosts have other addresses for a commit."""


@dataclass(frozen=True)
class GitTree:
    """A working tree below a data directory."""

    root: str
    """Relative to the data directory; empty where it is the data directory."""
    place: str
    """Absolute."""
    name: str
    """owner/name of its origin, else its directory; `repository` for a data directory without an origin."""
    licence: str
    head: str
    """The commit checked out; empty before the first one."""
    files: frozenset[str]
    """Tracked ones and new ones that are not ignored, relative to the data directory."""


def read_tree(directory: Path, root: str) -> GitTree:
    """Raises ValueError where git is missing or cannot read the tree."""
    place = directory / root
    listed = _git(place, "ls-files", "--cached", "--others", "--exclude-standard", "-z").decode("utf-8", "surrogateescape").split("\0")
    prefix = f"{root}/" if root else ""
    origin = _origin_of(place)
    named = re.search(r"([^/:]+/[^/:]+?)(?:\.git)?/?$", origin) if "/" in origin or ":" in origin else None
    return GitTree(
        root=root, place=str(place.absolute()), name=named[1] if named else root or "repository", licence=_licence_of(place),
        head=_git(place, "rev-parse", "--verify", "HEAD", may_fail=True).decode().strip(),
        files=frozenset(f"{prefix}{name}" for name in listed if name),
    )  # fmt: skip


def _origin_of(place: Path) -> str:
    return _git(place, "config", "--get", "remote.origin.url", may_fail=True).decode().strip()


def commits_digest(head: str, limit: int) -> str:
    """A digest of what commit_records gives: a commit's name covers its whole history."""
    return hashlib.sha256(f"{head}\n{limit}".encode()).hexdigest()


def head_of(place: str) -> str:
    """The commit that is checked out."""
    return _git(Path(place), "rev-parse", "--verify", "HEAD", may_fail=True).decode().strip()


def commit_records(name: str, place: str, repository: str, licence: str, limit: int, max_record_bytes: int) -> Iterator[Parsed]:
    """The newest commits without merges, one per record: message, then patch. Named by their commit in the source, at offset 0."""
    command = [
        *SAFE, "-C", place, "log", "--patch", "--no-merges", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
        f"--max-count={limit}", "--format=%x00%x01commit %H%n%B",
    ]  # fmt: skip
    is_on_github = GITHUB.search(_origin_of(Path(place))) is not None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        for commit, data, size in _commits(process.stdout, max_record_bytes):
            source = f"{name}!{commit}"
            if size > max_record_bytes:
                yield too_long(source, 0, size, max_record_bytes)
                continue
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                yield rejection(source, 0, "not_utf8", f"byte {error.start}: {error.reason}")
                continue
            url = f"https://github.com/{repository}/commit/{commit}" if is_on_github else ""
            yield Parsed(source, 0, text, url, licence, None, repository, "")
        problem = process.stderr.read().decode(errors="replace").strip()
        if process.wait() != 0:
            yield rejection(name, 0, "broken_repository", problem)
    finally:
        process.kill()
        process.wait()


def _commits(stream: object, max_record_bytes: int) -> Iterator[tuple[str, bytes, int]]:
    """(commit, message and patch, bytes) of git's output; of one above the bound no more than the bound is held."""
    buffer, skipped, is_last = bytearray(), 0, False
    while not is_last:
        block = stream.read(BLOCK_BYTES)  # pyright: ignore[reportAttributeAccessIssue]
        is_last = not block
        buffer += block
        while (end := buffer.find(MARK, len(MARK))) >= 0 or (is_last and buffer):
            end = len(buffer) if end < 0 else end
            head = bytes(buffer[len(MARK) : end])
            commit, _, text = head.partition(b"\n")
            message, between, patch = text.partition(b"\ndiff --git ")
            yield commit.decode(), message.strip() + b"\n" + between + patch.rstrip(b"\n") + (b"\n" if patch else b""), len(text) + skipped
            del buffer[:end]
            skipped = 0
        if len(buffer) > max_record_bytes + BLOCK_BYTES:
            cut = len(buffer) - len(MARK)
            skipped += cut - max_record_bytes
            del buffer[max_record_bytes:cut]


def _licence_of(place: Path) -> str:
    """The SPDX identifier of the tree's licence file, by its header; empty where there is none or it is another one."""
    names = sorted(entry.name for entry in place.iterdir() if entry.name.upper().split(".")[0] in LICENCE_NAMES and entry.is_file())
    for name in names:
        text = (place / name).read_text(encoding="utf-8", errors="replace")
        stated = re.search(r"SPDX-License-Identifier:\s*([\w.+-]+)", text)
        found = stated[1] if stated else next((spdx for spdx, header in LICENCE_HEADERS if re.search(header, text, re.I)), "")
        if found:
            return found
    return ""


def _git(place: Path, *arguments: str, may_fail: bool = False) -> bytes:
    try:
        found = subprocess.run([*SAFE, "-C", str(place), *arguments], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ValueError(f"{place} is a git working tree, but there is no program `git`: install git, or remove {place}/.git") from error
    if found.returncode and not may_fail:
        problem = found.stderr.decode(errors="replace").strip()
        raise ValueError(f"git cannot read the working tree {place}: {problem}: repair it, or remove its {GIT_DIRECTORY}")
    return b"" if found.returncode else found.stdout
