"""Shows the largest clusters of near-duplicates: a template with other facts looks like one page many times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Record

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.schema import DeduplicationRecipe


class DuplicateCluster(Record):
    """The near-duplicates that one source loses to one kept document (of this source or another)."""

    collection: str
    num_removed: int
    num_documents: int
    """Documents of the source."""
    kept_id: str
    kept: str
    """The beginning of the kept text, on one line."""
    removed_id: str
    removed: str
    """The beginning of a removed text, on one line."""

    def describe(self) -> str:
        """One line of a report."""
        return (
            f"{self.num_removed:,} of {self.num_documents:,} documents of {self.collection} went as near-duplicates "
            f"of {self.kept_id} "
            f"({self.kept!r}), for example {self.removed_id} ({self.removed!r})"
        )


def largest_clusters(clusters: pa.Table, num_documents: dict[str, int]) -> tuple[DuplicateCluster, ...]:
    """The LARGEST of duplicate_summary, the largest first; num_documents: of every collection."""
    largest = [
        DuplicateCluster(
            num_documents=num_documents[row["collection"]],
            **row | {side: " ".join(row[side].split()) for side in ("kept", "removed")},
        )
        for row in clusters.to_pylist()
    ]
    return tuple(sorted(largest, key=lambda one: (-one.num_removed, one.collection, one.kept_id)))


def check_cluster_share(clusters: tuple[DuplicateCluster, ...], recipe: DeduplicationRecipe) -> None:
    """Raises ValueError where one cluster removes a larger share of a source than the recipe allows."""
    for cluster in clusters:
        if cluster.num_removed > recipe.max_cluster_share * cluster.num_documents:
            raise ValueError(
                f"{cluster.describe()}: more than deduplicate.max_cluster_share ({recipe.max_cluster_share}) allows "
                f"one cluster of a "
                "source. Look whether a template makes different pages look alike; then raise deduplicate.threshold "
                "or max_cluster_share"
            )
