"""Step: token shards -> the order in which one phase reads them: order.npy and packing.json.

Tokens per domain are exact; documents are shuffled within their domain, once per epoch, and the domains are interleaved evenly. The
stream is cut into rows wherever they end: in pre-training random truncation is augmentation (report, section 2).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.data.packed_rows import ORDER_FILE, PACKING_FILE

if TYPE_CHECKING:
    import numpy as np

    from configs.schema import PackingRecipe
    from tasks.data.shard_documents import TokenShards


class PackedPhase(Record):
    num_rows: int
    num_tokens: int
    """Of the stream: rows x sequence length, and the last target."""
    sequence_length: int
    num_pieces: int
    tokens_by_domain: dict[str, int]
    epochs_by_domain: dict[str, float]
    """Passes over the domain's tokens."""


@step(content=(ORDER_FILE, PACKING_FILE), distributions=("numpy",))
def pack_phase(*, shards: Artifact[TokenShards], recipe: PackingRecipe, output: Output) -> PackedPhase:
    """Raises ValueError where a domain would be read more often than max_epochs, or no domain of the mixture has text."""
    import numpy as np

    from tasks.data.token_shard import open_shard

    names = list(shards.record.shards)
    directory = shards.directory("shards")
    lengths = {name: open_shard(directory / f"{name}.bin").lengths for name in names}
    by_domain = {domain: [name for name in names if shards.record.domains[name] == domain] for domain in recipe.mixture}
    available = {domain: sum(int(lengths[name].sum()) for name in found) for domain, found in by_domain.items()}
    shares = allot_tokens(recipe, available)
    parts = []
    for number, (domain, num_tokens) in enumerate(shares.items()):
        part = _domain_order(domain, by_domain[domain], names, lengths, num_tokens, recipe.seed)
        parts.append((part, (np.cumsum(part[:, 3]) - part[:, 3]) / num_tokens, np.full(len(part), number)))
    pieces, position, domain_number = (np.concatenate(column) for column in zip(*parts, strict=True))
    pieces = pieces[np.lexsort((domain_number, position))]
    order = np.column_stack([pieces, np.cumsum(pieces[:, 3]) - pieces[:, 3]])
    np.save(output.path(ORDER_FILE), order)
    packing = {"sequence_length": recipe.sequence_length, "seed": recipe.seed, "shards": names, "tokens_by_domain": shares}
    output.path(PACKING_FILE).write_text(json.dumps(packing, indent=1, sort_keys=True) + "\n")
    return PackedPhase(
        num_rows=recipe.num_tokens // recipe.sequence_length,
        num_tokens=recipe.num_tokens + 1,
        sequence_length=recipe.sequence_length,
        num_pieces=len(order),
        tokens_by_domain=shares,
        epochs_by_domain={domain: round(shares[domain] / available[domain], 6) for domain in shares},
    )


def allot_tokens(recipe: PackingRecipe, available: dict[str, int]) -> dict[str, int]:
    """Tokens per domain that has text, exact in sum: the mixture's weights over num_tokens + 1, the rest to the largest remainders."""
    present = {domain: weight for domain, weight in sorted(recipe.mixture.items()) if available[domain] and weight}
    if not present:
        raise ValueError(f"none of the mixture's domains {', '.join(recipe.mixture)} has text: name domains that the data has")
    total, weights = recipe.num_tokens + 1, sum(present.values())
    exact = {domain: total * weight / weights for domain, weight in present.items()}
    shares = {domain: math.floor(amount) for domain, amount in exact.items()}
    for domain in sorted(present, key=lambda name: (shares[name] - exact[name], name))[: total - sum(shares.values())]:
        shares[domain] += 1
    over = {domain: amount for domain, amount in shares.items() if amount > recipe.max_epochs * available[domain]}
    if over:
        fits = min(int(recipe.max_epochs * available[domain] * weights / present[domain]) for domain in present)
        worst = "; ".join(f"{domain} has {available[domain]:,} tokens, {amount:,} are asked for" for domain, amount in over.items())
        fix = f"lower num_tokens to at most {fits // recipe.sequence_length * recipe.sequence_length:,}, raise max_epochs, or add text"
        raise ValueError(f"the mixture needs more than max_epochs ({recipe.max_epochs}) passes: {worst}; {fix}")
    return shares


def _domain_order(domain: str, own: list[str], names: list[str], lengths: dict[str, np.ndarray], num_tokens: int, seed: int) -> np.ndarray:
    """(shard, sequence, offset, length) of a domain's documents, shuffled per epoch, cut where its tokens are reached."""
    import numpy as np

    documents = np.concatenate(
        [np.column_stack([np.full(len(lengths[name]), names.index(name)), np.arange(len(lengths[name])), lengths[name]]) for name in own]
    )
    documents = documents[documents[:, 2] > 0]
    num_epochs = -(-num_tokens // int(documents[:, 2].sum()))
    shuffles = [_generator(seed, domain, epoch).permutation(len(documents)) for epoch in range(num_epochs)]
    chosen = documents[np.concatenate(shuffles)]
    ends = np.cumsum(chosen[:, 2])
    last = int(np.searchsorted(ends, num_tokens))
    chosen, ends = chosen[: last + 1], ends[: last + 1]
    chosen[last, 2] -= ends[last] - num_tokens
    return np.column_stack([chosen[:, 0], chosen[:, 1], np.zeros(len(chosen), dtype=np.int64), chosen[:, 2]])


def _generator(seed: int, domain: str, epoch: int) -> np.random.Generator:
    import numpy as np

    digest = hashlib.sha256(f"{seed} {domain} {epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "big")))
