"""What extraction makes of records."""

from __future__ import annotations

from tasks.data.extract_documents import extract_documents
from tasks.data.ingest_documents import ingest_documents
from tasks.data.list_sources import list_sources
from tests.data_inputs import RECIPE, RESOURCES, compute, prose, rows


def test_long_documents_become_pieces_that_join_to_the_text(tmp_path):
    (tmp_path / "data").mkdir()
    text = "\n\n".join(prose(seed) for seed in range(40))
    (tmp_path / "data" / "book.txt").write_text(text)
    sources = list_sources(tmp_path / "data")
    records = compute(ingest_documents, tmp_path / "home", sources=sources, recipe=RECIPE.ingest, resources=RESOURCES)
    recipe = RECIPE.extract.model_copy(update={"max_document_chars": 2000})
    result = compute(extract_documents, tmp_path / "home", records=records, recipe=recipe, resources=RESOURCES)
    pieces = sorted(rows(result, "documents/*.parquet"), key=lambda row: row["piece"])
    assert len(pieces) > 10 and "".join(row["text"] for row in pieces) == text
    assert all(text[row["piece"] : row["piece"] + row["num_chars"]] == row["text"] for row in pieces)
