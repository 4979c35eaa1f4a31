"""Refuses files that look like benchmarks in a directory that gives no roles: as training text they would spoil every
later measurement."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import BinaryIO

from tasks.data.readers.record_lines import TABLES, record_lines
from tasks.data.readers.source_bytes import HashingReader, open_source
from tasks.data.sources.source_root import MANIFEST_NAME, SourceRoot

SHAPES = (
    {"question", "choices", "answer"},
    {"question", "answer"},
    {"prompt", "canonical_solution", "test"},
    {"text", "test_list"},
    {"question", "input_output"},
    {"question_content", "public_test_cases"},
)
"""Fields of a record."""
PEEKED_BYTES = 1 << 16
PEEKED_RECORDS = 8
PEEKS_AT_ONCE = 16


def refuse_benchmarks(root: SourceRoot, formats: Mapping[str, str]) -> None:
    """Raises ValueError for a file of records whose first one looks like a benchmark's. Files of the
    hub, which would be downloaded whole, are not looked into. `formats`: of the files, by name."""
    peeked = [
        name
        for name, form in formats.items()
        if form in TABLES and (name in root.digests or os.path.isfile(root.addresses[name]))
    ]
    with ThreadPoolExecutor(PEEKS_AT_ONCE) as pool:
        found = list(pool.map(lambda name: _first_fields(root, name, formats[name]), peeked))
    for name, fields in zip(peeked, found, strict=True):
        shape = next((shape for shape in SHAPES if shape <= fields), None)
        if shape is not None:
            raise ValueError(
                f"{root.where.rstrip('/')}/{name}: has the fields of a benchmark ({', '.join(sorted(shape))}) and "
                f"there is no {MANIFEST_NAME}: write one that gives this file a role, for example "
                f"`{{files: {name!r}, role: evaluation}}`"
            )


def _first_fields(root: SourceRoot, name: str, form: str) -> set[str]:
    """Of a file's first record; empty where it cannot be read, which whoever reads the file says."""
    with open_source(root.addresses[name], buffer_bytes=PEEKED_BYTES) as file:
        if form == "parquet":
            return _columns(file)
        lines = islice(record_lines(form, name, root.addresses[name], "", HashingReader(file)), PEEKED_RECORDS)
        return next((set(line.record) for line in lines if line.record is not None), set())


def _columns(file: BinaryIO) -> set[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return set(pq.read_schema(file).names)
    except (pa.ArrowException, OSError):
        return set()
