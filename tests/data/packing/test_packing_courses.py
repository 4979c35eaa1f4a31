"""One order of documents over a course: phases of any mixture, weights and packing go on where the ones before them
stopped."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import load_scale
from configs.schema import PackingRecipe, Scale
from infra.step import Output, Record, step
from tasks.data.packing.course_position import POSITION_FILE
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.packing.packed_rows import GLUE_SHARD, PACKING_FILE
from tasks.data.packing.row_order import shuffled_rows
from tasks.data.shards.token_shard import append_tokens, token_dtype, write_index
from tests.data.packing.test_packing import write_tokenizer
from tests.support.data_inputs import compute
from tests.support.training_inputs import packed_lines

SEED = 5
LONGEST = {"code": 40, "math": 30, "web": 150}
NUM_DOCUMENTS = {"code": 900, "math": 300, "web": 700}
BUCKETS = {
    domain: np.random.default_rng(number).integers(-1, 3, count)
    for number, (domain, count) in enumerate(NUM_DOCUMENTS.items())
}
WAYPOINTS = (
    {"at_share": 0.0, "mixture": {"web": 0.8, "code": 0.2}},
    {"at_share": 1.0, "mixture": {"web": 0.2, "code": 0.6, "math": 0.2}},
)
COURSE = (
    {"mixture": {"web": 0.7, "code": 0.3}, "num_tokens": 32 * 250},
    {"mixture": WAYPOINTS, "num_tokens": 32 * 300, "bucket_weights": (0.0, 1.0, 2.5)},
    {"mixture": {"web": 0.5, "math": 0.5}, "num_tokens": 64 * 90, "sequence_length": 64, "packing": "best_fit"},
    {"mixture": WAYPOINTS, "num_tokens": 64 * 200, "sequence_length": 64, "packing": "best_fit", "fim_rate": 0.5},
    {"mixture": {"math": 1.0}, "num_tokens": 32 * 300, "bucket_weights": (1.0, 1.0, 1.5)},
    {"mixture": {"code": 0.9, "web": 0.1}, "num_tokens": 48 * 60, "sequence_length": 48, "packing": "best_fit"},
)
"""Shares, weights, packings and rows all differ. Of web and code less than one epoch is read, of math several."""


def recipe(**changes) -> PackingRecipe:
    given = {
        "sequence_length": 32,
        "max_epochs": 9.0,
        "seed": SEED,
        "fim_rate": 0.0,
        "packing": "stream",
        "bucket_weights": (),
    }
    return PackingRecipe(**{**given, **changes})


class ToyShards(Record):
    shards: tuple[str, ...]
    domains: dict[str, str]


@step(content=("shards/*",))
def write_toy_shards(*, output: Output) -> ToyShards:
    """Two shards of code, one of the others; an empty document and some longer than two rows among web's."""
    names = {f"{domain}-{number:05}": domain for domain in NUM_DOCUMENTS for number in range(1 + (domain == "code"))}
    for name, domain in names.items():
        number, many = int(name[-5:]), 1 + (domain == "code")
        draw = np.random.default_rng([len(domain), number])
        sequences = [
            draw.integers(1, 900, draw.integers(2, LONGEST[domain])).tolist()
            for _ in range(NUM_DOCUMENTS[domain] // many)
        ]
        sequences[7] = sequences[7] if domain != "web" else []
        path = output.path(f"shards/{name}.bin")
        with open(path, "wb") as file:
            lengths = append_tokens(file, sequences, token_dtype(1024))
        write_index(path.with_suffix(".idx"), lengths, token_dtype(1024))
        ids = [hashlib.sha256(f"{name} {index}".encode()).hexdigest()[:16] for index in range(len(sequences))]
        buckets = np.split(BUCKETS[domain], many)[number].astype(np.int32)
        pq.write_table(
            pa.table({"sequence": range(len(ids)), "id": ids, "quality_bucket": buckets}), path.with_suffix(".parquet")
        )
    return ToyShards(shards=tuple(names), domains=names)


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    root = tmp_path_factory.mktemp("courses")
    return root, compute(write_toy_shards, root), compute(write_tokenizer, root)


def pack(toys, previous=None, **changes):
    root, shards, tokenizer = toys
    given = recipe(**changes)
    return compute(
        pack_phase,
        root,
        shards=shards,
        chats=None,
        tokenizer=tokenizer if given.fim_rate else None,
        previous=previous,
        recipe=given,
    )


def reads_of(packed) -> dict[str, np.ndarray]:
    """How often a phase read each document: as often as that of its pieces which it read most often."""
    order = packed_lines(packed)
    names = [*json.loads(packed.path(PACKING_FILE).read_text())["shards"], GLUE_SHARD]
    reads = {domain: np.zeros(count, dtype=int) for domain, count in NUM_DOCUMENTS.items()}
    for number, name in enumerate(names[:-1]):
        domain, before = name.split("-")[0], int(name[-5:]) * NUM_DOCUMENTS[name.split("-")[0]] // 2
        own = order[order[:, 0] == number]
        firsts = {}  # of each unit, whose number is the last column: the lines of a rearranged one are one piece
        for _, sequence, offset, _, _, unit in own.tolist():
            firsts[unit] = (sequence, min(offset, firsts.get(unit, (0, offset))[1]))
        pieces, counts = np.unique(list(firsts.values()) or np.zeros((0, 2), dtype=int), axis=0, return_counts=True)
        np.maximum.at(reads[domain], before + pieces[:, 0], counts)
    return reads


def order_of(domain: str, epoch: int) -> np.ndarray:
    """The documents of a domain in an epoch's order, by the definition alone: shards are shuffled, and documents in
    them."""
    first = [*NUM_DOCUMENTS].index(domain) + (domain != "code")  # code has two shards
    many = 1 + (domain == "code")
    size = NUM_DOCUMENTS[domain] // many
    key = f"{SEED} {domain} {epoch}"
    shards = shuffled_rows(np.arange(many), many, key)
    return np.concatenate([own * size + shuffled_rows(np.arange(size), size, f"{key} {first + own}") for own in shards])


def waiting_of(packed) -> dict[str, np.ndarray]:
    """How many visits of each document were passed over."""
    waiting = {domain: np.zeros(count, dtype=int) for domain, count in NUM_DOCUMENTS.items()}
    for domain, position in json.loads(packed.path(POSITION_FILE).read_text())["domains"].items():
        for visit in position["waiting"]:
            epoch, index = divmod(visit, position["num_documents"])
            waiting[domain][order_of(domain, epoch)[index]] += 1
    return waiting


def test_no_document_is_read_again_before_all_of_its_bucket_were(toys):
    total = {domain: np.zeros(count, dtype=int) for domain, count in NUM_DOCUMENTS.items()}
    previous, tokens, epochs = None, {}, {}
    for number, changes in enumerate(COURSE):
        packed = pack(toys, previous, **changes)
        for domain, reads in reads_of(packed).items():
            total[domain] += reads
            passed = total[domain] + waiting_of(packed)[domain]
            for bucket in range(-1, 3):
                own = passed[(BUCKETS[domain] == bucket) & (np.arange(len(passed)) != (7 if domain == "web" else -1))]
                assert own.max() - own.min() <= 1, (number, domain, bucket)
        assert sum(waiting.sum() for waiting in waiting_of(packed).values()) <= 64, "more than one row waits"
        record = packed.record
        for domain, count in record.tokens_by_domain.items():
            tokens[domain] = tokens.get(domain, 0) + count
            epochs[domain] = epochs.get(domain, 0.0) + record.epochs_by_domain[domain]
        assert record.course_tokens_by_domain == dict(sorted(tokens.items()))
        assert record.course_epochs_by_domain == pytest.approx(epochs, abs=1e-4)
        previous = packed
    for domain in ("web", "code"):
        assert total[domain].max() == 1 and total[domain].sum() > 200, "less than one epoch: nothing twice"
    assert total["math"].min() >= 2


def test_two_phases_of_a_course_read_what_one_long_phase_reads(toys):
    mixture = {"web": 0.5, "code": 0.5}
    whole = reads_of(pack(toys, mixture=mixture, num_tokens=32 * 400))
    first = pack(toys, mixture=mixture, num_tokens=32 * 150)
    second = reads_of(pack(toys, first, mixture=mixture, num_tokens=32 * 250))
    for domain, reads in reads_of(first).items():
        assert not (reads & second[domain]).any()
        # The second phase leaves out the rests of the documents that the first one cut at its end.
        assert np.count_nonzero(reads + second[domain] != whole[domain]) <= 8, domain


def test_the_first_phase_of_a_course_reads_the_permutations_from_their_start(toys):
    order = packed_lines(pack(toys, mixture={"math": 1.0}, num_tokens=32 * 200))
    expected = np.concatenate([order_of("math", epoch) for epoch in range(4)])
    assert order[:, 1].tolist() == expected[: len(order)].tolist() and len(order) > NUM_DOCUMENTS["math"]


def test_max_epochs_counts_over_the_course(toys):
    math = {"mixture": {"math": 1.0}, "num_tokens": 32 * 60, "max_epochs": 1.0}
    first = pack(toys, **math)
    second = pack(toys, first, **math)
    with pytest.raises(
        ValueError,
        match=r"max_epochs \(1.0\) passes over the course: math has [\d,]+ tokens, 1,921 are asked for after 0.79 "
        r"passes",
    ):
        pack(toys, second, **math)
    pack(toys, second, **math | {"max_epochs": 1.5})


def test_a_domain_that_a_phase_does_not_read_keeps_its_position(toys):
    first = pack(toys, mixture={"math": 0.5, "code": 0.5}, num_tokens=32 * 60)
    second = pack(toys, first, mixture={"web": 1.0}, num_tokens=32 * 60)
    third = pack(toys, second, mixture={"math": 1.0}, num_tokens=32 * 30)
    assert not (reads_of(first)["math"] & reads_of(third)["math"]).any()
    assert (
        {*second.record.course_tokens_by_domain} == {"code", "math", "web"} == {*third.record.course_epochs_by_domain}
    )


def test_another_seed_or_other_documents_are_refused(toys, tmp_path):
    first = pack(toys, mixture={"math": 1.0}, num_tokens=32 * 30)
    with pytest.raises(ValueError, match="the phase has seed 6, the phase before it on the course 5"):
        pack(toys, first, mixture={"math": 1.0}, num_tokens=32 * 30, seed=6)
    position = json.loads(first.path(POSITION_FILE).read_text())
    position["domains"]["math"]["num_documents"] = 299
    (tmp_path / POSITION_FILE).write_text(json.dumps(position))
    other = SimpleNamespace(path=lambda name: tmp_path / name, digest=first.digest, record=first.record)
    with pytest.raises(ValueError, match="domain math has 300 documents, the phases before on the course read 299"):
        pack(toys, other, mixture={"math": 1.0}, num_tokens=32 * 30)
    tree = load_scale("micro").model_dump(mode="json")
    tree["phases"][1]["recipe"]["seed"] = 47
    with pytest.raises(
        ValueError, match=r"course pretraining: one seed orders its documents, its phases have .*'mid_reasoning': 47"
    ):
        Scale(**tree)


def test_every_phase_is_packed_before_training_and_those_before_an_entry_too(monkeypatch):
    from flows import train_phases

    scale, packed = load_scale("tiny"), []

    def run_step(run, step, *, stage, previous, **inputs):
        packed.append((stage, previous))
        return stage

    monkeypatch.setattr(train_phases, "run_step", run_step)
    for name in ("check_contract", "say_left_out"):
        monkeypatch.setattr(train_phases, name, lambda *arguments, **named: None)
    prepared = SimpleNamespace(documents=None, shards=None, chat_shards=None, tokenizer=None)
    names = [
        f"pack {name}"
        for name in (
            "pretrain_general",
            "pretrain_code_reasoning",
            "mid_repo_code",
            "mid_reasoning",
            "mid_long_context",
        )
    ]
    course = list(zip(names, [None, *names[:-1]], strict=True))
    for phases in (scale.phases, scale.phases[4:]):
        packed.clear()
        rows = train_phases.pack_phases(SimpleNamespace(scale=scale), prepared, phases)
        assert packed == [*course, ("pack sft", None)], (
            "another course begins anew, and answers are sampled from no rows"
        )
        assert rows["mid_long_context"] == "pack mid_long_context"
