"""Step: documents -> the same without paragraphs that many documents of one collection and host share.

boilerplate.parquet shows these paragraphs. Documents are counted, not occurrences: the filter judges what a text
repeats inside itself. One document keeps each paragraph, so no text leaves the corpus, however many copies there are.
Code and commits are not changed. The step makes one shuffle of two hashes and an id per paragraph, and one
of ids with the keys that their documents lose: the texts are read from the files where these arrive.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.extraction.paragraphs import (
    KEY_COLUMNS,
    SAMPLE_COLUMNS,
    frequent_keys,
    paragraph_keys,
    paragraph_samples,
    remove_paragraphs,
)
from tasks.data.records.document_files import (
    check_counts,
    count_reasons,
    id_range_column,
    read_documents,
    write_documents,
    write_table,
)
from tasks.data.records.documents import CODE, COMMIT, DOCUMENT_COLUMNS, NUM_EXAMPLES, arrow_schema, names_of
from tasks.data.records.removed_share import COLLECTION, Ceiling, check_removed_share

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import BoilerplateRecipe, SparkResources
    from tasks.data.extraction.extract_documents import ExtractedDocuments

MAX_SHOWN = 10_000
"""Paragraphs in boilerplate.parquet, the most frequent first: evidence that stays small at any scale."""
EVIDENCE_COLUMNS = "digest string, collection string, num_documents long, text string, id string, source string"
"""num_documents: documents that held the paragraph, including the one that keeps it; id, source: a document that lost
it."""


class BoilerplateFreeDocuments(Record):
    num_documents: int
    num_bytes: int
    dropped: dict[str, int]
    num_paragraphs: int
    """Different paragraphs that were removed; one in two collections or hosts counts twice."""
    num_changed: int
    """Documents that lost a paragraph."""
    num_bytes_removed: int
    """Bytes removed from documents that were kept and from those that were dropped."""


@step(
    content=("documents/*.parquet", "dropped.parquet", "boilerplate.parquet"),
    distributions=("pyspark", "pyarrow", "numpy"),
)
def remove_boilerplate(
    *, documents: Artifact[ExtractedDocuments], recipe: BoilerplateRecipe, resources: SparkResources, output: Output
) -> BoilerplateFreeDocuments:
    """Remove repeated paragraphs. Raises ValueError where a collection loses more than max_removed_share of its
    bytes."""
    from pyspark.sql import functions as F

    num_in, bytes_in = documents.record.num_documents, documents.record.num_bytes
    output.report(Progress(0, num_in, "documents", "paragraphs"))
    spark, files = spark_session(resources), documents.files("documents/*.parquet")
    groups = read_documents(spark, files, resources, "id", "collection", "url").select("id", _group().alias("group"))
    frame = read_documents(spark, files, resources, "id", "source", "offset", "collection", "domain", "url", "text")
    prose = frame.where(~F.col("domain").isin(CODE, COMMIT)).select(
        "id", F.xxhash64("source", "offset").alias("record"), _group().alias("group"), "text"
    )
    keyed = prose.mapInArrow(partial(paragraph_keys, min_words=recipe.min_words), KEY_COLUMNS)
    by_key = keyed.repartition("key").sortWithinPartitions("key", "record", "id")
    repeated = by_key.mapInArrow(partial(frequent_keys, min_documents=recipe.min_documents), KEY_COLUMNS).persist()
    per_document = repeated.groupBy("id").agg(F.sort_array(F.collect_set("key")).alias("keys"))
    columns = f"{DOCUMENT_COLUMNS}, bytes_before long, reason string"
    remover = partial(
        remove_paragraphs, files=files, min_words=recipe.min_words, min_remaining_chars=recipe.min_remaining_chars
    )
    count = resources.shuffle_partitions
    marks = groups.join(per_document, "id", "left").repartitionById(count, id_range_column(count))
    rewritten = marks.mapInArrow(remover, columns).persist()
    num_paragraphs = _write_boilerplate(repeated, groups, files, recipe, output.path("boilerplate.parquet"))
    _check_removed_share(rewritten, recipe, output.path("boilerplate.parquet"))
    totals = rewritten.where("num_bytes < bytes_before").select(
        (F.col("bytes_before") - F.col("num_bytes")).alias("num_bytes")
    )
    (lost,) = totals.agg(F.count("num_bytes").alias("num_changed"), F.sum("num_bytes").alias("num_bytes")).collect()
    dropped = rewritten.where("reason <> ''").select("id", "reason", F.lit("").alias("kept_id"))
    reasons = count_reasons(write_table(dropped, output, "dropped.parquet", "reason"))
    kept = rewritten.where("reason = ''").select(*names_of(DOCUMENT_COLUMNS))
    _, counts = write_documents(kept, output, "documents", bytes_in, "domain")
    check_counts(counts, reasons, num_in)
    for cached in (repeated, rewritten):
        cached.unpersist()
    return BoilerplateFreeDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=sum(size for _, size in counts.values()),
        dropped=reasons,
        num_paragraphs=num_paragraphs,
        num_changed=lost.num_changed,
        num_bytes_removed=lost.num_bytes or 0,
    )


def _group():
    """A hash of the collection, and of the host where a document has an address: other sites have other navigation."""
    from pyspark.sql import functions as F

    host = F.regexp_extract(F.lower("url"), r"^[a-z]+://(?:[^/@]*@)?(?:www\.)?([^/:?#]*)", 1)
    return F.xxhash64("collection", host)


def _write_boilerplate(
    repeated: DataFrame, groups: DataFrame, files: list[StoredFile], recipe: BoilerplateRecipe, path: Path
) -> int:
    """Write the removed paragraphs with the number of documents that held them; returns the number of paragraphs."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import functions as F

    counts = (
        repeated.select("key", "record", "id")
        .groupBy("key")
        .agg((F.count_distinct("record") + 1).alias("num_documents"), F.min("id").alias("id"))
        .persist()
    )
    shown = counts.orderBy(F.desc("num_documents"), "key").take(MAX_SHOWN)
    wanted: dict[str, list[int]] = {}
    for row in shown:
        wanted.setdefault(row.id, []).append(row.key)
    schema = "id string, keys array<long>"
    examples = repeated.sparkSession.createDataFrame(
        [(identity, keys) for identity, keys in sorted(wanted.items())], schema
    )
    sampler = partial(paragraph_samples, files=files, min_words=recipe.min_words)
    samples = groups.join(F.broadcast(examples), "id").mapInArrow(sampler, SAMPLE_COLUMNS)
    owners = {row.key: row for row in samples.collect()}
    table = [
        {
            "digest": f"{row.key % 2**64:016x}",
            "collection": owners[row.key].collection,
            "num_documents": row.num_documents,
            "text": owners[row.key].text,
            "id": row.id,
            "source": owners[row.key].source,
        }
        for row in shown
    ]
    pq.write_table(pa.Table.from_pylist(table, arrow_schema(EVIDENCE_COLUMNS)), path, compression="zstd")
    num_paragraphs = counts.count()
    counts.unpersist()
    return num_paragraphs


def _check_removed_share(rewritten: DataFrame, recipe: BoilerplateRecipe, evidence_path: Path) -> None:
    import pyarrow.parquet as pq
    from pyspark.sql import functions as F

    def shown(_: str, collection: str, __: str) -> list[str]:
        lines = [line for line in pq.read_table(evidence_path).to_pylist() if line["collection"] == collection][
            :NUM_EXAMPLES
        ]
        return [f"{line['text'][:80]!r} in {line['num_documents']} documents ({line['source']})" for line in lines]

    ceiling = Ceiling(
        "boilerplate.max_removed_share",
        recipe.max_removed_share,
        lambda _: "bytes are paragraphs that its documents share",
        "Look whether these are copies of whole documents; then raise boilerplate.min_documents or max_removed_share",
    )
    lost = (F.col("bytes_before") - F.col("num_bytes")).alias("removed")
    judged = rewritten.select("collection", F.lit("").alias("reason"), F.col("bytes_before").alias("amount"), lost)
    check_removed_share(judged, (COLLECTION,), ceiling, shown)
