"""Packed rows of artifacts and of plain directories, as a rank opens them."""

from __future__ import annotations

from pathlib import Path

from configs.files.block_reader import BlockReader
from configs.files.stored_files import StoredFile, given_file
from infra.step import Artifact
from tasks.data.packing.packed_rows import PackedRows


def files_in(directory: Path) -> list[StoredFile]:
    """The files of a directory, of which nobody knows a digest."""
    return [given_file(path) for path in sorted(directory.iterdir()) if path.is_file()]


def packed_rows(packed: Artifact | Path, *shards: Artifact | Path) -> PackedRows:
    """The rows of a packed order that points into these shards."""
    own = files_in(packed) if isinstance(packed, Path) else packed.files("*")
    parts = [files_in(each) if isinstance(each, Path) else each.files("shards/*") for each in shards]
    return PackedRows(own, [file for part in parts for file in part], BlockReader())
