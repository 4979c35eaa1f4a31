"""Near-duplicates of signed documents on Spark: only numbers are shuffled, texts are read from the document files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tasks.data.deduplication.duplicate_candidates import (
    EDGES,
    KEYS,
    PAIRS,
    SIGNATURES,
    WANTED,
    Signing,
    pair_candidates,
    send_shingles,
    send_stored_keys,
    sign_documents,
    verify_pairs,
    want_shingles,
)
from tasks.data.deduplication.minhash import banding, permutations
from tasks.data.records.parcels import PARCEL_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from configs.files.stored_files import StoredFile
    from configs.schema import DeduplicationRecipe


@dataclass(frozen=True)
class NearDuplicates:
    """Persisted parcels: `release` them when everything that follows has been written."""

    sent: DataFrame
    """KEYS and SIGNATURES of the documents."""
    edges: DataFrame
    """Verified pairs of near-duplicates, EDGES."""
    num_edges: int

    @property
    def signatures(self) -> DataFrame:
        return self.sent.where(f"kind = '{SIGNATURES}'")

    def release(self) -> None:
        """Frees what is persisted."""
        self.sent.unpersist()
        self.edges.unpersist()


def signing_of(recipe: DeduplicationRecipe, num_partitions: int, num_files: int) -> Signing:
    """The Signing of a recipe: datasketch's permutations and its banding for the threshold."""
    num_bands, num_rows = banding(recipe.threshold, recipe.num_permutations)
    return Signing(
        recipe.ngram_size, permutations(recipe.num_permutations), num_bands, num_rows, num_partitions, num_files
    )


def near_duplicates(
    ids: DataFrame,
    files: list[StoredFile],
    stored: DataFrame | None,
    earlier: list[StoredFile],
    signing: Signing,
    threshold: float,
) -> NearDuplicates:
    """Verified pairs among the documents `ids` of `files`, and between them and earlier ones.

    ids: parcels with a column `id`, each addressed to its id_range; stored: rows (path) of the files of earlier
    signatures; earlier: the files of their documents."""
    count = signing.num_partitions
    signer = partial(sign_documents, files=files, signing=signing)
    sent = delivered(ids, count).mapInArrow(signer, PARCEL_COLUMNS).persist()
    keys = sent.where(f"kind = '{KEYS}'")
    if stored is not None:
        keys = keys.unionByName(stored.mapInArrow(partial(send_stored_keys, signing=signing), PARCEL_COLUMNS))
    pairs = delivered(keys, count).mapInArrow(partial(pair_candidates, num_partitions=count), PARCEL_COLUMNS)
    wanted = delivered(pairs, count).mapInArrow(partial(want_shingles, num_partitions=count), PARCEL_COLUMNS).persist()
    sender = partial(send_shingles, files=[*files, *earlier], ngram_size=signing.ngram_size)
    shingles = delivered(wanted.where(f"kind = '{WANTED}'"), count).mapInArrow(sender, PARCEL_COLUMNS)
    compared = delivered(wanted.where(f"kind = '{PAIRS}'").unionByName(shingles), count)
    edges = compared.mapInArrow(partial(verify_pairs, threshold=threshold), PARCEL_COLUMNS).persist()
    num_edges = sum(row.num_rows for row in edges.where(f"kind = '{EDGES}'").select("num_rows").collect())
    wanted.unpersist()
    return NearDuplicates(sent, edges, num_edges)


def delivered(parcels: DataFrame, count: int) -> DataFrame:
    """Every parcel in the partition that it is addressed to."""
    return parcels.repartitionById(count, "target")
