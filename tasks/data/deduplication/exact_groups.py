"""Groups documents of equal content. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.deduplication.document_ranks import group_sizes, group_starts, matching_rows, rank_order
from tasks.data.deduplication.page_duplicates import LOST, PAGED
from tasks.data.deduplication.ranked_documents import RANKED
from tasks.data.records.parcels import addressed, id_range, unpacked

if TYPE_CHECKING:
    import pyarrow as pa

SURVIVORS, EARLIER, FOLLOWERS = "survivors", "earlier", "followers"
SURVIVOR_COLUMNS = ["id", "is_new", "flaws", "shortness", "smallest", "collection"]
URL, EXACT, NEAR = "duplicate_url", "exact_duplicate", "near_duplicate"
REASONS = (URL, EXACT, NEAR)
"""Why a document is dropped: parcels carry the index."""


def exact_groups(batches: Iterator[pa.RecordBatch], num_partitions: int) -> Iterator[pa.RecordBatch]:
    """From RANKED, LOST and PAGED parcels those of the documents that are compared with each other, one per content:
    SURVIVORS, and EARLIER ones, with the smallest id of their content; and FOLLOWERS, the other new documents.

    A follower (id, same, is_final, reason, collection) has the verdict of the survivor `same`, or is final: then that
    is kept which `same` names."""
    import pyarrow as pa

    received = unpacked(batches)
    documents = received.get(RANKED)
    if documents is None:
        return
    if LOST in received:
        lost = received[LOST].column("id").to_numpy()
        documents = documents.filter(pa.array(~np.isin(documents.column("id").to_numpy(), lost)))
    if not documents.num_rows:
        return
    digests = [documents.column(name).to_numpy() for name in ("digest_high", "digest_low")]
    order = rank_order(documents, *digests)
    starts = group_starts(*(digest[order] for digest in digests))
    documents = documents.take(pa.array(order)).combine_chunks()
    ids, is_new = (documents.column(name).to_numpy() for name in ("id", "is_new"))
    survivors = documents.take(pa.array(starts))
    survivors = survivors.append_column("smallest", pa.array(np.minimum.reduceat(ids, starts)))
    for kind, are_wanted in ((SURVIVORS, is_new[starts]), (EARLIER, ~is_new[starts])):
        chosen = survivors.select(SURVIVOR_COLUMNS).filter(pa.array(are_wanted))
        yield from addressed(kind, chosen, id_range(chosen.column("id").to_numpy(), num_partitions))
    same = np.repeat(ids[starts], group_sizes(starts, len(ids)))
    is_copy = is_new.copy()
    is_copy[starts] = False
    copies = documents.select(["id", "collection"]).filter(pa.array(is_copy))
    yield from _send_followers(copies, same[is_copy], np.zeros(copies.num_rows, bool), EXACT, num_partitions)
    if PAGED in received:
        yield from _follow_pages(received[PAGED], ids[is_new], same[is_new], num_partitions)


def _follow_pages(paged: pa.Table, ids: np.ndarray, same: np.ndarray, num_partitions: int) -> Iterator[pa.RecordBatch]:
    """What is kept for a page may itself be a duplicate of something else, unless an earlier run kept it."""
    kept = paged.column("kept").to_numpy()
    order = np.argsort(ids)
    rows, is_compared = matching_rows(ids[order], kept)
    final = kept.copy()
    final[is_compared] = same[order[rows]]
    yield from _send_followers(paged.select(["id", "collection"]), final, ~is_compared, URL, num_partitions)


def _send_followers(
    documents: pa.Table, same: np.ndarray, is_final: np.ndarray, reason: str, num_partitions: int
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    codes = np.full(documents.num_rows, REASONS.index(reason), dtype=np.int8)
    followers = documents
    for name, values in (("same", same), ("is_final", is_final), ("reason", codes)):
        followers = followers.append_column(name, pa.array(values))
    yield from addressed(FOLLOWERS, followers, id_range(same, num_partitions))
