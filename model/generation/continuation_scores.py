"""Scores continuations of contexts and computes what they share once: the beginning of many contexts (few-shot
examples), and the context of several continuations (the choices of a question)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from model.architecture.kv_cache import KVCache
from model.architecture.losses import vocabulary_chunks
from model.architecture.transformer import Glm4Moe

MIN_SHARED_TOKENS = 32
"""Fewest tokens of a beginning that is computed once; batches of contexts that share less are formed by length only."""

Pair = tuple[Sequence[int], Sequence[int]]
"""(context, continuation), each with at least one token."""
TokenIds = tuple[int, ...]


class ContinuationScore(NamedTuple):
    log_probability: float
    """Natural, of the whole continuation given its context."""
    is_greedy: bool
    """Whether each of its tokens is the model's most likely one there."""


class _Asked(NamedTuple):
    """A context with the pairs that have it."""

    context: TokenIds
    members: list[int]


@torch.inference_mode()
def score_continuations(model: Glm4Moe, pairs: Sequence[Pair], batch_sequences: int) -> list[ContinuationScore]:
    """One score per pair, in their order. At most `batch_sequences` contexts, then continuations, are computed at
    once. Raises ValueError for a pair that is longer than the model's positions."""
    scores = [ContinuationScore(0.0, True)] * len(pairs)
    by_context: dict[TokenIds, list[int]] = {}
    limit = model.recipe.max_position_embeddings
    for number, (context, continuation) in enumerate(pairs):
        assert context and continuation, f"pair {number} has an empty part"
        if len(context) + len(continuation) > limit + 1:
            raise ValueError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens exceed "
                f"max_position_embeddings ({limit}): cut the context"
            )
        by_context.setdefault(tuple(context), []).append(number)
    for shared, asked in _runs([_Asked(*entry) for entry in by_context.items()]):
        beginning = None
        if shared:
            beginning = _new_cache(model, [0], shared)
            _extend(model, beginning, [asked[0].context[:shared]])
        # Long contexts first: what does not fit into memory shows at once.
        waiting = iter(sorted(asked, key=lambda each: -len(each.context)))
        while batch := list(islice(waiting, batch_sequences)):
            _score_batch(model, pairs, batch, beginning, batch_sequences, scores)
    return scores


def _runs(asked: list[_Asked]) -> Iterator[tuple[int, list[_Asked]]]:
    """(number of shared tokens, the contexts that share them); of every context at least one token is not shared."""
    alone: list[_Asked] = []
    run: list[_Asked] = []
    shared = 0
    for each in sorted(asked, key=lambda each: each.context):
        common = _common(run[0].context[:shared], each.context) if run else 0
        if run and common >= max(MIN_SHARED_TOKENS, shared // 2):
            shared = common
            run.append(each)
            continue
        if len(run) > 1:
            yield shared, run
        else:
            alone += run
        run, shared = [each], len(each.context) - 1
    if len(run) > 1:
        yield shared, run
    else:
        alone += run
    if alone:
        yield 0, alone


def _common(first: TokenIds, second: TokenIds) -> int:
    """Number of equal tokens at the beginning, without the last one of `second`."""
    end = min(len(first), len(second) - 1)
    return next((index for index in range(end) if first[index] != second[index]), end)


def _score_batch(
    model: Glm4Moe,
    pairs: Sequence[Pair],
    batch: Sequence[_Asked],
    beginning: KVCache | None,
    batch_sequences: int,
    scores: list[ContinuationScore],
) -> None:
    shared = beginning.lengths[0] if beginning is not None else 0
    rests = [each.context[shared:] for each in batch]
    longest = max(len(each.context) for each in batch)
    cache = _new_cache(model, [0] * len(batch), longest, beginning)
    hidden_BTD = _extend(model, cache, rests)
    last_BD = torch.stack([hidden_TD[len(rest) - 1] for hidden_TD, rest in zip(hidden_BTD, rests, strict=True)])
    members = iter([(row, member) for row, each in enumerate(batch) for member in each.members])
    while part := list(islice(members, batch_sequences)):
        owners = [row for row, _ in part]
        wanted = [pairs[member][1] for _, member in part]
        num_more = max(len(continuation) for continuation in wanted) - 1
        hidden = [last_BD[row : row + 1] for row in owners]
        if num_more:
            continued = _new_cache(model, owners, longest + num_more, cache)
            more_BTD = _extend(model, continued, [continuation[:-1] for continuation in wanted])
            hidden = [
                torch.cat([first_1D, more_TD[: len(continuation) - 1]])
                for first_1D, more_TD, continuation in zip(hidden, more_BTD, wanted, strict=True)
            ]
        for (_, member), score in zip(part, _read(model, hidden, wanted), strict=True):
            scores[member] = score


def _read(model: Glm4Moe, hidden: Sequence[Tensor], wanted: Sequence[Sequence[int]]) -> Iterator[ContinuationScore]:
    """Logits in float32, whatever the model computes in, as `LanguageHead.log_probabilities` has them."""
    hidden_RD, weight_VD = torch.cat(list(hidden)), model.lm_head.weight.float()
    target_ids_R = torch.tensor([token_id for each in wanted for token_id in each], device=hidden_RD.device)
    log_probabilities: list[float] = []
    is_greedy: list[bool] = []
    for rows in vocabulary_chunks(len(hidden_RD), len(weight_VD), hidden_RD.device.type):
        logits_CV, targets_C = hidden_RD[rows].float() @ weight_VD.t(), target_ids_R[rows]
        chosen_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1)
        log_probabilities += (chosen_C - logits_CV.logsumexp(-1)).tolist()
        is_greedy += (logits_CV.argmax(-1) == targets_C).tolist()
    start = 0
    for each in wanted:
        end = start + len(each)
        yield ContinuationScore(sum(log_probabilities[start:end]), all(is_greedy[start:end]))
        start = end


def _new_cache(model: Glm4Moe, rows: Sequence[int], num_positions: int, source: KVCache | None = None) -> KVCache:
    """An empty cache with room for `num_positions`, or one whose rows hold what those rows of `source` hold; a source
    with one row is given to all."""
    weight, recipe = model.lm_head.weight, model.recipe
    cache = KVCache(
        recipe,
        len(rows),
        num_positions,
        layers=range(recipe.num_hidden_layers),
        dtype=weight.dtype,
        device=weight.device,
    )
    if source is not None:
        taken = torch.tensor(rows, device=weight.device)
        filled = max(source.lengths)
        for target, given in ((cache.key_LBSGH, source.key_LBSGH), (cache.value_LBSGH, source.value_LBSGH)):
            target[:, :, :filled] = given[:, taken, :filled]
        cache.cut([source.lengths[row] for row in rows])
    return cache


def _extend(model: Glm4Moe, cache: KVCache, rows: Iterable[Sequence[int]]) -> Tensor:
    """Hidden states (B, T, D) of new tokens; a row is padded after its own, which no position sees."""
    rows = list(rows)
    lengths = [length + len(row) for length, row in zip(cache.lengths, rows, strict=True)]
    token_ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for number, row in enumerate(rows):
        token_ids_BT[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    hidden_BTD = model.hidden_states(token_ids_BT.to(model.lm_head.weight.device), cache)
    cache.cut(lengths)
    return hidden_BTD
