"""Reads unified diffs and applies them to a tree of texts: path to text.

A hunk must agree with the text in every line. It may be at another place than its header says, which is how models
write diffs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
FENCE = re.compile(r"```(?:diff|patch)\n(.*?)(?:```|\Z)", re.DOTALL)
START = re.compile(r"^(?:diff --git |--- )", re.MULTILINE)
LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""A line with its break. A form feed or another break of str.splitlines ends none: the lines of a diff hold them."""
NAMED = re.compile(r"diff --git a/(.+) b/\1")
NO_FILE = "/dev/null"
NO_NEWLINE = "\\"
"""Begins the line that says that the line before it has no line break."""


class PatchError(ValueError):
    """A diff that cannot be read, or does not fit the tree."""


@dataclass(frozen=True)
class Hunk:
    start: int
    """Number of the first old line, from 0."""
    old: tuple[str, ...]
    """Lines with their breaks."""
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileChange:
    """The change of one file."""

    old_path: str
    """Empty for a new file."""
    new_path: str
    """Empty for a file that goes."""
    hunks: tuple[Hunk, ...]


def patch_in(answer: str) -> str:
    """The diff in what a model wrote: the first fenced one, else from the first line that begins one."""
    if fenced := FENCE.search(answer):
        return fenced[1]
    begins = START.search(answer)
    return "" if begins is None else answer[begins.start() :].rstrip("\n") + "\n"


def apply_patch(tree: Mapping[str, str], patch: str) -> dict[str, str]:
    """The tree after the patch. Raises PatchError."""
    changed = dict(tree)
    for change in read_patch(patch):
        before = ""
        if change.old_path:
            if change.old_path not in changed:
                raise PatchError(f"the tree has no file {change.old_path}")
            before = changed.pop(change.old_path)
        elif change.new_path in changed:
            raise PatchError(f"the tree already has a file {change.new_path}")
        after = _changed(before, change)
        if change.new_path:
            changed[change.new_path] = after
        elif after:
            raise PatchError(f"{change.old_path} goes, and the patch leaves lines of it")
    return changed


def changed_paths(patch: str) -> set[str]:
    """Files that a patch changes, makes or removes. Raises PatchError."""
    return {path for change in read_patch(patch) for path in (change.old_path, change.new_path) if path}


def read_patch(patch: str) -> list[FileChange]:
    """The changes in their order. Raises PatchError for a text that is no unified diff."""
    changes = list(_changes(patch.split("\n")))
    if not changes:
        raise PatchError("no change of a file is in it")
    return changes


def _changes(lines: list[str]) -> Iterator[FileChange]:
    index, renamed = 0, None
    while index < len(lines):
        line = lines[index]
        if line.startswith("rename from ") and index + 1 < len(lines):
            renamed = FileChange(line.removeprefix("rename from "), lines[index + 1].removeprefix("rename to "), ())
        if not line.startswith("--- "):
            if (named := NAMED.fullmatch(line)) and (change := _of_empty_file(named[1], lines[index + 1 : index + 4])):
                yield change
            index += 1
            continue
        if index + 1 >= len(lines) or not lines[index + 1].startswith("+++ "):
            raise PatchError(f"line {index + 2} does not name the new file after {line!r}")
        old, new = _path(line), _path(lines[index + 1])
        if not old and not new:
            raise PatchError(f"line {index + 1} names no file")
        hunks, index = _hunks(lines, index + 2)
        if renamed is not None and renamed.old_path != old:
            yield renamed
        renamed = None
        yield FileChange(old, new, tuple(hunks))
    if renamed is not None:
        yield renamed


def _of_empty_file(path: str, lines: list[str]) -> FileChange | None:
    """The change of a file that comes or goes without a line; `lines` follow its name."""
    mode, index, *after = [*lines, "", ""]
    if not index.startswith("index ") or not (after[0] == "" or after[0].startswith("diff --git ")):
        return None
    paths = {"new file mode": ("", path), "deleted file mode": (path, "")}.get(mode.rpartition(" ")[0])
    return None if paths is None else FileChange(*paths, ())


def _path(line: str) -> str:
    name = line[4:].split("\t")[0].strip()
    return "" if name == NO_FILE else re.sub(r"^[ab]/", "", name)


def _hunks(lines: list[str], index: int) -> tuple[list[Hunk], int]:
    hunks = []
    while index < len(lines) and (header := HUNK.match(lines[index])):
        old: list[str] = []
        new: list[str] = []
        counts = [int(count or 1) for count in (header[2], header[3])]
        index += 1
        while index < len(lines) and not _is_header(lines, index):
            line = lines[index]
            if line.startswith(NO_NEWLINE):
                _cut_break(lines[index - 1], old, new)
            # An empty line is one of both texts whose space at the beginning was cut, or comes after the hunk.
            elif line or (len(old) < counts[0] and len(new) < counts[1]):
                _add_line(line or " ", index, old, new)
            index += 1
        hunks.append(Hunk(max(0, int(header[1]) - 1), tuple(old), tuple(new)))
    if not hunks:
        raise PatchError(f"line {index + 1} begins no hunk")
    return hunks, index


def _is_header(lines: list[str], index: int) -> bool:
    """Whether a hunk or a file begins: a line that is taken out may begin with two dashes itself."""
    names = ("--- ", "+++ ", "@@ ")
    begins_file = all(line.startswith(name) for line, name in zip(lines[index : index + 3], names, strict=False))
    return lines[index].startswith(("@@ ", "diff --git ")) or (begins_file and index + 2 < len(lines))


def _add_line(line: str, index: int, old: list[str], new: list[str]) -> None:
    sign, text = line[0], line[1:] + "\n"
    if sign not in " +-":
        raise PatchError(f"line {index + 1} begins with {sign!r}, not with a space, + or -")
    if sign != "+":
        old.append(text)
    if sign != "-":
        new.append(text)


def _cut_break(before: str, old: list[str], new: list[str]) -> None:
    for lines, sign in ((old, "+"), (new, "-")):
        if lines and not before.startswith(sign):
            lines[-1] = lines[-1].removesuffix("\n")


def _changed(text: str, change: FileChange) -> str:
    lines = LINE.findall(text)
    shift = 0
    for hunk in change.hunks:
        start = _place(lines, hunk, hunk.start + shift, change)
        lines[start : start + len(hunk.old)] = hunk.new
        shift = start - hunk.start + len(hunk.new) - len(hunk.old)
    return "".join(lines)


def _place(lines: list[str], hunk: Hunk, expected: int, change: FileChange) -> int:
    """The place nearest to the expected one where the old lines are."""
    places = sorted(range(len(lines) - len(hunk.old) + 1), key=lambda start: abs(start - expected))
    for start in places:
        if tuple(lines[start : start + len(hunk.old)]) == hunk.old:
            return start
    raise PatchError(f"{change.old_path}: the lines of the hunk at {hunk.start + 1} are not in it")
