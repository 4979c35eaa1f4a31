"""Rows by their ids: read_by_id and documents that are written with marks, beside pyarrow over all rows."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from configs.files.stored_files import given_file
from infra.machine.spark import spark_session
from tasks.data.records import document_files, documents_by_id
from tasks.data.records.document_files import map_documents, read_documents, write_marked_documents
from tasks.data.records.documents_by_id import named_rows, read_by_id, read_marked
from tasks.data.records.parcels import id_numbers, id_strings
from tasks.data.records.parquet_parts import part_name
from tests.support.data_inputs import RESOURCES
from tests.support.toy_steps import local_output

NUM_ROWS = 9_000


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two directories of five files each, in order of their names, and all rows. Of one the numbers of the files, which
    are in order of their ids, have five digits and six."""
    draw, tables, paths = np.random.default_rng(0), [], []
    for name, first in (("one", 0), ("other", 99_998)):
        directory = tmp_path_factory.mktemp(name)
        ids = np.unique(draw.integers(0, 2**64, NUM_ROWS, dtype=np.uint64))
        table = pa.table(
            {"id": id_strings(ids), "text": pa.array(ids.astype(str)), "split": pa.array(["?"] * len(ids))}
        )
        for part, start in enumerate(range(0, NUM_ROWS, 1800)):
            path = directory / part_name(first + part)
            pq.write_table(table.slice(start, 1800), path, row_group_size=500)
        paths += map(given_file, sorted(directory.iterdir()))
        tables.append(table)
    return paths, pa.concat_tables(tables)


@pytest.mark.parametrize("count", [0, 1, 7, 500, NUM_ROWS])
def test_rows_by_id_are_all_that_are_wanted_and_no_others(directories, count):
    paths, table = directories
    draw = np.random.default_rng(count)
    known = id_numbers(table.column("id"))
    wanted = np.unique(
        np.concatenate((draw.choice(known, count, replace=False), draw.integers(0, 2**64, count, dtype=np.uint64)))
    )
    batches = [batch.column("id").to_pylist() for batch in read_by_id(paths, wanted, ["id", "text"])]
    expected = table.filter(pc.is_in(table["id"], id_strings(wanted)))["id"].to_pylist()
    assert [identity for batch in batches for identity in batch] == expected and len(expected) >= count


@pytest.mark.parametrize("count", [0, 1, 700])
def test_marked_rows_are_the_named_ones_with_their_marks(directories, count):
    paths, table = directories
    rows = np.random.default_rng(count).choice(table.num_rows, count, replace=False)
    ids = table["id"].take(pa.array(rows)).combine_chunks()
    marks = pa.table({"id": ids, "row": rows, "keys": pa.array([[row] * (row % 3) or None for row in rows.tolist()])})
    read = [
        row for batch in read_marked(iter(marks.to_batches(256)), paths, ["text", "id"]) for row in batch.to_pylist()
    ]
    expected = table.select(["text", "id"]).take(pa.array(rows)).to_pylist()
    expected = [row | mark for row, mark in zip(expected, marks.to_pylist(), strict=True)]
    assert sorted(read, key=lambda row: row["id"]) == sorted(expected, key=lambda row: row["id"])
    assert all(list(row) == ["text", "id", "row", "keys"] for row in read)


def test_no_join_sends_documents_through_the_driver(directories):
    """Spark guesses the size of documents from the list of their files, which is small."""
    documents = read_documents(spark_session(RESOURCES), directories[0], RESOURCES, "id", "text")
    for how in ("inner", "left", "left_anti"):
        for joined in (
            documents.join(documents.select("id").distinct(), "id", how),
            documents.groupBy("id").count().join(documents, "id", how),
        ):
            assert "Broadcast" not in joined._jdf.queryExecution().executedPlan().toString()


def test_documents_mapped_while_they_are_read_equal_those_mapped_afterwards(directories):
    paths, table = directories
    spark = spark_session(RESOURCES)

    def only_ids(batches):
        return (batch.select(["id"]) for batch in batches)

    mapped = map_documents(spark, paths, RESOURCES, only_ids, "id string", "text", "id").toArrow()
    afterwards = read_documents(spark, paths, RESOURCES, "text", "id").mapInArrow(only_ids, "id string").toArrow()
    assert mapped.sort_by("id") == afterwards.sort_by("id") and mapped.num_rows == table.num_rows


def test_few_named_rows_are_those_of_all_batches(directories):
    paths, table = directories
    wanted = table.take([5, 4000, 17]).select(["id"])
    rows = pa.Table.from_batches(named_rows(iter(wanted.to_batches(max_chunksize=1)), paths, ["id", "split"]))
    assert sorted(rows.column("id").to_pylist()) == sorted(wanted.column("id").to_pylist())
    assert rows.column_names == ["id", "split"]


def test_few_footers_of_many_files_are_read(directories, monkeypatch):
    paths, table = directories
    read, open_file = [], documents_by_id.open_parquet
    monkeypatch.setattr(documents_by_id, "open_parquet", lambda file: read.append(file) or open_file(file))
    wanted = np.sort(id_numbers(table.slice(2000, 3)["id"]))
    assert sum(batch.num_rows for batch in read_by_id(paths[:5], wanted)) == 3
    assert read[-1] == paths[1] and len(set(read)) < 5
    assert documents_by_id._first_id(paths[0]) == int(table["id"][0].as_py(), 16)


@pytest.mark.parametrize(("file_bytes", "num_files"), [(40, 10), (10**9, 1)])
def test_documents_are_copied_with_their_marks(directories, tmp_path, monkeypatch, file_bytes, num_files):
    monkeypatch.setattr(document_files, "FILE_BYTES", file_bytes)
    paths = directories[0][:5]
    kept = (
        directories[1]
        .slice(0, NUM_ROWS)
        .filter(pc.equal(pc.utf8_slice_codeunits(directories[1].slice(0, NUM_ROWS)["id"], 15), "7"))
    )
    marks = (
        kept.select(["id"])
        .append_column("split", pc.utf8_slice_codeunits(kept["id"], 0, 1))
        .append_column("rank", pa.array(range(len(kept))))
    )
    frame = spark_session(RESOURCES).createDataFrame(marks.take(np.random.default_rng(1).permutation(len(kept))))
    output = local_output(tmp_path)
    written, counts = write_marked_documents(frame, paths, output, "documents", 400, "split")
    assert len(written) == num_files and sum(count for count, _ in counts.values()) == len(kept)
    copied = pa.concat_tables([pq.read_table(file.uri) for file in written])
    assert copied.column_names == ["id", "text", "split", "rank"]
    assert copied["text"].equals(kept["text"]) and all(copied[name].equals(marks[name]) for name in marks.column_names)
    none, _ = write_marked_documents(frame.where("false"), paths, output, "none", 400)
    assert pq.read_schema(none[0].uri).equals(pq.read_schema(written[0].uri))
    assert not pq.read_metadata(none[0].uri).num_rows


def test_rows_spread_over_the_cores_whether_a_file_has_many_row_groups_or_one(directories, tmp_path):
    table = directories[1].slice(0, NUM_ROWS)
    text = pa.array(np.random.default_rng(0).bytes(400).hex() for _ in range(NUM_ROWS))
    pq.write_table(
        table.set_column(1, "text", text), tmp_path / "many.parquet", row_group_size=1000, use_dictionary=False
    )
    pq.write_table(table, tmp_path / "one.parquet")
    for name in ("many", "one"):
        frame = read_documents(spark_session(RESOURCES), [given_file(tmp_path / f"{name}.parquet")], RESOURCES)
        assert sorted(row.id for row in frame.select("id").collect()) == sorted(table["id"].to_pylist())
        sizes = frame.rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()
        assert sum(sizes) == NUM_ROWS and max(sizes) < 0.8 * NUM_ROWS
