"""Step: token shards -> the order in which one phase reads them: order.npy and packing.json.

Documents are shuffled within their domain, once per epoch. stream: tokens per domain are exact, the domains are interleaved evenly, and
the stream is cut into rows wherever they end: in pre-training random truncation is augmentation (report, section 2). best_fit: rows are
filled with whole documents (mid-training, SFT); a document longer than a row is cut into pieces, a conversation is left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.data.documents import CHAT
from tasks.data.packed_rows import ORDER_FILE, PACKING_FILE

if TYPE_CHECKING:
    import numpy as np

    from configs.schema import PackingRecipe
    from tasks.data.shard_chats import ChatShards
    from tasks.data.shard_documents import TokenShards


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
    tokens_by_domain: dict[str, int]
    epochs_by_domain: dict[str, float]
    """Passes over the domain's tokens."""


@dataclass(frozen=True)
class Pieces:
    """What a domain can give: one line (shard, sequence, offset, length) per piece."""

    lines: np.ndarray
    num_tokens: int
    num_too_long: int


@step(content=(ORDER_FILE, PACKING_FILE), distributions=("numpy",))
def pack_phase(*, shards: Artifact[TokenShards], chats: Artifact[ChatShards] | None, recipe: PackingRecipe, output: Output) -> PackedPhase:
    """Raises ValueError where a domain would be read more often than max_epochs, or no domain of the mixture has text."""
    import numpy as np

    sources = [shards] if chats is None else [shards, chats]
    domain_of = {name: domain for source in sources for name, domain in source.record.domains.items()}
    names = list(domain_of)
    lengths = _shard_lengths(sources)
    row_slots = recipe.sequence_length + 1 if recipe.packing == "best_fit" else None
    pieces = {
        domain: _pieces_of([number for number, name in enumerate(names) if domain_of[name] == domain], lengths, row_slots, domain != CHAT)
        for domain in recipe.mixture
    }
    order = _stream_order(pieces, recipe) if row_slots is None else _best_fit_order(pieces, recipe, row_slots)
    np.save(output.path(ORDER_FILE), order)
    shares = _tokens_by_domain(order, [domain_of[name] for name in names])
    packing = {
        "packing": recipe.packing, "sequence_length": recipe.sequence_length, "seed": recipe.seed, "shards": names,
        "tokens_by_domain": shares,
    }  # fmt: skip
    output.path(PACKING_FILE).write_text(json.dumps(packing, indent=1, sort_keys=True) + "\n")
    num_rows, num_tokens = recipe.num_tokens // recipe.sequence_length, sum(shares.values())
    return PackedPhase(
        num_rows=num_rows, num_tokens=num_tokens, sequence_length=recipe.sequence_length, packing=recipe.packing, num_pieces=len(order),
        fill_share=1.0 if row_slots is None else round(num_tokens / (num_rows * row_slots), 6),
        num_too_long=sum(domain.num_too_long for domain in pieces.values()), tokens_by_domain=shares,
        epochs_by_domain={domain: round(shares[domain] / pieces[domain].num_tokens, 6) for domain in shares},
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


def _pieces_of(own: list[int], lengths: list[np.ndarray], row_slots: int | None, may_cut: bool) -> Pieces:
    """The documents of a domain's shards; with `row_slots` none longer than a row: cut, or left out where they may not be."""
    import numpy as np

    lines = [np.column_stack([np.full(len(lengths[n]), n), np.arange(len(lengths[n])), np.zeros_like(lengths[n]), lengths[n]]) for n in own]
    documents = np.concatenate([np.zeros((0, 4), dtype=np.int64), *lines])
    documents = documents[documents[:, 3] > 0]
    num_too_long = 0
    if row_slots is not None and may_cut:
        counts = -(-documents[:, 3] // row_slots)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        documents = np.repeat(documents, counts, axis=0)
        documents[:, 2] = numbers * row_slots
        documents[:, 3] = np.minimum(documents[:, 3] - documents[:, 2], row_slots)
    elif row_slots is not None:
        fits = documents[:, 3] <= row_slots
        documents, num_too_long = documents[fits], int(np.count_nonzero(~fits))
    return Pieces(documents, int(documents[:, 3].sum()), num_too_long)


def _stream_order(pieces: dict[str, Pieces], recipe: PackingRecipe) -> np.ndarray:
    """Lines of order.npy: the domains' pieces interleaved evenly, the last of each cut where its tokens are reached."""
    import numpy as np

    shares = allot_tokens(recipe, {domain: given.num_tokens for domain, given in pieces.items()}, recipe.num_tokens + 1)
    parts = []
    for number, (domain, num_tokens) in enumerate(shares.items()):
        part = _shuffled(domain, pieces[domain].lines, num_tokens, recipe.seed)
        ends = np.cumsum(part[:, 3])
        last = int(np.searchsorted(ends, num_tokens))
        part = part[: last + 1]
        part[last, 3] -= ends[last] - num_tokens
        parts.append((part, (np.cumsum(part[:, 3]) - part[:, 3]) / num_tokens, np.full(len(part), number)))
    lines, position, domain_number = (np.concatenate(column) for column in zip(*parts, strict=True))
    lines = lines[np.lexsort((domain_number, position))]
    return np.column_stack([lines, np.cumsum(lines[:, 3]) - lines[:, 3]])


def _best_fit_order(pieces: dict[str, Pieces], recipe: PackingRecipe, row_slots: int) -> np.ndarray:
    """Lines of order.npy: as many pieces per domain as fill the rows of the phase; what overflows them by a row at most is not read."""
    import numpy as np

    from tasks.data.best_fit import num_rows, place_pieces, row_shapes

    available = {domain: given.num_tokens for domain, given in pieces.items()}
    wanted = recipe.num_tokens // recipe.sequence_length
    most = allot_tokens(recipe, available, wanted * row_slots)
    shuffled = {domain: _shuffled(domain, pieces[domain].lines, num_tokens, recipe.seed) for domain, num_tokens in most.items()}

    def chosen(num_tokens: int) -> np.ndarray:
        shares = allot_tokens(recipe, available, num_tokens)
        parts = [shuffled[domain][: 1 + np.searchsorted(np.cumsum(shuffled[domain][:, 3]), shares[domain])] for domain in shares]
        return np.concatenate(parts)

    low, high = 0, wanted * row_slots  # rows of `high` are enough by volume
    while high - low > 1:
        middle = (low + high) // 2
        enough = num_rows(row_shapes(chosen(middle)[:, 3], row_slots)) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    lines = chosen(high)
    piece, slot = place_pieces(lines[:, 3], row_shapes(lines[:, 3], row_slots), row_slots)
    is_read = slot < wanted * row_slots
    return np.column_stack([lines[piece[is_read]], slot[is_read]])


def _shuffled(domain: str, lines: np.ndarray, num_tokens: int, seed: int) -> np.ndarray:
    """A domain's pieces, shuffled anew per epoch, for as many epochs as its tokens take."""
    import numpy as np

    num_epochs = -(-num_tokens // int(lines[:, 3].sum()))
    return lines[np.concatenate([_generator(seed, domain, epoch).permutation(len(lines)) for epoch in range(num_epochs)])]


def _generator(seed: int, domain: str, epoch: int) -> np.random.Generator:
    import numpy as np

    digest = hashlib.sha256(f"{seed} {domain} {epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "big")))


def _tokens_by_domain(order: np.ndarray, domains: list[str]) -> dict[str, int]:
    import numpy as np

    tokens = np.bincount(order[:, 0], weights=order[:, 3], minlength=len(domains)).astype(np.int64)
    sums = {domain: sum(int(tokens[n]) for n, own in enumerate(domains) if own == domain) for domain in sorted(set(domains))}
    return {domain: count for domain, count in sums.items() if count}
