"""Step: filtered and synthetic documents, and prompts of RL -> those that overlap with no evaluation item.

overlap.py defines overlap. dropped.parquet and dropped_prompts.parquet name the item, by its id and by file and
record. contaminated.parquet shows the words that document and item share; common_runs.parquet has the hashes of runs
that too many documents hold to drop any. All records of role `evaluation` are protected, and so are the generated
problems that gate promotion or are held out.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial, reduce
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.decontamination.overlap import CHUNK_CHARS, HIT_COLUMNS, find_overlaps
from tasks.data.decontamination.protected_items import protected_items
from tasks.data.environments.passages import KIND as SEARCH
from tasks.data.records.document_files import check_counts, count_reasons, read_documents, write_documents, write_table
from tasks.data.records.documents import TRAIN
from tasks.data.text.text_chunks import chunk_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from configs.schema import DecontaminationRecipe, SparkResources
    from tasks.data.decontamination.item_names import ProtectedItems
    from tasks.data.decontamination.overlap import OverlapIndex
    from tasks.data.privacy.mask_personal_data import MaskedDocuments
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.prompts.collect_prompts import CollectedPrompts
    from tasks.data.sources.ingest_documents import IngestedDocuments


class DecontaminatedDocuments(Record):
    num_documents: int
    num_bytes: int
    num_protected_items: int
    num_common_runs: int
    """Runs of words shared with items that drop no document, since too many documents hold them: common phrases."""
    dropped: dict[str, int]
    train_bytes_by_domain: dict[str, int]
    held_out_bytes_by_domain: dict[str, int]
    num_prompts: int
    """Prompts in prompts.parquet."""
    prompts_by_domain: dict[str, int]
    num_dropped_prompts: int


@step(
    content=(
        "documents/*.parquet",
        "dropped.parquet",
        "contaminated.parquet",
        "common_runs.parquet",
        "prompts.parquet",
        "dropped_prompts.parquet",
    ),
    distributions=("pyspark", "pyarrow", "numpy", "phonenumbers", "python-stdnum", "detect-secrets", "tld"),
)
def decontaminate_documents(
    *,
    documents: Artifact[MaskedDocuments],
    synthetic: Artifact[SynthesizedProblems] | None,
    prompts: Artifact[CollectedPrompts] | None,
    ingested: Artifact[IngestedDocuments],
    recipe: DecontaminationRecipe,
    resources: SparkResources,
    output: Output,
) -> DecontaminatedDocuments:
    """Drop documents and prompts that overlap with an evaluation item, in every split. `synthetic` and `prompts` are
    None where only a user's documents are checked. Raises ValueError if nothing is left."""
    from pyspark.sql import functions as F

    spark = spark_session(resources)
    given = [documents, *([] if synthetic is None else [synthetic])]
    num_in = sum(artifact.record.num_documents for artifact in given)
    output.report(Progress(0, num_in, "documents", "indexing evaluation items"))
    items, overlaps = protected_items(ingested, synthetic, recipe, resources)
    prompts_by_domain, num_dropped_prompts = (
        _write_prompts(prompts.path("prompts.parquet"), items, overlaps, output) if prompts else ({}, 0)
    )
    index = spark.sparkContext.broadcast(overlaps)
    frames = [read_documents(spark, artifact.files("documents/*.parquet"), resources) for artifact in given]
    frame = reduce(lambda one, other: one.unionByName(other), frames)
    hits = frame.select("id", "text").mapInArrow(partial(find_overlaps, index=index), HIT_COLUMNS).persist()
    contaminated, common = _contaminated(hits, items.num_records, recipe.max_documents_per_run)
    contaminated = contaminated.persist()
    named_common = common.select(F.hex("run").alias("id"), "run")
    num_common = sum(count for count, _ in write_table(named_common, output, "common_runs.parquet").values())
    reasons = _write_evidence(contaminated, items, output)
    kept = frame.join(F.broadcast(contaminated.select("id")), "id", "left_anti").select(*frame.columns)
    num_bytes = sum(artifact.record.num_bytes for artifact in given)
    _, counts = write_documents(kept, output, "documents", num_bytes, "split", "domain")
    check_counts(counts, reasons, num_in)
    contaminated.unpersist()
    hits.unpersist()
    index.destroy()
    if not any(split == TRAIN for split, _ in counts):
        raise ValueError(
            f"all {num_in} documents overlap with evaluation items ({reasons}): raise decontaminate.ngram_size or "
            f"bring other text"
        )
    return DecontaminatedDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=sum(size for _, size in counts.values()),
        num_protected_items=items.count,
        num_common_runs=num_common,
        dropped=reasons,
        train_bytes_by_domain={domain: size for (split, domain), (_, size) in counts.items() if split == TRAIN},
        held_out_bytes_by_domain={domain: size for (split, domain), (_, size) in counts.items() if split != TRAIN},
        num_prompts=sum(prompts_by_domain.values()),
        prompts_by_domain=prompts_by_domain,
        num_dropped_prompts=num_dropped_prompts,
    )


def _contaminated(hits: DataFrame, num_records: int, max_documents: int) -> tuple[DataFrame, DataFrame]:
    """(id, item, run, shared, num_runs) of each document that overlaps, with its first item; and the runs that are
    common phrases.

    Only runs of records can be common: a document with an evaluated equation is dropped however many documents hold it.
    """
    from pyspark.sql import functions as F

    holders = hits.where(F.col("item") < num_records).groupBy("run").agg(F.count("id").alias("num_documents"))
    common = holders.where(F.col("num_documents") > max_documents).select("run", F.lit(True).alias("is_common"))
    marked = hits.join(common, "run", "left")
    distinctive = marked.where(F.col("is_common").isNull() | (F.col("item") >= num_records))
    smallest = F.min(F.struct("item", "run", "shared")).alias("smallest")
    named = distinctive.groupBy("id").agg(smallest, F.count("run").alias("num_runs"))
    return named.select("id", "smallest.*", "num_runs"), common


def _write_evidence(contaminated: DataFrame, items: ProtectedItems, output: Output) -> dict[str, int]:
    """dropped.parquet, and contaminated.parquet with what is shared, both sorted by document id; dropped documents by
    reason."""
    import pyarrow as pa
    from pyspark.sql import functions as F

    columns = {
        **_named(items, range(items.count)),
        "item_source": items.sources,
        "item_kind": items.kinds,
        "item_offset": items.offsets,
        "number": list(range(items.count)),
    }
    types = [pa.string()] * (len(columns) - 2) + [pa.int64()] * 2
    described = pa.table(columns, schema=pa.schema(list(zip(columns, types, strict=True))))
    known = F.broadcast(contaminated.sparkSession.createDataFrame(described))
    named = contaminated.withColumnRenamed("item", "number").join(known, "number")
    dropped = count_reasons(
        write_table(named.select("id", "reason", "kept_id", "item"), output, "dropped.parquet", "reason")
    )
    shared = ("item_source", "item_offset", "item_kind", "shared", "num_runs")
    write_table(named.select("id", F.col("kept_id").alias("item_id"), *shared), output, "contaminated.parquet")
    return dropped


def _named(items: ProtectedItems, numbers: Sequence[int]) -> dict[str, list[str]]:
    """Why texts that overlap with the items of these numbers are dropped: columns reason, kept_id, item."""
    return {
        "reason": [items.reason(number) for number in numbers],
        "kept_id": [items.ids[number] for number in numbers],
        "item": [items.address(number) for number in numbers],
    }


def _write_prompts(
    path: Path, items: ProtectedItems, overlaps: OverlapIndex, output: Output
) -> tuple[dict[str, int], int]:
    """Write prompts.parquet without prompts that overlap, and those to dropped_prompts.parquet; (number kept by domain,
    dropped)."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = pq.read_table(path)
    texts = [_shown(row) for row in prompts.select(["kind", "prompt", "answer"]).to_pylist()]
    bounds = chunk_bounds(map(len, texts), CHUNK_CHARS)
    hits = np.concatenate([np.empty(0, np.int64), *(overlaps.first_hits(texts[start:stop]) for start, stop in bounds)])
    gone = np.flatnonzero(hits >= 0)
    named = {"id": prompts.column("id").take(pa.array(gone)).to_pylist(), **_named(items, hits[gone].tolist())}
    dropped = pa.table(named, schema=pa.schema([(name, pa.string()) for name in named]))
    pq.write_table(dropped.sort_by("id"), output.path("dropped_prompts.parquet"), compression="zstd")
    kept = prompts.filter(pa.array(hits < 0))
    pq.write_table(kept, output.path("prompts.parquet"), compression="zstd")
    return dict(sorted(Counter(kept["domain"].to_pylist()).items())), len(gone)


def _shown(prompt: dict[str, str]) -> str:
    """What a policy may read of a prompt: of a search also its passages."""
    passages = json.loads(prompt["answer"])["passages"] if prompt["kind"] == SEARCH else []
    return "\n\n".join([prompt["prompt"], *passages])
