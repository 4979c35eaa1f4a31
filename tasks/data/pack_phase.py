"""Step: token shards -> the order in which one phase reads them: order.npy, packing.json and, with fill-in-the-middle, a shard glue.bin.

Documents are shuffled within their domain, once per epoch. stream: tokens per domain are exact, the domains are interleaved evenly, and
the stream is cut into rows wherever they end: in pre-training random truncation is augmentation (report, section 2). best_fit: rows are
filled with whole documents (mid-training, SFT); a document longer than a row is cut into pieces, a conversation is left out and counted.
Of the domains code and repository a share fim_rate of the documents is rearranged (tasks/data/fill_in_middle.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from tasks.data.documents import CHAT, CODE, REPOSITORY
from tasks.data.fill_in_middle import MIN_TOKENS, NUM_EXTRA, Rearrangement, read_ids, rearranged_lines, write_glue
from tasks.data.packed_rows import ORDER_FILE, PACKING_FILE

if TYPE_CHECKING:
    import numpy as np

    from configs.schema import PackingRecipe
    from tasks.data.shard_chats import ChatShards
    from tasks.data.shard_documents import TokenShards
    from tasks.data.train_tokenizer import TrainedTokenizer


class PackedPhase(Record):
    num_rows: int
    num_tokens: int
    """Tokens that the rows hold: in a stream rows x sequence length, and the last target; in best_fit without the gaps."""
    sequence_length: int
    packing: str
    num_pieces: int
    fill_share: float
    """Tokens over slots of the rows."""
    num_too_long: int
    """Conversations that no row holds."""
    num_rearranged: int = 0
    """Pieces with fill-in-the-middle."""
    tokens_by_domain: dict[str, int]
    epochs_by_domain: dict[str, float]
    """Passes over the domain's tokens."""
    absent_domains: tuple[str, ...] = ()
    """Domains of the mixture without text, whose share went to the others."""


@dataclass(frozen=True)
class Pieces:
    """What a domain can give: one unit (shard, sequence, offset, length, whether it is rearranged) per piece of a document. The length of
    a rearranged one counts its special tokens."""

    units: np.ndarray
    num_tokens: int
    num_too_long: int


@step(content=(ORDER_FILE, PACKING_FILE, "glue.*"), distributions=("numpy",))
def pack_phase(
    *,
    shards: Artifact[TokenShards],
    chats: Artifact[ChatShards] | None,
    recipe: PackingRecipe,
    output: Output,
    tokenizer: Artifact[TrainedTokenizer] | None = None,
) -> PackedPhase:
    """`tokenizer` names the special tokens of fill-in-the-middle, None where fim_rate is 0. Raises ValueError where a domain would be read
    more often than max_epochs, or no domain of the mixture has text."""
    import numpy as np

    sources = [shards] if chats is None else [shards, chats]
    domain_of = {name: domain for source in sources for name, domain in source.record.domains.items()}
    names = list(domain_of)
    domains = [domain_of[name] for name in names]
    lengths = _shard_lengths(sources)
    row_slots = recipe.sequence_length + 1 if recipe.packing == "best_fit" else None
    chosen = _rearrangement(shards, domain_of, recipe)
    pieces = {
        domain: _pieces_of([n for n, own in enumerate(domains) if own == domain], lengths, row_slots, domain != CHAT, chosen)
        for domain in recipe.mixture
    }
    absent = tuple(sorted(domain for domain, weight in recipe.mixture.items() if weight and not pieces[domain].num_tokens))
    if absent:
        output.report(Progress(0, 0, "pieces", f"no text of {', '.join(absent)}: its share goes to the other domains"))
    units, kept, slots = _stream_units(pieces, recipe) if row_slots is None else _best_fit_units(pieces, recipe, row_slots)
    order = _expand(units, kept, slots, lengths, chosen)
    np.save(output.path(ORDER_FILE), order)
    num_rearranged = int(np.count_nonzero(units[:, 4]))
    if tokenizer is not None:
        write_glue(output.path(ORDER_FILE).parent, tokenizer.record.special_ids, tokenizer.record.num_tokens)
    assert tokenizer is not None or not num_rearranged, "fill-in-the-middle needs the tokenizer's special tokens"
    shares = _tokens_by_domain(order, units[:, 0], domains)
    packing = {
        "packing": recipe.packing, "sequence_length": recipe.sequence_length, "seed": recipe.seed, "shards": names,
        "has_glue": tokenizer is not None, "tokens_by_domain": shares,
    }  # fmt: skip
    output.path(PACKING_FILE).write_text(json.dumps(packing, indent=1, sort_keys=True) + "\n")
    num_rows, num_tokens = recipe.num_tokens // recipe.sequence_length, sum(shares.values())
    return PackedPhase(
        num_rows=num_rows, num_tokens=num_tokens, sequence_length=recipe.sequence_length, packing=recipe.packing, num_pieces=len(units),
        fill_share=1.0 if row_slots is None else round(num_tokens / (num_rows * row_slots), 6), num_rearranged=num_rearranged,
        num_too_long=sum(domain.num_too_long for domain in pieces.values()), tokens_by_domain=shares,
        epochs_by_domain={domain: round(shares[domain] / pieces[domain].num_tokens, 6) for domain in shares}, absent_domains=absent,
    )  # fmt: skip


def allot_tokens(recipe: PackingRecipe, available: dict[str, int], num_tokens: int) -> dict[str, int]:
    """Tokens per domain that has text, exact in sum: the mixture's weights over num_tokens, the rest to the largest remainders."""
    present = {domain: weight for domain, weight in sorted(recipe.mixture.items()) if available[domain] and weight}
    if not present:
        raise ValueError(f"none of the mixture's domains {', '.join(recipe.mixture)} has text: name domains that the data has")
    weights = sum(present.values())
    exact = {domain: num_tokens * weight / weights for domain, weight in present.items()}
    shares = {domain: math.floor(amount) for domain, amount in exact.items()}
    for domain in sorted(present, key=lambda name: (shares[name] - exact[name], name))[: num_tokens - sum(shares.values())]:
        shares[domain] += 1
    over = {domain: amount for domain, amount in shares.items() if amount > recipe.max_epochs * available[domain]}
    if over:
        fits = min(int(recipe.max_epochs * available[domain] * weights / present[domain]) for domain in present)
        worst = "; ".join(f"{domain} has {available[domain]:,} tokens, {amount:,} are asked for" for domain, amount in over.items())
        fix = f"lower num_tokens to at most {fits // recipe.sequence_length * recipe.sequence_length:,}, raise max_epochs, or add text"
        raise ValueError(f"the mixture needs more than max_epochs ({recipe.max_epochs}) passes: {worst}; {fix}")
    return shares


def _shard_lengths(sources: list[Artifact]) -> list[np.ndarray]:
    """Sequence lengths of every shard, in the order of the names."""
    from tasks.data.token_shard import open_shard

    return [open_shard(source.directory("shards") / f"{name}.bin").lengths for source in sources for name in source.record.shards]


def _rearrangement(shards: Artifact[TokenShards], domain_of: dict[str, str], recipe: PackingRecipe) -> Rearrangement:
    """Reads the ids of source code alone, and only where some of it is rearranged."""
    read = {CODE, REPOSITORY} & {*map(str, recipe.mixture)}
    code = [(number, name) for number, name in enumerate(domain_of) if domain_of[name] in read]
    ids = {number: read_ids(shards.path(f"shards/{name}.parquet")) for number, name in code} if recipe.fim_rate else {}
    return Rearrangement(recipe.fim_rate, recipe.seed, ids)


def _pieces_of(own: list[int], lengths: list[np.ndarray], row_slots: int | None, may_cut: bool, chosen: Rearrangement) -> Pieces:
    """The documents of a domain's shards; with `row_slots` none longer than a row: cut, or left out where they may not be."""
    import numpy as np

    units = np.concatenate([np.zeros((0, 5), dtype=np.int64), *(_documents(number, lengths[number], chosen) for number in own)])
    units = units[units[:, 3] > 0]
    num_too_long = 0
    if row_slots is not None and may_cut:
        room = row_slots - NUM_EXTRA * units[:, 4]
        counts = -(-units[:, 3] // room)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        units, room = np.repeat(units, counts, axis=0), np.repeat(room, counts)
        units[:, 2] = numbers * room
        units[:, 3] = np.minimum(units[:, 3] - units[:, 2], room)
    elif row_slots is not None:
        fits = units[:, 3] <= row_slots
        units, num_too_long = units[fits], int(np.count_nonzero(~fits))
    units[units[:, 3] < MIN_TOKENS, 4] = 0
    units[:, 3] += NUM_EXTRA * units[:, 4]
    return Pieces(units, int(units[:, 3].sum()), num_too_long)


def _documents(number: int, lengths: np.ndarray, chosen: Rearrangement) -> np.ndarray:
    """Units of whole documents, without the special tokens."""
    import numpy as np

    sequences = np.arange(len(lengths))
    return np.column_stack([np.full(len(lengths), number), sequences, 0 * sequences, lengths, chosen.is_chosen(number, sequences)])


def _stream_units(pieces: dict[str, Pieces], recipe: PackingRecipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Units, tokens kept of each, and first slots: the domains' pieces interleaved evenly, the last of each cut where its tokens end."""
    import numpy as np

    shares = allot_tokens(recipe, {domain: given.num_tokens for domain, given in pieces.items()}, recipe.num_tokens + 1)
    parts = []
    for number, (domain, num_tokens) in enumerate(shares.items()):
        part = _shuffled(domain, pieces[domain].units, num_tokens, recipe.seed)
        ends = np.cumsum(part[:, 3])
        part = part[: int(np.searchsorted(ends, num_tokens)) + 1]
        kept = part[:, 3].copy()
        kept[-1] -= ends[len(part) - 1] - num_tokens
        parts.append((part, kept, (np.cumsum(kept) - kept) / num_tokens, np.full(len(part), number)))
    units, kept, position, domain_number = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((domain_number, position))
    units, kept = units[order], kept[order]
    return units, kept, np.cumsum(kept) - kept


def _best_fit_units(pieces: dict[str, Pieces], recipe: PackingRecipe, row_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Units, their lengths, and first slots: as many per domain as fill the rows; what overflows them by a row at most is not read."""
    import numpy as np

    from tasks.data.best_fit import num_rows, place_pieces, row_shapes

    available = {domain: given.num_tokens for domain, given in pieces.items()}
    wanted = recipe.num_tokens // recipe.sequence_length
    most = allot_tokens(recipe, available, wanted * row_slots)
    shuffled = {domain: _shuffled(domain, pieces[domain].units, num_tokens, recipe.seed) for domain, num_tokens in most.items()}

    def chosen(num_tokens: int) -> np.ndarray:
        shares = allot_tokens(recipe, available, num_tokens)
        parts = [shuffled[domain][: 1 + np.searchsorted(np.cumsum(shuffled[domain][:, 3]), shares[domain])] for domain in shares]
        return np.concatenate(parts)

    low, high = 0, wanted * row_slots  # rows of `high` are enough by volume
    while high - low > 1:
        middle = (low + high) // 2
        enough = num_rows(row_shapes(chosen(middle)[:, 3], row_slots)) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    units = chosen(high)
    piece, slot = place_pieces(units[:, 3], row_shapes(units[:, 3], row_slots), row_slots)
    is_read = slot < wanted * row_slots
    units = units[piece[is_read]]
    return units, units[:, 3], slot[is_read]


def _expand(units: np.ndarray, kept: np.ndarray, slots: np.ndarray, lengths: list[np.ndarray], chosen: Rearrangement) -> np.ndarray:
    """Lines of order.npy: one per unit, or those of its fill-in-the-middle, of each unit as many tokens as are kept."""
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


def _shuffled(domain: str, units: np.ndarray, num_tokens: int, seed: int) -> np.ndarray:
    """A domain's pieces, shuffled anew per epoch, for as many epochs as its tokens take."""
    import numpy as np

    num_epochs = -(-num_tokens // int(units[:, 3].sum()))
    return units[np.concatenate([_generator(seed, domain, epoch).permutation(len(units)) for epoch in range(num_epochs)])]


def _generator(seed: int, domain: str, epoch: int) -> np.random.Generator:
    import numpy as np

    digest = hashlib.sha256(f"{seed} {domain} {epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "big")))


def _tokens_by_domain(order: np.ndarray, unit_shards: np.ndarray, domains: list[str]) -> dict[str, int]:
    """Special tokens count for the domain of the document that they stand in."""
    import numpy as np

    names = sorted(set(domains))
    number_of = np.array([names.index(domain) for domain in domains])
    sums = np.bincount(number_of[unit_shards[order[:, 5]]], weights=order[:, 3], minlength=len(names)).astype(np.int64)
    return {domain: int(count) for domain, count in zip(names, sums, strict=True) if count}
