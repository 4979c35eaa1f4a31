"""Verdicts on duplicates, from ranks to dropped documents without Spark, against plain loops over documents."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest

from tasks.data.deduplication.document_ranks import matching_rows
from tasks.data.deduplication.duplicate_candidates import EDGES
from tasks.data.deduplication.duplicate_verdicts import COUNTED, DROPPED, NEIGHBOURS, give_verdicts, send_links
from tasks.data.deduplication.edge_components import component_roots
from tasks.data.deduplication.exact_groups import EARLIER, EXACT, FOLLOWERS, NEAR, REASONS, SURVIVORS, URL, exact_groups
from tasks.data.deduplication.page_duplicates import MAX_RECORDS_PER_FILE, PIECES, page_losses
from tasks.data.deduplication.ranked_documents import META_COLUMNS, RANKED, send_ranked
from tasks.data.deduplication.settled_clusters import CLUSTERS, MOVED, send_members, send_roots, settle_clusters
from tasks.data.records.documents import CODE, arrow_schema, document_id
from tasks.data.records.documents_by_id import MARKS
from tasks.data.records.parcels import digest_numbers, id_strings, parcels, unpacked
from tests.data.deduplication.test_minhash import union_find

SCHEMA = arrow_schema(META_COLUMNS)
MIN_REMOVED = 3


def random_documents(draw, count):
    """Rows of META_COLUMNS with is_earlier: few contents, pages and scores, so that all rules meet."""
    documents = []
    for offset in range(count // 2):
        of_record = {
            "source": f"file-{draw.randrange(3)}.gz!part-{draw.randrange(2)}",
            "offset": offset,
            "collection": draw.choice("abc"),
            "domain": draw.choice(["web", "web", "web", CODE]),
            "url": draw.choice(["", f"https://example.org/{draw.randrange(count // 4)}", "ftp://example.org"]),
            "is_earlier": draw.random() < 0.2,
        }
        documents += [
            of_record
            | {
                "id": document_id(of_record["source"], offset, piece),
                "piece": piece,
                "content_digest": f"{draw.randrange(count // 2):064x}"[::-1],
                "num_chars": draw.randrange(100, 103),
                "quality": draw.choice([None, 0.0, 0.5, draw.random()]),
            }
            for piece in range(draw.randrange(1, 4))
        ]
    again = [{**row, "is_earlier": False} for row in documents if row["is_earlier"] and draw.random() < 0.3]
    return documents + again


def rank(row):
    """The smallest is kept."""
    scored = row["quality"] is not None
    return not row["is_earlier"], not scored, -row["quality"] if scored else 0, -row["num_chars"], row["id"]


def plain_pages(documents):
    """The kept id for each new document whose record has the page of a better one."""
    records = defaultdict(list)
    for row in documents:
        if row["url"].startswith("https") and row["domain"] != CODE:
            records[row["url"], row["source"], row["offset"], row["is_earlier"]].append(row)
    pages = defaultdict(list)
    for (url, source, _, _), pieces in records.items():
        first = min(pieces, key=lambda row: (row["piece"], row["id"]))
        scores = [row["quality"] for row in pieces if row["quality"] is not None]
        whole = {"quality": max(scores, default=None), "num_chars": sum(row["num_chars"] for row in pieces)}
        pages[url].append((source.split("!")[0], {**first, **whole}, pieces))
    lost = {}
    for page in pages.values():
        most = max(Counter(file for file, _, _ in page).values())
        kept = min((whole for _, whole, _ in page), key=rank)["id"]
        if len(page) > 1 and most <= MAX_RECORDS_PER_FILE:
            gone = (pieces for _, whole, pieces in page if whole["id"] != kept and not whole["is_earlier"])
            lost |= {row["id"]: kept for pieces in gone for row in pieces}
    return lost


def plain_verdicts(documents, pairs_of):
    """(reason, kept id, cluster) of every new document; pairs_of gives pairs of ids among those that it is given."""
    lost = plain_pages(documents)
    groups = defaultdict(list)
    for row in documents:
        if row["id"] not in lost:
            groups[row["content_digest"]].append(row)
    best = {digest: min(rows, key=rank) for digest, rows in groups.items()}
    smallest = {best[digest]["id"]: min(row["id"] for row in rows) for digest, rows in groups.items()}
    survivors = {row["id"]: row for row in best.values()}
    roots = union_find([(int(low, 16), int(high, 16)) for low, high in pairs_of(sorted(survivors))])
    members = defaultdict(list)
    for node, root in roots.items():
        members[root].append(survivors[f"{node:016x}"])
    kept, cluster = {identity: row for identity, row in survivors.items()}, dict(smallest)
    for rows in members.values():
        for row in rows:
            kept[row["id"]] = min(rows, key=rank)
            cluster[row["id"]] = min(smallest[one["id"]] for one in rows)
    verdicts = {}
    for digest, rows in groups.items():
        for row in (row for row in rows if not row["is_earlier"]):
            own = kept[best[digest]["id"]]
            is_survivor = row is best[digest]
            reason = "" if is_survivor and own is row else NEAR if is_survivor else EXACT
            verdicts[row["id"]] = (reason, own["id"], "" if reason else cluster[row["id"]])
    final = {identity: verdicts.get(kept_id, ("", kept_id))[1] for identity, kept_id in lost.items()}
    return verdicts | {identity: (URL, kept_id, "") for identity, kept_id in final.items()}


def delivered(sent, num_targets, function, **options):
    """What `function` gives in every partition for the parcels that are addressed to it."""
    rows = [row for batch in sent for row in (batch.slice(at, 1) for at in range(batch.num_rows))]
    return [
        given
        for target in range(num_targets)
        for given in function(iter([row for row in rows if row.column("target")[0].as_py() == target]), **options)
    ]


def of_kind(sent, *kinds):
    """The parcels of these kinds."""
    return [batch for batch in sent if batch.column("kind")[0].as_py() in kinds]


def random_pairs(seed):
    def pairs_of(ids):
        draw = random.Random(seed)
        pairs = [tuple(sorted(draw.sample(ids, 2))) for _ in range(len(ids) // 3)]
        return sorted(set(pairs))

    return pairs_of


def ranked_parcels(documents, count):
    """Parcels of two tasks for new documents, and one for earlier ones."""
    new = [row for row in documents if not row["is_earlier"]]
    earlier = [row for row in documents if row["is_earlier"]]
    return [
        parcel
        for rows, is_new in ((new[::2], True), (new[1::2], True), (earlier, False))
        for parcel in send_ranked(iter(pa.Table.from_pylist(rows, SCHEMA).to_batches(5)), is_new, count)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 3])
def test_verdicts_are_those_of_plain_loops(seed, count):
    draw = random.Random(seed)
    documents = random_documents(draw, 240)
    ranked = ranked_parcels(documents, count)
    lost = delivered(of_kind(ranked, PIECES), count, page_losses, num_partitions=count)
    grouped = delivered([*of_kind(ranked, RANKED), *lost], count, exact_groups, num_partitions=count)
    named = unpacked(iter(of_kind(grouped, SURVIVORS, EARLIER)))
    ids = sorted(
        identity for table in named.values() for identity in id_strings(table.column("id").to_numpy()).to_pylist()
    )
    pairs = random_pairs(seed)(ids)
    ends = np.array([[int(identity, 16) for identity in pair] for pair in pairs], dtype=np.uint64)
    shared = np.array([draw.randrange(70, 73) for _ in pairs])
    table = pa.table({"left": ends[:, 0], "right": ends[:, 1], "num_shared": shared, "num_union": [100] * len(pairs)})
    edges = list(parcels(EDGES, 0, table))
    roots = list(send_roots(component_roots(iter(edges)), count))
    members = delivered([*of_kind(grouped, SURVIVORS, EARLIER), *roots], count, send_members, num_partitions=count)
    settled = delivered(members, count, settle_clusters, num_partitions=count, min_removed=MIN_REMOVED)
    links = list(send_links(iter(edges), count))
    sent = [*of_kind(grouped, SURVIVORS, FOLLOWERS), *of_kind(settled, MOVED), *links]
    verdicts = delivered(sent, count, give_verdicts, num_partitions=count, num_files=2)
    expected = plain_verdicts(documents, random_pairs(seed))
    assert verdicts_of(verdicts) == expected
    assert {reason for reason, _, _ in expected.values()} == {"", *REASONS}
    collection = {row["id"]: row["collection"] for row in documents}
    check_counts(unpacked(iter(verdicts))[COUNTED], expected, collection)
    check_neighbours(unpacked(iter(verdicts))[NEIGHBOURS], expected, table)
    check_clusters(unpacked(iter(settled)).get(CLUSTERS), expected, collection)


def verdicts_of(sent):
    """(reason, kept id, cluster) by id."""
    tables = unpacked(iter(sent))
    marks, dropped = (tables[kind] for kind in (MARKS, DROPPED))
    texts = {
        (table, name): id_strings(tables[table].column(name).to_numpy()).to_pylist()
        for table, name in ((MARKS, "id"), (MARKS, "cluster"), (DROPPED, "id"), (DROPPED, "kept"))
    }
    reasons = [REASONS[code] for code in dropped.column("reason").to_pylist()]
    gone = zip(reasons, texts[DROPPED, "kept"], strict=True)
    verdicts = {identity: (*verdict, "") for identity, verdict in zip(texts[DROPPED, "id"], gone, strict=True)}
    kept = zip(texts[MARKS, "id"], texts[MARKS, "cluster"], strict=True)
    verdicts |= {identity: ("", identity, cluster) for identity, cluster in kept}
    assert len(verdicts) == marks.num_rows + dropped.num_rows
    return verdicts


def check_counts(counted, expected, collection):
    """COUNTED are all documents of a collection and those that are dropped."""
    sums = Counter()
    for row in counted.to_pylist():
        sums[row["collection"], "all"] += row["num_documents"]
        sums[row["collection"], "removed"] += row["num_removed"]
    plain = Counter((collection[identity], "all") for identity in expected)
    plain += Counter((collection[identity], "removed") for identity, (reason, _, _) in expected.items() if reason)
    assert sums == plain


def check_neighbours(neighbours, expected, edges):
    """The most similar neighbour, the smallest of several."""
    best = {}
    for edge in edges.to_pylist():
        for own, other in ((edge["left"], edge["right"]), (edge["right"], edge["left"])):
            best[own] = min(best.get(own, (0, 0)), (-edge["num_shared"], other))
    rows = {row["id"]: (-row["num_shared"], row["neighbour"], row["kept"]) for row in neighbours.to_pylist()}
    near = {int(identity, 16): int(kept, 16) for identity, (reason, kept, _) in expected.items() if reason == NEAR}
    assert rows == {identity: (*best[identity], kept) for identity, kept in near.items()}


def check_clusters(clusters, expected, collection):
    """(removed, kept) of clusters that take MIN_REMOVED near-duplicates from a collection."""
    gone = defaultdict(list)
    for identity, (reason, kept, _) in expected.items():
        if reason == NEAR:
            gone[kept, collection[identity]].append(identity)
    plain = {(name, len(ids), kept, min(ids)) for (kept, name), ids in gone.items() if len(ids) >= MIN_REMOVED}
    rows = clusters.to_pylist() if clusters is not None else []
    assert plain >= {
        (row["collection"], row["num_removed"], f"{row['kept']:016x}", f"{row['removed']:016x}") for row in rows
    } and bool(rows) == bool(plain)


def test_a_url_of_many_records_is_sent_a_bounded_number_of_times():
    """No more than show that it names no page: one URL of a million records is no task's burden."""
    draw = random.Random(3)
    documents = [{**row, "is_earlier": False, "domain": "web"} for row in random_documents(draw, 200)]
    for row in documents:
        row["url"] = "https://example.org/site"
    sent = list(send_ranked(iter(pa.Table.from_pylist(documents, SCHEMA).to_batches()), True, 2))
    pieces = unpacked(iter(of_kind(sent, PIECES)))[PIECES]
    records = {(row["file"], row["source"], row["offset"]) for row in pieces.to_pylist()}
    assert Counter(file for file, _, _ in records) == dict.fromkeys(
        (f"file-{number}.gz" for number in range(3)), MAX_RECORDS_PER_FILE + 1
    )
    assert delivered(sent, 2, page_losses, num_partitions=2) == []


def test_digests_are_told_apart_by_their_first_128_bits():
    digests = ["0" * 31 + "1" + "f" * 32, "0" * 15 + "1" + "0" * 48]
    assert [numbers.tolist() for numbers in digest_numbers(pa.array(digests))] == [[0, 1], [1, 0]]
    with pytest.raises(AssertionError, match="document ids and digests are 64 hex digits"):
        digest_numbers(pa.array(["0" * 16]))


def test_rows_are_matched_where_they_are_present():
    rows, is_present = matching_rows(np.array([2, 4, 6], np.uint64), np.array([6, 1, 2, 9], np.uint64))
    assert rows.tolist() == [2, 0] and is_present.tolist() == [True, False, True, False]
    assert not matching_rows(np.empty(0, np.uint64), np.array([1], np.uint64))[1].any()
