"""Rows are found in a directory and in a bucket by reading the blocks that may hold them, each verified."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from configs.files import stored_files
from configs.files.stored_files import CorruptFileError
from infra.home import Home
from infra.step import Artifact, Output, Record, step
from infra.storage.manifest_graph import ManifestGraph
from infra.storage.open_store import open_store
from tasks.data.records.documents import document_id
from tasks.data.records.parquet_parts import ROW_GROUP_ROWS, write_rows
from tasks.lineage.stored_rows import find_rows
from tests.lineage.toy_release import commit

NUM_ROWS = 5 * ROW_GROUP_ROWS
ROWS = sorted((document_id("a", number, 0), number) for number in range(NUM_ROWS))
BLOCK_BYTES = 4096


class Rows(Record):
    """What was written: nothing that counts."""


@step(content=("*.parquet",))
def write_two_files(*, output: Output) -> Rows:
    ids, numbers = [list(column) for column in zip(*ROWS, strict=True)]
    half = NUM_ROWS // 2
    for part, chosen in enumerate((slice(None, half), slice(half, None))):
        texts = [random.Random(number).randbytes(200).hex() for number in numbers[chosen]]
        urls = [f"u{number % 999}" for number in numbers[chosen]]
        table = pa.table({"id": ids[chosen], "text": texts, "number": numbers[chosen], "url": urls})
        batches = iter(table.to_batches(max_chunksize=ROW_GROUP_ROWS))
        write_rows(next(batches), batches, str(output.path(f"part-{part}.parquet")), ())
    empty = pa.RecordBatch.from_pylist([], schema=pa.schema({"id": pa.string()}))
    write_rows(empty, iter(()), str(output.path("part-2.parquet")), ())
    return Rows()


@pytest.fixture(params=["local", "s3"])
def graph(request, tmp_path, monkeypatch):
    """A store with the files, in small blocks."""
    for module in ("configs.files.stored_files", "configs.files.file_digests"):
        monkeypatch.setattr(f"{module}.BLOCK_BYTES", BLOCK_BYTES)
    uri = str(tmp_path / "store")
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        uri = f"s3://glm46/rows-{tmp_path.name}"
    store = open_store(uri, Home(tmp_path / "home"))
    made: Artifact = commit(store, write_two_files)
    return ManifestGraph(store, {made.digest: (made.manifest,)})


def find(graph: ManifestGraph, wanted, columns=("id", "number")):
    (manifest,) = graph.by_digest.values()
    return find_rows(graph, manifest, ("part-*.parquet",), wanted, columns)


def test_rows_are_those_of_a_plain_search_and_few_bytes_are_read(graph, monkeypatch):
    read: list[int] = []
    monkeypatch.setattr(stored_files, "count_read", read.append)
    for identity, number in (ROWS[0], ROWS[NUM_ROWS // 2], ROWS[-1]):
        assert find(graph, {"id": [identity]}) == [{"id": identity, "number": number}]
    (manifest,) = graph.by_digest.values()
    size = sum(entry.size for entry in manifest.content.values())
    assert 0 < sum(read) < size, "three queries read less than the files once"
    assert find(graph, {"id": ["0" * 16, "f" * 16]}) == []
    expected = [{"id": identity, "number": number} for identity, number in ROWS if number % 999 == 5]
    assert find(graph, {"url": ["u5"]}, ("id", "number", "absent")) == expected
    both = {"url": ["u5"], "id": [row["id"] for row in expected[:2]] + [ROWS[0][0]]}
    assert find(graph, both, ("number",)) == [{"number": row["number"]} for row in expected[:2]]
    assert find(graph, {"absent": ["u5"]}) == []


@pytest.mark.parametrize("graph", ["local"], indirect=True)
def test_a_damaged_block_is_named_where_it_is_read(graph):
    (manifest,) = graph.by_digest.values()
    path = graph.open(manifest).path("part-0.parquet")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"part-0\.parquet is corrupt: the block at byte 0"):
        find(graph, {"id": [ROWS[0][0]]})
    assert find(graph, {"id": [ROWS[-1][0]]}) == [dict(zip(("id", "number"), ROWS[-1], strict=True))]
