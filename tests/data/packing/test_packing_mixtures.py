"""Mixtures that change along a phase, and documents that an epoch holds more than once: exact tokens, the same for
every run."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import load_scale
from configs.schema import PackingRecipe, Scale
from infra.step import Output, Record, step
from tasks.data.packing.mixture_schedule import allot_tokens, schedule_mixture
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.shards.token_shard import append_tokens, open_shard, token_dtype, write_index
from tests.support.data_inputs import compute
from tests.support.training_inputs import packed_lines, packed_rows

WAYPOINTS = (
    {"at_share": 0.0, "mixture": {"web": 0.8, "code": 0.2}},
    {"at_share": 0.5, "mixture": {"web": 0.5, "code": 0.5}},
    {"at_share": 1.0, "mixture": {"code": 0.6, "math": 0.4}},
)
DOMAINS = ("code", "math", "web")
NUM_DOCUMENTS, LONGEST = 500, 60
BUCKETS = np.random.default_rng(9).integers(-1, 4, NUM_DOCUMENTS)


def recipe(**changes):
    given = {
        "num_tokens": 32 * 640,
        "sequence_length": 32,
        "mixture": WAYPOINTS,
        "max_epochs": 3.0,
        "seed": 1,
        "fim_rate": 0.0,
        "packing": "stream",
        "bucket_weights": (),
    }
    return PackingRecipe(**{**given, **changes})


def plain_share(domain: str, position: float, steps: int = 20000) -> float:
    """Area under a domain's line up to a position, by the sum of thin slices."""
    middles = (np.arange(steps) + 0.5) / steps * position
    weights = np.interp(
        middles, [point["at_share"] for point in WAYPOINTS], [point["mixture"].get(domain, 0.0) for point in WAYPOINTS]
    )
    return float(weights.mean() * position)


@pytest.mark.parametrize("position", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_a_domains_share_up_to_a_position_is_the_area_under_its_line(position):
    schedule = schedule_mixture(recipe(), dict.fromkeys(DOMAINS, 10**6))
    for domain, area in zip(schedule.domains, schedule.until(position), strict=True):
        assert area == pytest.approx(plain_share(domain, position), abs=1e-7)
        share = np.array([area / schedule.until(1.0)[schedule.domains.index(domain)]])
        if 0 < share[0] < 1:
            assert schedule.position_of(domain, share)[0] == pytest.approx(position)


def test_tokens_of_the_phase_are_the_integral_and_an_absent_domain_leaves_its_share():
    shares = allot_tokens(recipe(), dict.fromkeys(DOMAINS, 10**6), 1000)
    assert shares == {"code": 450, "math": 100, "web": 450}
    without = allot_tokens(recipe(), {"code": 10**6, "math": 0, "web": 10**6}, 1000)
    assert without == {"code": 550, "web": 450}
    with pytest.raises(ValueError, match=r"domains code, math at_share 1.0 has text"):
        allot_tokens(recipe(), {"code": 0, "math": 0, "web": 10**6}, 1000)


@pytest.mark.parametrize("positions", [(0.0,), (0.1, 1.0), (0.0, 0.9), (0.0, 0.6, 0.4, 1.0), (0.0, 0.5, 0.5, 1.0)])
def test_waypoints_that_do_not_span_the_phase_are_refused(positions):
    with pytest.raises(ValueError, match=r"let them rise from 0.0 to 1.0"):
        recipe(mixture=tuple({"at_share": position, "mixture": {"web": 1.0}} for position in positions))


class ToyShards(Record):
    shards: tuple[str, ...]
    domains: dict[str, str]


@step(content=("shards/*",))
def write_toy_shards(*, output: Output) -> ToyShards:
    for number, domain in enumerate(DOMAINS):
        draw = np.random.default_rng(number)
        sequences = [draw.integers(1, 900, draw.integers(2, LONGEST)).tolist() for _ in range(NUM_DOCUMENTS)]
        path = output.path(f"shards/{domain}-00000.bin")
        with open(path, "wb") as file:
            lengths = append_tokens(file, sequences, token_dtype(1024))
        write_index(path.with_suffix(".idx"), lengths, token_dtype(1024))
        ids = [hashlib.sha256(f"{domain} {index}".encode()).hexdigest()[:16] for index in range(NUM_DOCUMENTS)]
        sidecar = pa.table({"sequence": range(NUM_DOCUMENTS), "id": ids, "quality_bucket": BUCKETS.astype(np.int32)})
        pq.write_table(sidecar, path.with_suffix(".parquet"))
    names = tuple(f"{domain}-00000" for domain in DOMAINS)
    return ToyShards(shards=names, domains={name: name.split("-")[0] for name in names})


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return root, compute(write_toy_shards, root)


def pack(shards, **changes):
    root, documents = shards
    packed = compute(pack_phase, root, shards=documents, chats=None, recipe=recipe(**changes))
    return (packed, packed_lines(packed), packed_rows(packed, documents))


def test_a_stream_holds_the_integral_of_the_schedule_up_to_every_position(shards):
    packed, order, _ = pack(shards)
    total = 32 * 640 + 1
    shares = allot_tokens(recipe(), dict.fromkeys(DOMAINS, 10**6), total)
    assert packed.record.tokens_by_domain == shares and sum(shares.values()) == total == order[:, 3].sum()
    for position in np.linspace(0.05, 1.0, 20):
        until = int(total * position)
        for number, domain in enumerate(DOMAINS):
            own = order[order[:, 0] == number]
            read = np.clip(until - own[:, 4], 0, own[:, 3]).sum()
            assert abs(read - total * plain_share(domain, position)) <= len(DOMAINS) * LONGEST, (domain, position)


def test_rows_follow_the_schedule_and_each_is_read_once(shards):
    for packing in ("stream", "best_fit"):
        _, order, rows = pack(shards, packing=packing)
        tokens, segments, _ = rows.rows(0, len(rows))
        part = rows.rows(100, 103)
        assert len(rows) == 640 and np.array_equal(part[0], tokens[100:103])
        domain = np.where(segments >= 0, order[np.searchsorted(order[:, 5], np.maximum(segments, 0)), 0], -1)
        for start in range(0, 640, 128):
            counts = Counter(domain[start : start + 128].ravel().tolist())
            filled = sum(count for number, count in counts.items() if number >= 0)
            for number, name in enumerate(DOMAINS):
                wanted = 5 * (plain_share(name, (start + 128) / 640) - plain_share(name, start / 640))
                assert counts[number] / filled == pytest.approx(wanted, abs=0.04), (packing, name, start)
        seen = np.sort(segments, axis=None)
        assert set(np.unique(seen[seen >= 0]).tolist()) == set(order[:, 5].tolist())


def test_best_fit_with_waypoints_fills_the_rows_and_holds_the_integral(shards):
    packed, order, _ = pack(shards, packing="best_fit")
    record = packed.record
    assert record.num_rows == 640 and record.fill_share > 0.95
    for domain in DOMAINS:
        assert abs(record.tokens_by_domain[domain] - record.num_tokens * plain_share(domain, 1.0)) <= 2 * 33, (
            record.tokens_by_domain
        )
    visits = Counter(map(tuple, order[:, :3].tolist()))
    assert max(visits.values()) - min(visits.values()) <= 2


def test_packing_twice_gives_the_same_digest(shards, tmp_path):
    for packing in ("stream", "best_fit"):
        given = recipe(packing=packing, bucket_weights=(0.0, 0.5, 1.0, 2.3))
        again = compute(pack_phase, tmp_path / packing, shards=shards[1], chats=None, recipe=given)
        assert again.digest == pack(shards, packing=packing, bucket_weights=(0.0, 0.5, 1.0, 2.3))[0].digest


def test_an_epoch_holds_a_document_as_often_as_its_bucket_weighs(shards):
    weights = (0.0, 0.5, 1.0, 2.3)
    lengths = open_shard(shards[1].directory("shards") / "web-00000.bin").lengths
    per_document = np.append(weights, 1.0)[BUCKETS]
    epoch_tokens = int(np.dot(per_document, lengths))
    num_tokens = epoch_tokens // 32 * 32
    packed, order, _ = pack(
        shards, mixture={"web": 1.0}, bucket_weights=weights, num_tokens=num_tokens, max_epochs=1.01
    )
    assert packed.record.epochs_by_domain["web"] == pytest.approx(1.0, abs=0.01)
    copies = np.bincount(order[:, 1], minlength=NUM_DOCUMENTS)
    for bucket, allowed in {0: {0}, 1: {0, 1}, 2: {0, 1}, 3: {2, 3}, -1: {0, 1}}.items():
        assert set(copies[bucket == BUCKETS].tolist()) <= allowed
    assert copies[BUCKETS == 1].mean() == pytest.approx(0.5, abs=0.12)
    assert copies[BUCKETS == 3].mean() == pytest.approx(2.3, abs=0.12)
    assert copies[BUCKETS == 2].mean() > 0.9 and copies[BUCKETS == -1].mean() > 0.9
    halfway = np.bincount(order[order[:, 4] < num_tokens / 2, 1], minlength=NUM_DOCUMENTS)
    assert halfway[BUCKETS == 3].mean() == pytest.approx(1.15, abs=0.12), "the buckets are read side by side"
    with pytest.raises(ValueError, match=r"the mixture needs more than max_epochs"):
        pack(shards, mixture={"web": 1.0}, bucket_weights=weights, num_tokens=3 * num_tokens, max_epochs=2.0)


def test_fewer_weights_than_buckets_are_refused(shards):
    with pytest.raises(ValueError, match=r"bucket_weights has 2 weights, but documents are in bucket 3"):
        pack(shards, bucket_weights=(1.0, 1.0))
    tree = load_scale("micro").model_dump(mode="json")
    tree["phases"][0]["recipe"]["bucket_weights"] = [1.0, 2.0]
    with pytest.raises(ValueError, match=r"bucket_weights has 2 weights, data.recipe.filter.num_quality_buckets is 5"):
        Scale(**tree)
