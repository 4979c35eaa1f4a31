"""Reads a local file once, for its digest and its size after decompression."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from tasks.data.readers.source_bytes import GARBLED, HashingReader, codec_of, decompressed
from tasks.data.sources.data_directory import TEXT_ROLES, RoleEntry

BLOCK_BYTES = 1 << 20
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def digest_and_sizes(path: Path, name: str, entry: RoleEntry) -> tuple[str, int, int]:
    """(sha256, bytes, bytes after decompression; in a broken archive only those before the break). Raises ValueError
    for a pointer of Git LFS."""
    size = num_text_bytes = path.stat().st_size
    with open(path, "rb") as file:
        if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
            raise ValueError(
                f"source {path} is a pointer of Git LFS, not the file: run `git lfs pull` in its repository"
            )
        hashing = HashingReader(file)
        if codec_of(name) and entry.role in TEXT_ROLES:
            num_text_bytes = _inflated_bytes(decompressed(name, hashing))
        hashing.drain()
    if entry.format == "zip_text":
        num_text_bytes = _member_bytes(path)
    return hashing.hexdigest(), size, num_text_bytes


def _inflated_bytes(stream: io.BufferedIOBase) -> int:
    total = 0
    try:
        while block := stream.read(BLOCK_BYTES):
            total += len(block)
    except GARBLED:
        pass
    return total


def _member_bytes(path: Path) -> int:
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile:
        return path.stat().st_size
