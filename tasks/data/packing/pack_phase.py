"""Step: token shards -> the order in which one phase reads them, in parts, and the position where the next begins.

It writes order-00000.npy and on (tasks/data/packing/packed_order.py), packing.json and, with fill-in-the-middle, a
shard glue.bin. The next phase of the course continues from position.json. Parts are made one after the other; threads
read shards ahead and write. Memory holds some shards and parts, however many there are, and no byte depends on the
number of threads.

Documents are shuffled within their domain, once per epoch of a course. Those of good quality may be read more often
(tasks/data/packing/domain_queue.py). A phase begins where the phase before it on the course stopped
(tasks/data/packing/course_position.py). The mixture decides a domain's share at each position of the phase
(tasks/data/packing/mixture_schedule.py).

stream: tokens per domain are exact, the domains are interleaved, and the stream is cut into rows wherever they end:
in pre-training random truncation is augmentation (report, section 2). best_fit: rows are filled with whole documents
(mid-training, SFT). A document longer than a row is cut into pieces; a conversation is left out and counted. A share
fim_rate of the documents of domains code and repository is rearranged (tasks/data/packing/fill_in_middle.py).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from configs.files.block_reader import BlockReader
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.packing.course_position import POSITION_FILE, CoursePosition, DomainPosition, read_position
from tasks.data.packing.domain_pieces import (
    ALIKE,
    LENGTH,
    REARRANGED,
    QualityBuckets,
    ShardPieces,
    pieces_of,
    read_buckets,
)
from tasks.data.packing.domain_queue import DomainPieces, Queue, Totals, ahead
from tasks.data.packing.fill_in_middle import (
    NUM_EXTRA,
    Rearrangement,
    read_ids,
    read_inside,
    rearranged_lines,
    write_glue,
)
from tasks.data.packing.mixture_schedule import allot_tokens, schedule_mixture, slots_of
from tasks.data.packing.packed_order import ORDER_FILES, PartCounts, part_name, write_part
from tasks.data.packing.packed_rows import PACKING_FILE
from tasks.data.packing.placed_units import PlacedUnits, part_tokens, place_best_fit, place_stream, slice_rows
from tasks.data.records.documents import CHAT, CODE, REPOSITORY
from tasks.data.shards.stored_shard import StoredShard, open_shards

if TYPE_CHECKING:
    import numpy as np

    from configs.schema import PackingRecipe
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

SHARDS_HELD = 64
"""Shards whose pieces are kept in memory: some per domain and quality bucket are read at once."""


class PackedPhase(Record):
    num_rows: int
    num_tokens: int
    """Tokens in the rows: in a stream rows x sequence length and the last target; in best_fit without gaps."""
    sequence_length: int
    packing: str
    num_pieces: int
    fill_share: float
    """Tokens per slot of the rows."""
    num_too_long: int
    """Conversations that are longer than a row."""
    num_rearranged: int = 0
    """Pieces with fill-in-the-middle."""
    tokens_by_domain: dict[str, int]
    epochs_by_domain: dict[str, float]
    """Passes over the domain's tokens, each document counted as often as its bucket weighs."""
    course_tokens_by_domain: dict[str, int]
    """Tokens of this phase and of those before it on the course, like the passes below."""
    course_epochs_by_domain: dict[str, float]
    absent_domains: tuple[str, ...] = ()
    """Domains of the mixture without text, whose share went to the others."""


@dataclass(frozen=True)
class WrittenPart:
    """What is in a part of the order."""

    counts: PartCounts
    tokens: Counter[str]
    """By domain."""
    num_rearranged: int
    """Units with fill-in-the-middle."""


@step(content=(ORDER_FILES, PACKING_FILE, POSITION_FILE, "glue.*"), distributions=("numpy",))
def pack_phase(
    *,
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    recipe: PackingRecipe,
    output: Output,
    tokenizer: Artifact[TrainedTokenizer] | None = None,
    previous: Artifact[PackedPhase] | None = None,
) -> PackedPhase:
    """`shards` is None where the mixture has only conversations. `tokenizer` names the special tokens of
    fill-in-the-middle, None where fim_rate is 0; `previous` are the rows of the phase before on the course, None for
    its first. Raises ValueError where a domain would be read more often than
    max_epochs, no domain of the mixture has text, or `previous` read other documents."""
    num_threads = len(os.sched_getaffinity(0))
    with BlockReader() as blocks, ThreadPoolExecutor(num_threads, thread_name_prefix="pieces") as threads:
        return _pack(shards, chats, recipe, output, tokenizer, previous, blocks, threads, num_threads)


def _pack(
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    recipe: PackingRecipe,
    output: Output,
    tokenizer: Artifact[TrainedTokenizer] | None,
    previous: Artifact[PackedPhase] | None,
    blocks: BlockReader,
    threads: Executor,
    num_threads: int,
) -> PackedPhase:
    sources = [source for source in (shards, chats) if source is not None]
    domain_of = {name: domain for source in sources for name, domain in source.record.domains.items()}
    opened = [shard for source in sources for shard in _shards_of(source, blocks)]
    row_slots = recipe.sequence_length + 1 if recipe.packing == "best_fit" else None
    begin = read_position(None if previous is None else previous.path(POSITION_FILE), recipe.seed)
    buckets = _quality_buckets(sources, domain_of, recipe, begin.num_buckets)
    chosen = _rearrangement(shards, tokenizer, domain_of, opened, recipe)
    domain_names = list(domain_of.values())

    @lru_cache(maxsize=SHARDS_HELD)
    def pieces(shard: int) -> ShardPieces:
        return pieces_of(shard, opened[shard].lengths(), row_slots, domain_names[shard] != CHAT, chosen, buckets)

    domains = _domains(recipe, domain_names, buckets.weights, pieces, threads)
    positions = {name: begin.of(name, own.num_documents, len(own.weights)) for name, own in domains.items()}
    num_too_long = _num_too_long(domains, recipe)
    num_rows = recipe.num_tokens // recipe.sequence_length
    queues, placed = _placed(recipe, domains, positions, row_slots, threads)

    def write(part: tuple[int, PlacedUnits]) -> WrittenPart:
        number, own = part
        counts = write_part(output.path(part_name(number)), _expand(own, pieces, chosen, len(opened)))
        return WrittenPart(counts, _tokens_by_domain(own, domain_names), int(own.units[:, REARRANGED].sum()))

    parts = _reported(ahead(threads, write, enumerate(placed), depth=num_threads), recipe, output)
    tokens = sum((part.tokens for part in parts), Counter[str]())
    shares = dict(sorted(tokens.items()))
    passes = {name: count / domains[name].num_tokens for name, count in shares.items()}
    reached = begin.with_domains({name: queue.reached(passes.get(name, 0.0)) for name, queue in queues.items()})
    output.path(POSITION_FILE).write_text(reached.dump())
    _write_packing(output, recipe, list(domain_of), shares, parts, tokenizer)
    return PackedPhase(
        num_rows=num_rows,
        num_tokens=tokens.total(),
        sequence_length=recipe.sequence_length,
        packing=recipe.packing,
        num_pieces=sum(part.counts["documents"] for part in parts),
        fill_share=1.0 if row_slots is None else round(tokens.total() / (num_rows * row_slots), 6),
        num_rearranged=sum(part.num_rearranged for part in parts),
        num_too_long=num_too_long,
        tokens_by_domain=shares,
        epochs_by_domain={name: round(count, 6) for name, count in passes.items()},
        course_tokens_by_domain=_course_tokens(shares, previous),
        course_epochs_by_domain=_course_epochs(reached),
        absent_domains=tuple(sorted(name for name, own in domains.items() if not own.num_tokens)),
    )


def _domains(
    recipe: PackingRecipe,
    domain_names: list[str],
    weights: tuple[float, ...],
    pieces: Callable[[int], ShardPieces],
    threads: Executor,
) -> dict[str, DomainPieces]:
    """The domains of the mixture: every shard of theirs is read once to count what it has."""
    domains = {}
    for name in recipe.domains:
        own = tuple(number for number, domain in enumerate(domain_names) if domain == name)
        totals = tuple(threads.map(lambda number: Totals.of(pieces(number), len(weights)), own))
        domains[name] = DomainPieces(name, recipe.seed, own, totals, weights, pieces)
    return domains


def _num_too_long(domains: dict[str, DomainPieces], recipe: PackingRecipe) -> int:
    """Conversations that no row holds, as they are not cut. Raises ValueError where these are all."""
    num_too_long = sum(total.num_too_long for own in domains.values() for total in own.totals)
    if num_too_long and not domains[CHAT].num_tokens:
        raise ValueError(
            f"all {num_too_long} conversations are longer than a row of {recipe.sequence_length} tokens: raise the "
            f"phase's sequence_length, or bring shorter ones"
        )
    return num_too_long


def _placed(
    recipe: PackingRecipe,
    domains: dict[str, DomainPieces],
    positions: dict[str, DomainPosition],
    row_slots: int | None,
    threads: Executor,
) -> tuple[dict[str, Queue], Iterator[PlacedUnits]]:
    """What is left to read of the domains that the phase reads, and the parts, made as they are taken."""
    available = {name: own.num_tokens for name, own in domains.items()}
    epochs = {name: own.epochs for name, own in positions.items()}
    num_slots = slots_of(recipe, recipe.num_tokens // recipe.sequence_length)
    wanted = allot_tokens(recipe, available, num_slots, epochs)
    schedule = schedule_mixture(recipe, available)
    queues = {name: Queue(domains[name], positions[name], threads) for name, amount in wanted.items() if amount}
    size = part_tokens(domains[name] for name in queues)
    if row_slots is None:
        return queues, place_stream(queues, wanted, schedule, size)
    return queues, place_best_fit(queues, schedule, recipe, row_slots, size)


def _reported(written: Iterator[WrittenPart], recipe: PackingRecipe, output: Output) -> list[WrittenPart]:
    """The parts; progress counts what is written."""
    num_rows = recipe.num_tokens // recipe.sequence_length
    num_slots, num_tokens, parts = slots_of(recipe, num_rows), 0, []
    for part in written:
        parts.append(part)
        num_tokens += part.tokens.total()
        output.report(Progress(num_rows * num_tokens // num_slots, num_rows, "rows"))
    return parts


def _course_epochs(reached: CoursePosition) -> dict[str, float]:
    return {name: round(own.epochs, 6) for name, own in sorted(reached.domains.items())}


def _course_tokens(shares: dict[str, int], previous: Artifact[PackedPhase] | None) -> dict[str, int]:
    """Tokens by domain of this phase and of those before it on the course."""
    before = {} if previous is None else previous.record.course_tokens_by_domain
    return {domain: shares.get(domain, 0) + before.get(domain, 0) for domain in sorted({*shares, *before})}


def _write_packing(
    output: Output,
    recipe: PackingRecipe,
    shards: list[str],
    shares: dict[str, int],
    parts: list[WrittenPart],
    tokenizer: Artifact[TrainedTokenizer] | None,
) -> None:
    """Write what a reader of the order needs: packing.json, and the glue where there is a tokenizer."""
    if tokenizer is not None:
        write_glue(output.path(PACKING_FILE).parent, tokenizer.record.special_ids, tokenizer.record.num_tokens)
    packing: dict[str, Any] = {
        "packing": recipe.packing,
        "sequence_length": recipe.sequence_length,
        "seed": recipe.seed,
        "shards": shards,
        "has_glue": tokenizer is not None,
        "tokens_by_domain": shares,
        "parts": [part.counts for part in parts],
    }
    if (step_rows := slice_rows(recipe)) is not None:
        packing["slice_rows"] = step_rows
    output.path(PACKING_FILE).write_text(json.dumps(packing, indent=1, sort_keys=True) + "\n")


def _shards_of(source: Artifact[TokenShards] | Artifact[ChatShards], blocks: BlockReader) -> list[StoredShard]:
    """The shards of an artifact, in the order of its record."""
    opened = open_shards(source.files("shards/*"), blocks)
    return [opened[name] for name in source.record.shards]


def _rearrangement(
    shards: Artifact[TokenShards] | None,
    tokenizer: Artifact[TrainedTokenizer] | None,
    domain_of: dict[str, str],
    opened: list[StoredShard],
    recipe: PackingRecipe,
) -> Rearrangement:
    """The ids of source code, where some of it is rearranged."""
    if not recipe.fim_rate or shards is None:
        return Rearrangement(0.0, recipe.seed, {}.__getitem__, {})
    assert tokenizer is not None, "fill-in-the-middle needs the tokenizer's special tokens"
    read, names = {CODE, REPOSITORY} & {*recipe.domains}, list(domain_of)
    code = {number: opened[number] for number, name in enumerate(names) if domain_of[name] in read}

    @lru_cache(maxsize=SHARDS_HELD)
    def ids_of(number: int) -> np.ndarray:
        return read_ids(shards.file(f"shards/{names[number]}.parquet"))

    is_inside = read_inside(tokenizer.path("tokenizer.json"), tokenizer.record.num_tokens)
    return Rearrangement(recipe.fim_rate, recipe.seed, ids_of, code, is_inside)


def _quality_buckets(
    sources: list[Artifact], domain_of: dict[str, str], recipe: PackingRecipe, num_buckets: int
) -> QualityBuckets:
    """The weights, and the buckets of the shards where this phase or one before it on the course weighs them."""
    weights = (*recipe.bucket_weights, 1.0) if recipe.bucket_weights else ALIKE * num_buckets
    source_of = {name: source for source in sources for name in source.record.domains}
    names = list(domain_of)
    return QualityBuckets(
        weights, lambda number: read_buckets(source_of[names[number]].file(f"shards/{names[number]}.parquet"))
    )


def _expand(placed: PlacedUnits, pieces: Callable[[int], ShardPieces], chosen: Rearrangement, glue: int) -> np.ndarray:
    """Lines of a part: one per unit, or those of its fill-in-the-middle; each unit is cut to its kept tokens."""
    import numpy as np

    units, marked = placed.units, np.flatnonzero(placed.units[:, REARRANGED])
    plain = np.flatnonzero(units[:, REARRANGED] == 0)
    lines = np.column_stack([plain, units[plain, :4]])
    if len(marked):
        moved = units[marked]
        whole = np.zeros(len(moved), dtype=np.int64)
        for shard in np.unique(moved[:, 0]).tolist():
            own = moved[:, 0] == shard
            whole[own] = pieces(shard).num_tokens(moved[own, 1])
        ends = moved[:, 2] + moved[:, LENGTH] - NUM_EXTRA == whole
        splits = chosen.splits(moved, moved[:, LENGTH] - NUM_EXTRA - ends)
        fresh = rearranged_lines(moved, ends, splits, glue)
        lines = np.concatenate([lines, np.column_stack([marked[fresh[:, 0]], fresh[:, 1:]])])
        lines = lines[np.argsort(lines[:, 0], kind="stable")]
    unit, length = lines[:, 0], lines[:, 4]
    before = np.cumsum(length) - length
    within = before - before[np.searchsorted(unit, unit)]
    length = np.clip(placed.kept[unit] - within, 0, length)
    order = np.column_stack([lines[:, 1:4], length, placed.slots[unit] + within, unit])
    return order[length > 0]


def _tokens_by_domain(placed: PlacedUnits, domains: list[str]) -> Counter[str]:
    """Tokens by domain; special tokens count for the domain of their document."""
    import numpy as np

    by_shard = np.bincount(placed.units[:, 0], weights=placed.kept)
    counts = Counter[str]()
    for shard in np.flatnonzero(by_shard).tolist():
        counts[domains[shard]] += int(by_shard[shard])
    return counts
