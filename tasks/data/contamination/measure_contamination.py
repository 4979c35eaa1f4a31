"""Step: everything that a run may train on -> the evaluation items that it still quotes.

Decontamination drops single documents, prompts and conversations. This step reads what came of it afterwards, as
training reads it: documents, whole repositories, conversations, preference pairs and prompts. So it also sees what a
later step put together, or what came by another way. contaminated_items.parquet names every item that some text quotes
by an unchanged or changed run, with one such text. contaminated_sources.parquet counts items by their source. Common
phrases, which decontamination allows, count for nothing here either.
"""

from __future__ import annotations

from collections import Counter
from functools import partial, reduce
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.contamination.trained_texts import CHATS, COLUMNS_OF, DOCUMENTS, PAIRS, PROMPTS, find_in_trained
from tasks.data.decontamination.overlap import HIT_COLUMNS
from tasks.data.decontamination.protected_items import protected_items
from tasks.data.records.document_files import map_documents, read_documents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import DecontaminationRecipe, SparkResources
    from tasks.data.chats.collect_chats import CollectedChats
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.decontamination.item_names import ProtectedItems
    from tasks.data.preferences.collect_preferences import CollectedPreferences
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.repositories.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.sources.ingest_documents import IngestedDocuments


class MeasuredContamination(Record):
    num_items: int
    """Protected items: records of role `evaluation`, and generated problems that gate promotion or are held out."""
    num_contaminated_items: int
    num_sources: int
    worst_source: str
    """Source of which the largest share of items is in training text, the first of them by name; empty where there are
    no items."""
    worst_source_items: int
    worst_source_contaminated: int
    contaminated_by_kind: dict[str, int]
    """Contaminated items by kind of training text; one item may count for several."""

    @property
    def worst_share(self) -> float:
        """Share of the worst source's items that training text holds."""
        return self.worst_source_contaminated / self.worst_source_items if self.worst_source_items else 0.0


@step(
    content=("contaminated_items.parquet", "contaminated_sources.parquet"),
    distributions=("pyspark", "pyarrow", "numpy", "phonenumbers", "python-stdnum", "detect-secrets", "tld"),
)
def measure_contamination(
    *,
    ingested: Artifact[IngestedDocuments],
    synthetic: Artifact[SynthesizedProblems],
    documents: Artifact[DecontaminatedDocuments] | None,
    repositories: Artifact[ConcatenatedRepositories] | None,
    chats: Artifact[CollectedChats],
    preferences: Artifact[CollectedPreferences] | None,
    recipe: DecontaminationRecipe,
    resources: SparkResources,
    output: Output,
) -> MeasuredContamination:
    """Look up every trained text. `documents` and `repositories` are None where a run reads only conversations,
    `preferences` where no phase reads pairs."""
    spark = spark_session(resources)
    items, overlaps = protected_items(ingested, synthetic, recipe, resources)
    output.report(Progress(0, items.count, "items", "looking for evaluation items in training text"))
    files: dict[str, list[StoredFile]] = {CHATS: chats.files("chats/*.parquet")}
    if documents is not None:
        texts = [each for each in (documents, repositories) if each is not None]
        files[DOCUMENTS] = [file for each in texts for file in each.files("documents/*.parquet")]
        files[PROMPTS] = documents.files("prompts.parquet")
    if preferences is not None:
        files[PAIRS] = preferences.files("pairs/*.parquet")
    index = spark.sparkContext.broadcast(overlaps)
    frames = [
        map_documents(
            spark,
            given,
            resources,
            partial(find_in_trained, kind=kind, index=index),
            f"{HIT_COLUMNS}, kind string",
            *COLUMNS_OF[kind],
        )
        for kind, given in sorted(files.items())
        if given
    ]
    hits = reduce(lambda one, other: one.unionByName(other), frames)
    if documents is not None:
        common = read_documents(spark, documents.files("common_runs.parquet"), resources)
        hits = hits.join(common.select("run"), "run", "left_anti")
    record = _counted(hits, items, output)
    index.destroy()
    return record


def _counted(hits: DataFrame, items: ProtectedItems, output: Output) -> MeasuredContamination:
    """Write the items that were found, and count them by source; no more rows than items come to the driver."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import functions as F

    smallest = F.min(F.struct("text_id", "shared")).alias("smallest")
    by_text = hits.withColumnRenamed("id", "text_id").groupBy("item", "kind")
    found = by_text.agg(smallest, F.count_distinct("text_id").alias("num_texts")).select(
        "item", "kind", "smallest.*", "num_texts"
    )
    rows = found.toArrow().sort_by([("item", "ascending"), ("kind", "ascending")])
    numbers = rows["item"].to_pylist()
    named = {
        "id": pa.array([items.ids[number] for number in numbers], pa.string()),
        "source": pa.array([items.sources[number] for number in numbers], pa.string()),
        "offset": pa.array([items.offsets[number] for number in numbers], pa.int64()),
    }
    columns = ("kind", "text_id", "shared", "num_texts")
    pq.write_table(
        pa.table(named | {name: rows[name] for name in columns}),
        output.path("contaminated_items.parquet"),
        compression="zstd",
    )
    asked, lost = Counter(items.sources), Counter(items.sources[number] for number in set(numbers))
    names = sorted(asked)
    counts = {"source": names, "num_items": [asked[name] for name in names]}
    counts |= {"num_contaminated": [lost[name] for name in names]}
    types = (pa.string(), pa.int64(), pa.int64())
    schema = pa.schema(list(zip(counts, types, strict=True)))
    pq.write_table(pa.table(counts, schema=schema), output.path("contaminated_sources.parquet"), compression="zstd")
    worst = max(names, key=lambda name: lost[name] / asked[name], default="")
    return MeasuredContamination(
        num_items=items.count,
        num_contaminated_items=len(set(numbers)),
        num_sources=len(names),
        worst_source=worst,
        worst_source_items=asked[worst],
        worst_source_contaminated=lost[worst],
        contaminated_by_kind=dict(sorted(Counter(rows["kind"].to_pylist()).items())),
    )
