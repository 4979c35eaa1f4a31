"""Reads the block list: documents that are never trained on, by id or by URL. `glm46 forget --apply` adds to it.

One entry a line; a line that begins with # says when and by whom. It is not a step: the list is read in every run, and
its digest covers the entries, in any order, not their location.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Record, digest_of

if TYPE_CHECKING:
    from pyspark.sql import Column

BLOCKED = "blocked"
"""The reason of such a document in dropped.parquet."""
DOCUMENT_ID = re.compile("[0-9a-f]{16}")


class BlockedDocuments(Record):
    """The entries of a block list, sorted."""

    ids: tuple[str, ...]
    urls: tuple[str, ...]

    @property
    def digest(self) -> str:
        """sha256 over the entries."""
        return digest_of(self.model_dump(mode="json"))

    def holds(self) -> Column:
        """Whether a row (id, url) is in the list."""
        from pyspark.sql import functions as F

        return F.col("id").isin(*self.ids) | F.col("url").isin(*self.urls)


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
    ids, urls = set(), set()
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        if not DOCUMENT_ID.fullmatch(line) and "://" not in line:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is neither the id of a document (16 hex digits) nor a URL"
            )
        (urls if "://" in line else ids).add(line)
    return BlockedDocuments(ids=tuple(sorted(ids)), urls=tuple(sorted(urls))) if ids or urls else None
