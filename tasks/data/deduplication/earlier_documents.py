"""Lists the documents that earlier runs of deduplicate_documents kept, so that a new crawl is compared with them.

It reads directories with documents/ and signatures/. It is not a step, so the directories are read in every run. The
digest covers the files' names and contents, not their location.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from configs.files.stored_files import StoredFile, given_file
from infra.step import digest_of
from infra.storage.store import hash_file
from tasks.data.deduplication.minhash import signing_metadata
from tasks.data.deduplication.survivor_parts import SIGNATURE_METADATA
from tasks.data.records.document_files import read_documents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from configs.schema import DeduplicationRecipe, SparkResources

FIX = "name directories that deduplicate_documents wrote, or none, under data.recipe.deduplicate.previous"


@dataclass(frozen=True)
class EarlierDocuments:
    """The files of all directories, in order."""

    document_paths: list[str]
    signature_paths: list[str]

    @property
    def digest(self) -> str:
        """sha256 over names and contents."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        paths = [Path(path) for path in (*self.document_paths, *self.signature_paths)]
        return digest_of([[path.parent.name, path.name, hash_file(path)] for path in paths])

    @property
    def document_files(self) -> list[StoredFile]:
        """For executors."""
        return [given_file(Path(path)) for path in self.document_paths]

    def signature_rows(self, spark: SparkSession) -> DataFrame | None:
        """(path) of every signature file; None where there is none."""
        import pyarrow as pa

        if not self.signature_paths:
            return None
        return spark.createDataFrame(pa.table({"path": self.signature_paths})).repartition("path")

    def check_signatures(self, recipe: DeduplicationRecipe) -> None:
        """Raises ValueError where signatures were made in another way than `recipe` makes them: they are not
        comparable."""
        import pyarrow.parquet as pq

        wanted = signing_metadata(recipe)
        for path in self.signature_paths:
            documents = Path(path).parent.with_name("documents") / Path(path).name
            if documents.exists() and pq.read_metadata(path).num_rows > pq.read_metadata(documents).num_rows:
                raise ValueError(f"{path} has more signatures than {documents} has documents: {FIX}")
            stored = json.loads((pq.read_schema(path).metadata or {}).get(SIGNATURE_METADATA, b"null"))
            if stored != wanted:
                raise ValueError(
                    f"{path}: its signatures were made with {stored}, deduplicate makes them with {wanted}: use the "
                    f"same values, or "
                    "deduplicate both corpora together (if only `probe` differs, this version cuts texts into other "
                    "words)"
                )

    def check_ids(self, spark: SparkSession, files: list[StoredFile], resources: SparkResources) -> None:
        """Raises ValueError where a document of `files` has the id of an earlier one with another text."""
        from pyspark.sql import functions as F

        if not self.document_paths:
            return
        digest = F.col("content_digest")
        new = read_documents(spark, files, resources, "id", "source", "content_digest")
        earlier = read_documents(spark, self.document_files, resources, "id", "content_digest")
        both = new.select("id", "source", digest.alias("digest")).join(
            earlier.select("id", digest.alias("earlier_digest")), "id"
        )
        changed = both.where("digest <> earlier_digest")
        examples = changed.orderBy("id").take(1)
        if examples:
            raise ValueError(
                f"document {examples[0].id} ({examples[0].source}) is in deduplicate.previous with another text: an id "
                f"is a position in "
                "a file; give the files of a new crawl names of their own"
            )


def list_earlier_documents(directories: tuple[str, ...]) -> EarlierDocuments:
    """The files of these directories. Raises ValueError for a directory without documents or with a missing file."""
    files: dict[str, list[str]] = {"documents": [], "signatures": []}
    for directory in directories:
        if "://" in directory:
            raise ValueError(
                f"deduplicate.previous: {directory} is no directory: copy it to a file system that executors see"
            )
        for name, paths in files.items():
            own = [str(path.absolute()) for path in sorted((Path(directory) / name).glob("*.parquet"))]
            if not own:
                raise ValueError(f"deduplicate.previous: {Path(directory) / name} holds no Parquet file: {FIX}")
            if own[0] in paths:
                raise ValueError(f"deduplicate.previous names {directory} twice: name it once")
            paths += own
        names = [{path.name for path in (Path(directory) / name).glob("*.parquet")} for name in files]
        if names[0] != names[1]:
            raise ValueError(
                f"deduplicate.previous: {sorted(names[0] ^ names[1])[0]} is only in one of documents/ and signatures/ "
                f"of {directory}, so a "
                f"part of it is lost: {FIX}"
            )
    return EarlierDocuments(files["documents"], files["signatures"])
