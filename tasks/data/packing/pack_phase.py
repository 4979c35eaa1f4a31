"""Step: token shards -> the order in which one phase reads them (order.npy), and the position where the next begins.

It writes order.npy, packing.json and, with fill-in-the-middle, a shard glue.bin. The next phase of the course
continues from position.json.

Documents are shuffled within their domain, once per epoch of a course. Those of good quality may be read more often
(tasks/data/packing/domain_pieces.py). A phase begins where the phase before it on the course stopped
(tasks/data/packing/course_position.py). The mixture decides a domain's share at each position of the phase
(tasks/data/packing/mixture_schedule.py).

stream: tokens per domain are exact, the domains are interleaved, and the stream is cut into rows wherever they end:
in pre-training random truncation is augmentation (report, section 2). best_fit: rows are filled with whole documents
(mid-training, SFT). A document longer than a row is cut into pieces; a conversation is left out and counted. A share
fim_rate of the documents of domains code and repository is rearranged (tasks/data/packing/fill_in_middle.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from configs.files.block_reader import BlockReader
from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.packing.course_position import POSITION_FILE, DomainPosition, read_position
from tasks.data.packing.domain_pieces import ALIKE, DOCUMENT, VISIT, Pieces, QualityBuckets, pieces_of, read_buckets
from tasks.data.packing.fill_in_middle import (
    NUM_EXTRA,
    Rearrangement,
    read_ids,
    read_inside,
    rearranged_lines,
    write_glue,
)
from tasks.data.packing.packed_rows import ORDER_FILE, PACKING_FILE
from tasks.data.packing.placed_units import PlacedUnits, place_best_fit, place_stream, slice_rows
from tasks.data.records.documents import CHAT, CODE, REPOSITORY
from tasks.data.shards.stored_shard import StoredShard, open_shards

if TYPE_CHECKING:
    import numpy as np

    from configs.schema import PackingRecipe
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer


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


@step(content=(ORDER_FILE, PACKING_FILE, POSITION_FILE, "glue.*"), distributions=("numpy",))
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
    with BlockReader() as blocks:
        return _pack(shards, chats, recipe, output, tokenizer, previous, blocks)


def _pack(
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    recipe: PackingRecipe,
    output: Output,
    tokenizer: Artifact[TrainedTokenizer] | None,
    previous: Artifact[PackedPhase] | None,
    blocks: BlockReader,
) -> PackedPhase:
    import numpy as np

    sources = [source for source in (shards, chats) if source is not None]
    domain_of = {name: domain for source in sources for name, domain in source.record.domains.items()}
    names, domains = list(domain_of), list(domain_of.values())
    lengths = _shard_lengths(sources, blocks)
    row_slots = recipe.sequence_length + 1 if recipe.packing == "best_fit" else None
    chosen = _rearrangement(shards, tokenizer, domain_of, recipe, blocks)
    begin = read_position(None if previous is None else previous.path(POSITION_FILE), recipe.seed)
    buckets = _quality_buckets(sources, domain_of, recipe, begin.num_buckets)
    shards_of = {domain: [n for n, own in enumerate(domains) if own == domain] for domain in recipe.domains}
    pieces = {
        domain: pieces_of(own, lengths, row_slots, domain != CHAT, chosen, buckets) for domain, own in shards_of.items()
    }
    positions = {domain: begin.of(domain, own.num_documents, len(own.weights)) for domain, own in pieces.items()}
    absent = tuple(sorted(domain for domain in recipe.domains if not pieces[domain].num_tokens))
    if absent:
        output.report(Progress(0, 0, "pieces", f"no text of {', '.join(absent)}: its share goes to the other domains"))
    if row_slots is None:
        placed = place_stream(pieces, recipe, positions)
    else:
        placed = place_best_fit(pieces, recipe, positions, row_slots)
    units = placed.units
    order = _expand(units, placed.kept, placed.slots, lengths, chosen)
    np.save(output.path(ORDER_FILE), order)
    shares = _tokens_by_domain(order, units[:, 0], domains)
    reached = begin.with_domains(_positions_after(placed, pieces, positions, shares, domains))
    output.path(POSITION_FILE).write_text(reached.dump())
    if tokenizer is not None:
        write_glue(output.path(ORDER_FILE).parent, tokenizer.record.special_ids, tokenizer.record.num_tokens)
    _write_packing(output, recipe, names, shares, has_glue=tokenizer is not None)
    num_rows, num_tokens = recipe.num_tokens // recipe.sequence_length, sum(shares.values())
    return PackedPhase(
        num_rows=num_rows,
        num_tokens=num_tokens,
        sequence_length=recipe.sequence_length,
        packing=recipe.packing,
        num_pieces=len(units),
        fill_share=1.0 if row_slots is None else round(num_tokens / (num_rows * row_slots), 6),
        num_rearranged=int(np.count_nonzero(units[:, 4])),
        num_too_long=sum(domain.num_too_long for domain in pieces.values()),
        tokens_by_domain=shares,
        epochs_by_domain={domain: round(shares[domain] / pieces[domain].num_tokens, 6) for domain in shares},
        course_tokens_by_domain=_course_tokens(shares, previous),
        course_epochs_by_domain={domain: round(own.epochs, 6) for domain, own in sorted(reached.domains.items())},
        absent_domains=absent,
    )


def _course_tokens(shares: dict[str, int], previous: Artifact[PackedPhase] | None) -> dict[str, int]:
    """Tokens by domain of this phase and of those before it on the course."""
    before = {} if previous is None else previous.record.course_tokens_by_domain
    return {domain: shares.get(domain, 0) + before.get(domain, 0) for domain in sorted({*shares, *before})}


def _write_packing(
    output: Output, recipe: PackingRecipe, shards: list[str], shares: dict[str, int], *, has_glue: bool
) -> None:
    """Write packing.json, which a reader of the order needs."""
    packing: dict[str, Any] = {
        "packing": recipe.packing,
        "sequence_length": recipe.sequence_length,
        "seed": recipe.seed,
        "shards": shards,
        "has_glue": has_glue,
        "tokens_by_domain": shares,
    }
    if (step_rows := slice_rows(recipe)) is not None:
        packing["slice_rows"] = step_rows
    output.path(PACKING_FILE).write_text(json.dumps(packing, indent=1, sort_keys=True) + "\n")


def _shard_lengths(sources: list[Artifact], blocks: BlockReader) -> list[np.ndarray]:
    """Sequence lengths of every shard, in the order of the names: of the shards only the indexes are read."""
    return [shard.lengths() for source in sources for shard in _shards_of(source, blocks)]


def _shards_of(source: Artifact[TokenShards] | Artifact[ChatShards], blocks: BlockReader) -> list[StoredShard]:
    """The shards of an artifact, in the order of its record."""
    opened = open_shards(source.files("shards/*"), blocks)
    return [opened[name] for name in source.record.shards]


def _rearrangement(
    shards: Artifact[TokenShards] | None,
    tokenizer: Artifact[TrainedTokenizer] | None,
    domain_of: dict[str, str],
    recipe: PackingRecipe,
    blocks: BlockReader,
) -> Rearrangement:
    """Read the ids of source code, only where some of it is rearranged."""
    if not recipe.fim_rate or shards is None:
        return Rearrangement(0.0, recipe.seed, {})
    assert tokenizer is not None, "fill-in-the-middle needs the tokenizer's special tokens"
    read = {CODE, REPOSITORY} & {*recipe.domains}
    code = [(number, name) for number, name in enumerate(domain_of) if domain_of[name] in read]
    ids = {number: read_ids(shards.file(f"shards/{name}.parquet")) for number, name in code}
    by_name = dict(zip(shards.record.shards, _shards_of(shards, blocks), strict=True))
    opened = {number: by_name[name] for number, name in code}
    is_inside = read_inside(tokenizer.path("tokenizer.json"), tokenizer.record.num_tokens)
    return Rearrangement(recipe.fim_rate, recipe.seed, ids, opened, is_inside)


def _quality_buckets(
    sources: list[Artifact], domain_of: dict[str, str], recipe: PackingRecipe, num_buckets: int
) -> QualityBuckets:
    """Read the buckets of the mixture's domains, only where this phase or one before it on the course weighs them."""
    weights = (*recipe.bucket_weights, 1.0) if recipe.bucket_weights else ALIKE * num_buckets
    read = {*recipe.domains} if weights != ALIKE else set()
    sidecars = {
        name: source.file(f"shards/{name}.parquet")
        for source in sources
        for name in source.record.domains
        if domain_of[name] in read
    }
    return QualityBuckets(
        weights, {number: read_buckets(sidecars[name]) for number, name in enumerate(domain_of) if name in sidecars}
    )


def _positions_after(
    placed: PlacedUnits,
    pieces: dict[str, Pieces],
    positions: dict[str, DomainPosition],
    shares: dict[str, int],
    domains: list[str],
) -> dict[str, DomainPosition]:
    """The position at which the phase stopped in every domain that it read."""
    import numpy as np

    domain_of_unit = np.array(domains)[placed.units[:, 0]]
    return {
        domain: positions[domain].after(
            queue[:, VISIT],
            pieces[domain].buckets[queue[:, DOCUMENT]],
            placed.units[domain_of_unit == domain, VISIT],
            shares.get(domain, 0) / pieces[domain].num_tokens,
        )
        for domain, queue in placed.queues.items()
    }


def _expand(
    units: np.ndarray, kept: np.ndarray, slots: np.ndarray, lengths: list[np.ndarray], chosen: Rearrangement
) -> np.ndarray:
    """Lines of order.npy: one per unit, or those of its fill-in-the-middle; each unit is cut to its kept tokens."""
    import numpy as np

    marked = np.flatnonzero(units[:, 4])
    plain = np.flatnonzero(units[:, 4] == 0)
    lines = np.column_stack([plain, units[plain, :4]])
    if len(marked):
        moved = units[marked]
        whole = np.array([lengths[shard][sequence] for shard, sequence in moved[:, :2].tolist()])
        ends = moved[:, 2] + moved[:, 3] - NUM_EXTRA == whole
        splits = chosen.splits(moved, moved[:, 3] - NUM_EXTRA - ends)
        fresh = rearranged_lines(moved, ends, splits, glue=len(lengths))
        lines = np.concatenate([lines, np.column_stack([marked[fresh[:, 0]], fresh[:, 1:]])])
        lines = lines[np.argsort(lines[:, 0], kind="stable")]
    unit, length = lines[:, 0], lines[:, 4]
    before = np.cumsum(length) - length
    within = before - before[np.searchsorted(unit, unit)]
    length = np.clip(kept[unit] - within, 0, length)
    order = np.column_stack([lines[:, 1:4], length, slots[unit] + within, unit])
    return order[length > 0]


def _tokens_by_domain(order: np.ndarray, unit_shards: np.ndarray, domains: list[str]) -> dict[str, int]:
    """Tokens by domain; special tokens count for the domain of their document."""
    import numpy as np

    names = sorted(set(domains))
    number_of = np.array([names.index(domain) for domain in domains])
    sums = np.bincount(number_of[unit_shards[order[:, 5]]], weights=order[:, 3], minlength=len(names)).astype(np.int64)
    return {domain: int(count) for domain, count in zip(names, sums, strict=True) if count}
