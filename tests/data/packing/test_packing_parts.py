"""A phase in parts: memory does not grow with the documents, threads change no byte, and parts change no share."""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from configs.schema import PackingRecipe
from data_contracts.runner import read_contract
from infra.step import Output, Record, step
from tasks.data.packing import domain_queue, placed_units
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.shards.token_shard import token_dtype, write_index
from tasks.data.validate_contract import check_files
from tests.support.data_inputs import RESOURCES, compute
from tests.support.training_inputs import packed_lines, packed_rows

SHARD_DOCUMENTS, MEAN_TOKENS = 1000, 40
ONE_MIXTURE = {"web": 0.6, "code": 0.4}
WAYPOINTS = (
    {"at_share": 0.0, "mixture": {"web": 0.8, "code": 0.2}},
    {"at_share": 1.0, "mixture": {"web": 0.3, "code": 0.7}},
)


class ManyShards(Record):
    shards: tuple[str, ...]
    domains: dict[str, str]


class Size(Record):
    num_shards: int


@step(content=("shards/*",))
def write_many_shards(*, recipe: Size, output: Output) -> ManyShards:
    """Half of web, half of code; the tokens are zeros."""
    names = [f"{domain}-{number:05}" for domain in ("code", "web") for number in range(recipe.num_shards // 2)]
    for number, name in enumerate(names):
        lengths = np.random.default_rng(number).integers(1, 2 * MEAN_TOKENS, SHARD_DOCUMENTS)
        write_index(output.path(f"shards/{name}.idx"), lengths, token_dtype(1024))
        output.path(f"shards/{name}.bin").write_bytes(bytes(2 * int(lengths.sum())))
    return ManyShards(shards=tuple(names), domains={name: name.split("-")[0] for name in names})


@pytest.fixture(scope="module")
def shards_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    return lambda num_shards: compute(write_many_shards, root, recipe=Size(num_shards=num_shards))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(placed_units, "PART_UNITS", 1500)
    monkeypatch.setattr(domain_queue, "CHUNK_UNITS", 700)


def recipe(num_documents: int, packing: str, mixture=WAYPOINTS, sequence_length: int = 128) -> PackingRecipe:
    """A phase of about so many documents."""
    return PackingRecipe(
        num_tokens=num_documents * MEAN_TOKENS // sequence_length * sequence_length,
        sequence_length=sequence_length,
        mixture=mixture,
        packing=packing,
        max_epochs=3.0,
        seed=3,
        fim_rate=0.0,
        bucket_weights=(),
    )


def pack(root, shards, given: PackingRecipe):
    return compute(pack_phase, root, shards=shards, chats=None, recipe=given)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_twenty_times_as_many_documents_take_no_more_memory(shards_of, packing, tmp_path, monkeypatch):
    """Traced while the step runs alone: shards that are kept, parts and chunks, however many there are."""
    monkeypatch.setattr("tasks.data.packing.pack_phase.SHARDS_HELD", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    mixture = WAYPOINTS if packing == "stream" else ONE_MIXTURE  # a slice of few rows is smaller than a part
    peaks = []
    for num_shards in (4, 80):
        shards = shards_of(num_shards)
        output = SimpleOutput(tmp_path / f"{num_shards}")
        tracemalloc.start()
        record = pack_phase.function(
            shards=shards, chats=None, recipe=recipe(num_shards * SHARD_DOCUMENTS, packing, mixture), output=output
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert record.num_pieces > 0.9 * num_shards * SHARD_DOCUMENTS
        assert len(list(output.directory.glob("order-*.npy"))) >= record.num_pieces / 2000
    assert peaks[1] < 2 * peaks[0], peaks  # best fit 1.17 to 1.50 in ten runs, stream less than 1; linear growth is 20


class SimpleOutput:
    """What a step needs of an output where nothing is committed."""

    def __init__(self, directory) -> None:
        self.directory = directory
        directory.mkdir()

    def path(self, name: str):
        return self.directory / name

    def report(self, progress) -> None:
        assert 0 <= progress.done <= progress.total


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_digest_does_not_depend_on_the_number_of_threads_or_of_chunks(shards_of, packing, tmp_path, monkeypatch):
    shards, digests = shards_of(8), set()
    for cores, chunk in ((1, 700), (7, 700), (2, 5000), (3, 64)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(domain_queue, "CHUNK_UNITS", chunk)
        digests.add(pack(tmp_path / f"{cores}", shards, recipe(6000, packing)).digest)
    assert len(digests) == 1


def test_a_stream_is_the_same_in_one_part_and_in_many(shards_of, tmp_path, monkeypatch):
    shards = shards_of(8)
    for mixture in (ONE_MIXTURE, WAYPOINTS):
        many = pack(tmp_path / "many", shards, recipe(9000, "stream", mixture))
        monkeypatch.setattr(placed_units, "PART_UNITS", 10**6)
        one = pack(tmp_path / "one", shards, recipe(9000, "stream", mixture))
        monkeypatch.setattr(placed_units, "PART_UNITS", 1500)
        assert len(one.paths("order-*.npy")) == 1 and len(many.paths("order-*.npy")) > 5
        assert np.array_equal(packed_lines(one), packed_lines(many))
        assert many.record == one.record
        for first, second in zip(
            packed_rows(one, shards).rows(5, 90), packed_rows(many, shards).rows(5, 90), strict=True
        ):
            assert np.array_equal(first, second)
        assert one.path("position.json").read_text() == many.path("position.json").read_text()


def test_best_fit_in_many_parts_loses_no_slot_and_no_document(shards_of, tmp_path, monkeypatch):
    shards, mixture = shards_of(8), ONE_MIXTURE
    many = pack(tmp_path / "many", shards, recipe(7000, "best_fit", mixture))
    monkeypatch.setattr(placed_units, "PART_UNITS", 10**6)
    one = pack(tmp_path / "one", shards, recipe(7000, "best_fit", mixture))
    assert many.record.fill_share > one.record.fill_share - 0.002
    order = packed_lines(many)
    assert (np.diff(order[:, 5]) == 1).all() and (order[1:, 4] >= order[:-1, 4] + order[:-1, 3]).all()
    assert (order[:, 4] // 129 == (order[:, 4] + order[:, 3] - 1) // 129).all()
    for number in (0, 1):  # documents of web and of code, each once in the first epoch
        reads = Counter(map(tuple, order[order[:, 0] // 4 == number][:, :2].tolist()))
        assert max(reads.values()) - (min(reads.values()) if len(reads) == 4 * SHARD_DOCUMENTS else 0) <= 1
    share = many.record.tokens_by_domain["web"] / many.record.num_tokens
    assert abs(share - 0.6) * many.record.num_tokens < 2 * 129


def test_the_contract_is_held_against_every_part(shards_of, tmp_path):
    (table,) = read_contract("packed")
    packed = pack(tmp_path / "store", shards_of(8), recipe(7000, "stream"))
    findings, num_rows = check_files(packed, table, "packed", RESOURCES)
    assert all(finding.is_met for finding in findings) and len(findings) == len(table.expectations)
    assert num_rows == len(packed_lines(packed))
    damaged = "order-00002.npy"
    lines = np.load(packed.path(damaged))
    lines[7, 3] = 0
    np.save(tmp_path / damaged, lines)
    broken = SimpleNamespace(
        files=packed.files, path=lambda name: tmp_path / name if name == damaged else packed.path(name)
    )
    findings, _ = check_files(broken, table, "packed", RESOURCES)
    assert [finding.arguments["column"] for finding in findings if not finding.is_met] == ["length"]
