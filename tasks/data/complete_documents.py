"""Step: documents of any stage -> the same with every column that later stages read, with neutral values.

So `glm46 stage` can run one stage on a user's directory. Where the stage that sets a column has not run, neutral
means: no scores, a cluster of its own, to be trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.files.stored_files import StoredFile, given_file
from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, digest_of, step
from infra.storage.store import hash_file
from tasks.data.records.document_files import count_by, read_documents, write_documents
from tasks.data.records.documents import DOCUMENT_COLUMNS, SCORE_COLUMNS, TRAIN, UNBUCKETED, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import SparkResources

SCORES = tuple(name for name in names_of(SCORE_COLUMNS) if name != "language")
"""Without the language, which the source says where nothing detected it."""


@dataclass(frozen=True)
class DocumentFiles:
    """The files that an earlier stage wrote into a user's directory."""

    directory: Path

    def files(self, pattern: str) -> list[StoredFile]:
        """Files that match, in the order of their names."""
        return [given_file(path) for path in sorted(self.directory.glob(pattern))]

    @property
    def digest(self) -> str:
        """sha256 over the bytes of the documents' files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of({file.name: hash_file(Path(file.uri)) for file in self.files("documents/*.parquet")})


class CompleteDocuments(Record):
    num_documents: int
    num_bytes: int
    train_bytes_by_domain: dict[str, int]
    num_scored: int
    """Documents with any score."""


@step(content=("documents/*.parquet",), distributions=("pyspark", "pyarrow"))
def complete_documents(
    *, documents: Artifact[Any] | DocumentFiles, resources: SparkResources, output: Output
) -> CompleteDocuments:
    """Raises ValueError where a column of DOCUMENT_COLUMNS is missing."""
    files = documents.files("documents/*.parquet")
    output.report(Progress(0, 0, "documents", "reading"))
    spark = spark_session(resources)
    frame = read_documents(spark, files, resources)
    missing = [name for name in names_of(DOCUMENT_COLUMNS) if name not in frame.columns]
    if missing:
        raise ValueError(
            f"{files[0].uri} has no column {', '.join(missing)}: name a directory of sources, or the output of `glm46 "
            f"stage`"
        )
    num_bytes = sum(size for _, size in count_by(read_documents(spark, files, resources, "num_bytes")).values())
    written, counts = write_documents(_with_neutral(frame), output, "documents", num_bytes, "split", "domain")
    return CompleteDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=num_bytes,
        train_bytes_by_domain={domain: size for (split, domain), (_, size) in counts.items() if split == TRAIN},
        num_scored=_num_scored(read_documents(spark, written, resources, *SCORES)),
    )


def _num_scored(scores: DataFrame) -> int:
    from pyspark.sql import functions as F

    return scores.where(F.coalesce(*(F.col(name).cast("string") for name in SCORES)).isNotNull()).count()


def _with_neutral(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    scores = {
        name: F.lit(None).cast(kind)
        for name, _, kind in (column.partition(" ") for column in SCORE_COLUMNS.split(", "))
    }
    neutral = scores | {
        "language": F.col("lang"),
        "cluster": F.col("id"),
        "split": F.lit(TRAIN),
        "quality_bucket": F.lit(UNBUCKETED),
    }
    return frame.withColumns({name: value for name, value in neutral.items() if name not in frame.columns})
