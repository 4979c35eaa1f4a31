"""Step: documents of any stage -> the same with every column that later stages read, with neutral values.

So `glm46 stage` can run one stage on a user's directory. Where the stage that sets a column has not run, neutral
means: no scores, a cluster of its own, to be trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, digest_of, step
from infra.storage.store import hash_file
from tasks.data.records.document_files import count_by, read_documents, write_documents
from tasks.data.records.documents import DOCUMENT_COLUMNS, SCORE_COLUMNS, TRAIN, UNBUCKETED, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.schema import SparkResources


@dataclass(frozen=True)
class DocumentFiles:
    """The files that an earlier stage wrote into a user's directory."""

    directory: Path

    def paths(self, pattern: str) -> list[Path]:
        """Files that match, in the order of their names."""
        return sorted(self.directory.glob(pattern))

    @property
    def digest(self) -> str:
        """sha256 over the bytes of the documents' files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of({path.name: hash_file(path) for path in self.paths("documents/*.parquet")})


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
    """Add the missing columns. Raises ValueError where a column of DOCUMENT_COLUMNS is missing."""
    paths = documents.paths("documents/*.parquet")
    output.report(Progress(0, 0, "documents", "reading"))
    frame = read_documents(spark_session(resources), paths, resources)
    missing = [name for name in names_of(DOCUMENT_COLUMNS) if name not in frame.columns]
    if missing:
        raise ValueError(
            f"{paths[0]} has no column {', '.join(missing)}: name a directory of sources, or the output of `glm46 "
            f"stage`"
        )
    num_bytes = sum(size for _, size in count_by(paths, "domain").values())
    written = write_documents(_with_neutral(frame), output.path("documents"), num_bytes)
    counts = count_by(written, "split", "domain")
    return CompleteDocuments(
        num_documents=sum(count for count, _ in counts.values()),
        num_bytes=num_bytes,
        train_bytes_by_domain={domain: size for (split, domain), (_, size) in counts.items() if split == TRAIN},
        num_scored=_num_scored(written),
    )


def _num_scored(paths: list[Path]) -> int:
    import pyarrow.compute as pc
    import pyarrow.dataset as dataset

    scores = [
        name for name in names_of(SCORE_COLUMNS) if name != "language"
    ]  # without scores, language is that of the source
    is_scored = reduce(lambda one, other: one | other, (pc.field(name).is_valid() for name in scores))
    return dataset.dataset([str(path) for path in paths]).count_rows(filter=is_scored)


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
