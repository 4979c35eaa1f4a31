"""Reads the block list: documents that are never trained on. `glm46 forget --apply` adds to it.

One entry a line: a URL, or an id and the digests of its text (`5129c6e1f65ff96c sha256:DIGEST`). An id is a position in
a source, and another text is there once the source is edited: an entry with digests means its text, wherever that
is, and one without them the position. A line that begins with # says when and by whom. It is not a step: the list is
read in every run, and its digest covers the entries, in any order, not their location.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.step import Record, digest_of

if TYPE_CHECKING:
    from pyspark.sql import Column

BLOCKED = "blocked"
"""The reason of such a document in dropped.parquet."""
DOCUMENT_ID = re.compile("[0-9a-f]{16}")
DIGEST_PREFIX = "sha256:"
ENTRY = re.compile(f"({DOCUMENT_ID.pattern})((?: +{DIGEST_PREFIX}[0-9a-f]{{64}})*)")
"""An id, and the digests of its text (tasks/data/records/documents.py, content_digest)."""


class BlockedDocuments(Record):
    """The entries of a block list, sorted."""

    ids: tuple[str, ...]
    """Those without a digest."""
    urls: tuple[str, ...]
    digests: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 over the entries."""
        return digest_of(self.model_dump(mode="json"))

    @property
    def by_column(self) -> dict[str, tuple[str, ...]]:
        """What is blocked, by the column of a document that names it."""
        return {"id": self.ids, "url": self.urls, "content_digest": self.digests}

    def holds(self) -> Column:
        """Whether a row (id, url, content_digest) is in the list."""
        from pyspark.sql import functions as F

        by_id, by_url, by_digest = (F.col(name).isin(*blocked) for name, blocked in self.by_column.items())
        return by_id | by_url | by_digest

    def lists(self, row: Mapping[str, Any]) -> bool:
        """Whether a row, as for `holds`, is in the list."""
        return any(row[name] in blocked for name, blocked in self.by_column.items())

    def with_ids(self, ids: Iterable[str]) -> BlockedDocuments:
        """The list with more ids."""
        return self.model_copy(update={"ids": tuple(sorted({*self.ids, *ids}))})

    def missing(self, entries: Iterable[str]) -> list[str]:
        """The entries that the list does not have yet."""
        listed = {*self.ids, *self.urls, *self.digests}
        return [entry for entry in entries if not set().union(*_parts_of(entry)) <= listed]


NOTHING_BLOCKED = BlockedDocuments(ids=(), urls=())


def block_list_path(home: Path, name: str) -> Path:
    """The file of a list that `data.recipe.filter.block_list` names: below the home, or where an absolute path says."""
    return home / name


def read_block_list(home: Path, name: str) -> BlockedDocuments | None:
    """The list; None where it is empty or below the home and not there. Raises ValueError for an absolute path without
    a file, and for a line that is neither an id nor a URL."""
    path = block_list_path(home, name)
    if not path.exists():
        if Path(name).is_absolute():
            raise ValueError(f"data.recipe.filter.block_list {name} does not exist: make the file, or name another one")
        return None
    entries: tuple[set[str], set[str], set[str]] = (set(), set(), set())
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        if not ENTRY.fullmatch(line) and "://" not in line:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is neither the id of a document (16 hex digits, then perhaps "
                f"{DIGEST_PREFIX} and 64 more) nor a URL"
            )
        for known, given in zip(entries, _parts_of(line), strict=True):
            known |= given
    ids, urls, digests = (tuple(sorted(known)) for known in entries)
    return BlockedDocuments(ids=ids, urls=urls, digests=digests) if ids or urls or digests else None


def entry_of(identity: str, digests: Iterable[str]) -> str:
    """The line of a document, with the digests of its text."""
    return " ".join([identity, *(f"{DIGEST_PREFIX}{digest}" for digest in digests)])


def _parts_of(entry: str) -> tuple[set[str], set[str], set[str]]:
    """Id, URL and digests that an entry blocks."""
    if "://" in entry:
        return set(), {entry}, set()
    identity, *digests = entry.split()
    return (
        (set(), set(), {each.removeprefix(DIGEST_PREFIX) for each in digests})
        if digests
        else ({identity}, set(), set())
    )
