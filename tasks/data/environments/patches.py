"""Applies a unified diff, as git writes it, to files in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class PatchError(ValueError):
    """A diff that does not fit the files."""


def apply_patch(files: Mapping[str, str], patch: str) -> dict[str, str]:
    """The files after the diff; new files too, deleted ones are gone. Raises PatchError where a line that should be
    there is not."""
    changed = dict(files)
    for part in re.split(r"^diff --git .*\n", patch, flags=re.M)[1:]:
        old = re.search(r"^--- (?:a/)?(.+?)\s*$", part, re.M)
        new = re.search(r"^\+\+\+ (?:b/)?(.+?)\s*$", part, re.M)
        if old is None or new is None:
            raise PatchError("a change without text")
        before = "" if old[1] == "/dev/null" else changed.pop(old[1], None)
        if before is None:
            raise PatchError(f"there is no file {old[1]}")
        after = _patched(before.splitlines(keepends=True), part.splitlines(keepends=True))
        if new[1] != "/dev/null":
            changed[new[1]] = after
    return changed


def _patched(before: list[str], lines: list[str]) -> str:
    after: list[str] = []
    position, is_inside = 0, False
    for number, line in enumerate(lines):
        hunk = HUNK.match(line)
        if hunk:
            start = max(0, int(hunk[1]) - 1)
            after += before[position:start]
            position, is_inside = start, True
            continue
        if not is_inside or line.startswith("\\"):
            continue
        text = line[1:]
        if number + 1 < len(lines) and lines[number + 1].startswith("\\"):
            text = text.removesuffix("\n")
        if line.startswith("+"):
            after.append(text)
            continue
        if position >= len(before) or before[position].rstrip("\n") != text.rstrip("\n"):
            raise PatchError(f"line {position + 1} is not {text.strip()!r}")
        if not line.startswith("-"):
            after.append(before[position])
        position += 1
    return "".join([*after, *before[position:]])
