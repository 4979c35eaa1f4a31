"""Reads a local file once, for its digest and its size after decompression."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from tasks.data.readers.source_bytes import GARBLED, HashingReader, codec_of, decompressed
from tasks.data.sources.data_directory import TEXT_ROLES, RoleEntry

BLOCK_BYTES = 1 << 20
LINE_FORMATS = ("jsonl", "html_jsonl", "repository_files", "commits", "text")
"""Formats in which a record is a line, or is cut at line ends."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def digest_and_sizes(path: Path, name: str, entry: RoleEntry, max_record_bytes: int) -> tuple[str, int, int]:
    """(sha256, bytes, bytes after decompression; in a broken archive only those before the break, and without the lines
    that are longer than a record may be). Raises ValueError for a pointer of Git LFS."""
    size = num_text_bytes = path.stat().st_size
    with open(path, "rb") as file:
        if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
            raise ValueError(
                f"source {path} is a pointer of Git LFS, not the file: run `git lfs pull` in its repository"
            )
        hashing = HashingReader(file)
        if entry.role in TEXT_ROLES and entry.format in LINE_FORMATS:
            num_text_bytes = _line_bytes(decompressed(name, hashing), max_record_bytes)
        elif codec_of(name) and entry.role in TEXT_ROLES:
            num_text_bytes = _inflated_bytes(decompressed(name, hashing))
        hashing.drain()
    if entry.format == "zip_text":
        num_text_bytes = _member_bytes(path)
    return hashing.hexdigest(), size, num_text_bytes


def _line_bytes(stream: io.BufferedIOBase, max_line_bytes: int) -> int:
    """Bytes of the lines that are not too long: only one that goes on from block to block can be."""
    total = opened = 0
    try:
        while block := stream.read(min(BLOCK_BYTES, max_line_bytes)):
            first, last = block.find(b"\n") + 1, block.rfind(b"\n") + 1
            if first:
                total += (opened + first if opened + first <= max_line_bytes + 1 else 0) + last - first
            opened = len(block) - last if first else opened + len(block)
    except GARBLED:
        pass
    return total + (opened if opened <= max_line_bytes else 0)


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
