"""Generates and scores in this process: from prompts as token ids to tokens with their log-probabilities.

`InProcessEngine` is one implementation of the engine protocol (`generate`, `score`) that evaluation, rollouts, chat and
the smoke test use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from model.architecture.losses import IGNORED
from model.architecture.transformer import Glm4Moe
from model.generation.continuation_scores import ContinuationScore, Pair, score_continuations
from model.generation.decoding import Decoding, TorchDecoding
from model.generation.kernel_decoding import KernelDecoding, KernelWeights, kernel_applies
from model.generation.sampling import Chosen, NonFiniteLogitsError, Sampling, choose_tokens

__all__ = ["Generation", "InProcessEngine", "NonFiniteLogitsError", "Sampling", "choose_tokens"]


@dataclass(frozen=True)
class Generation:
    """One entry per prompt, each as long as its continuation; a stop token that ended one is its last token."""

    token_ids: list[list[int]]
    log_probabilities: list[list[float]]
    """Under the model itself (temperature 1, all tokens), whatever the sampling, so that they compare with `score`."""
    sampled_log_probabilities: list[list[float]]
    """Under the model at the sampling's temperature, all tokens: the ratio of a policy gradient divides by it. Equal to
    `log_probabilities` if greedy."""
    top2_margins: list[list[float]]
    """Logit of the best token minus that of the second best: where it is small, rounding decides a greedy step."""
    weights_version: str
    routes: list[Tensor] | None = None
    """Per prompt the experts of its tokens and of the continuation's but the last, int16 (L, T, K); FREE where the last
    layer did not run. None where they were not asked for."""
    drafted: Sequence[int] = ()
    """Per prompt the tokens that the MTP layer drafted; the trunk chose `accepted` of them. 0 without speculation."""
    accepted: Sequence[int] = ()

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were accepted; NaN where none was made."""
        return self.num_accepted / self.num_drafted if self.num_drafted else float("nan")


@dataclass
class _Continuation:
    """The state of one prompt: its draws, the tokens chosen so far, and the counts of its drafts."""

    draws: Sequence[float]
    """One for each token that may be chosen."""
    chosen: list[Chosen]
    is_done: bool = False
    num_drafted: int = 0
    num_accepted: int = 0


class InProcessEngine:
    """A loaded model that generates and scores in batches of at most `batch_sequences` sequences of similar length."""

    def __init__(self, model: Glm4Moe, *, weights_version: str, batch_sequences: int) -> None:
        self.model = model.eval()
        self.weights_version = weights_version
        self.batch_sequences = batch_sequences
        self._packed: KernelWeights | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        weights_version: str,
        draws: Sequence[Sequence[float]] | None = None,
    ) -> Generation:
        """Continue every prompt; refuses to answer for weights other than those it holds. `draws` are those of each
        prompt, which is continued by as many tokens at most; None: those of `sampling_draws`."""
        self._check_version(weights_version)
        continuations = self._begin(prompts, sampling, draws)
        routes: dict[int, Tensor] = {}
        for members in _batches([len(prompt) for prompt in prompts], self.batch_sequences):
            batch = [continuations[member] for member in members]
            read = [prompts[member] for member in members]
            max_tokens = max(len(row) + len(each.draws) for row, each in zip(read, batch, strict=True))
            decoding = self._start(len(read), max_tokens, sampling.keeps_routes)
            for _ in self._passes(decoding, read, sampling, batch):
                pass
            for row, (member, each) in enumerate(zip(members, batch, strict=True)):
                if sampling.keeps_routes:
                    size = len(prompts[member]) + len(each.chosen) - 1
                    routes[member] = decoding.routes_LBTK[:, row, :size].clone()
        return Generation(
            token_ids=[[chosen.token_id for chosen in each.chosen] for each in continuations],
            log_probabilities=[[chosen.log_probability for chosen in each.chosen] for each in continuations],
            sampled_log_probabilities=[
                [chosen.sampled_log_probability for chosen in each.chosen] for each in continuations
            ],
            top2_margins=[[chosen.top2_margin for chosen in each.chosen] for each in continuations],
            weights_version=weights_version,
            routes=[routes[index] for index in range(len(prompts))] if sampling.keeps_routes else None,
            drafted=[each.num_drafted for each in continuations],
            accepted=[each.num_accepted for each in continuations],
        )

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """Tokens of one continuation as they are chosen, the same as `generate` returns."""
        (continuation,) = self._begin([prompt], sampling)
        num_yielded = 0
        for _ in self._passes(
            self._start(1, len(prompt) + sampling.max_new_tokens), [prompt], sampling, [continuation]
        ):
            yield from (chosen.token_id for chosen in continuation.chosen[num_yielded:])
            num_yielded = len(continuation.chosen)

    @torch.inference_mode()
    def score(self, token_id_sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token i | tokens before it) for i >= 1: one number less than the sequence has tokens."""
        scores: list[list[float]] = [[] for _ in token_id_sequences]
        self._check_length(max((len(sequence) for sequence in token_id_sequences), default=0))
        for members in _batches([len(sequence) for sequence in token_id_sequences], self.batch_sequences):
            width = max(len(token_id_sequences[member]) for member in members)
            if width < 2:
                continue
            # A sequence does not see the padding after it: attention is causal.
            token_ids_BT = torch.zeros(len(members), width - 1, dtype=torch.int64)
            target_ids_BT = torch.full((len(members), width - 1), IGNORED)
            for row, member in enumerate(members):
                sequence = torch.tensor(token_id_sequences[member])
                token_ids_BT[row, : len(sequence) - 1] = sequence[:-1]
                target_ids_BT[row, : len(sequence) - 1] = sequence[1:]
            hidden_BTD = self.model.hidden_states(token_ids_BT.to(self._device))
            rows = self.model.lm_head.log_probabilities(hidden_BTD, target_ids_BT.to(self._device)).tolist()
            for row, member in zip(rows, members, strict=True):
                scores[member] = row[: max(0, len(token_id_sequences[member]) - 1)]
        return scores

    def score_continuations(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """Log-probability of every continuation after its context, and whether it is the greedy one."""
        return score_continuations(self.model, pairs, self.batch_sequences)

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def _check_version(self, weights_version: str) -> None:
        if weights_version != self.weights_version:
            raise ValueError(
                f"weights version {weights_version!r} was asked for, this engine holds {self.weights_version!r}: load "
                f"that one"
            )

    def _check_length(self, num_tokens: int) -> None:
        limit = self.model.recipe.max_position_embeddings
        if num_tokens > limit:
            raise ValueError(f"a sequence of {num_tokens} tokens exceeds max_position_embeddings ({limit}): cut it")

    def _begin(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, draws: Sequence[Sequence[float]] | None = None
    ) -> list[_Continuation]:
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty: give at least one token")
        if sampling.is_speculative and not self.model.recipe.num_nextn_predict_layers:
            raise ValueError(
                "speculative generation needs an MTP layer, the model has none (num_nextn_predict_layers 0): switch "
                "it off"
            )
        given = sampling_draws(sampling, len(prompts)) if draws is None else draws
        assert len(given) == len(prompts) and all(given), "a draw for each token that may be chosen, one at least"
        return [_Continuation(own, []) for own in given]

    @torch.inference_mode()
    def _passes(
        self, decoding: Decoding, prompts: Sequence[Sequence[int]], sampling: Sampling, batch: Sequence[_Continuation]
    ) -> Iterator[None]:
        """Continue one batch until every row is done; yields after each pass."""
        tokens = [list(prompt) for prompt in prompts]
        drafts: list[int | None] = [None] * len(batch)
        while any(tokens):
            # One pass reads the successor of a draft together with the successor of the token before it.
            draws = [
                each.draws[len(each.chosen) : len(each.chosen) + (1 if draft is None else 2)] if row else []
                for each, row, draft in zip(batch, tokens, drafts, strict=True)
            ]
            read, hidden = decoding.extend(tokens, sampling, draws, keeps_hidden=sampling.is_speculative)
            lengths, news = list(decoding.lengths), []
            for index, (each, draft, chosen) in enumerate(zip(batch, drafts, read, strict=True)):
                accepted = chosen
                if draft is not None:
                    each.num_drafted += 1
                    each.num_accepted += chosen[0].token_id == draft
                    if chosen[0].token_id != draft:
                        lengths[index] -= 1
                        tokens[index].pop()
                        accepted = chosen[:1]
                news.append(_keep(each, accepted, sampling))
            decoding.cut(lengths)
            drafts = _draft(decoding, tokens, hidden, batch, news) if sampling.is_speculative else drafts
            tokens = [
                [] if each.is_done else [each.chosen[-1].token_id, *([] if draft is None else [draft])]
                for each, draft in zip(batch, drafts, strict=True)
            ]
            yield

    def _start(self, num_sequences: int, max_tokens: int, keeps_routes: bool = False) -> Decoding:
        if not kernel_applies(self.model):
            return TorchDecoding(self.model, num_sequences, max_tokens, keeps_routes=keeps_routes)
        if self._packed is None or not self._packed.are_current():
            self._packed = KernelWeights(self.model)
        return KernelDecoding(self._packed, num_sequences, max_tokens, keeps_routes=keeps_routes)


def sampling_draws(sampling: Sampling, num_prompts: int) -> list[list[float]]:
    """The numbers in [0, 1) that decide each prompt's tokens. Drawn on the CPU for a whole call: the same on every
    device and whatever the batches."""
    generator, first = torch.Generator().manual_seed(sampling.seed), sampling.first_index
    return torch.rand(first + num_prompts, sampling.max_new_tokens, generator=generator)[first:].tolist()


def _keep(continuation: _Continuation, chosen: Sequence[Chosen], sampling: Sampling) -> list[int]:
    """Append up to what ends the continuation, and return the appended tokens."""
    kept = []
    for each in chosen:
        continuation.chosen.append(each)
        kept.append(each.token_id)
        is_full = len(continuation.chosen) == len(continuation.draws)
        if each.token_id in sampling.stop_token_ids or is_full or _has_ended(continuation, sampling):
            continuation.is_done = True
            break
    return kept


def _has_ended(continuation: _Continuation, sampling: Sampling) -> bool:
    return sampling.ends is not None and sampling.ends([each.token_id for each in continuation.chosen])


def _draft(
    decoding: Decoding,
    fed: Sequence[Sequence[int]],
    hidden: Sequence[Tensor],
    batch: Sequence[_Continuation],
    news: Sequence[Sequence[int]],
) -> list[int | None]:
    """A draft per row that has room for two tokens. The MTP layer gets each fed token's successor: for a prompt its own
    tokens, else the ones just chosen."""
    successors = [
        [] if each.is_done or len(each.chosen) + 2 > len(each.draws) else [*row[1 : len(row) - len(new) + 1], *new]
        for each, row, new in zip(batch, fed, news, strict=True)
    ]
    if not any(successors):
        return [None] * len(batch)
    return decoding.draft(successors, [states[: len(row)] for states, row in zip(hidden, successors, strict=True)])


def _batches(lengths: Sequence[int], batch_sequences: int) -> list[list[int]]:
    """Indices in batches of similar length, longest first, ties in the given order."""
    order = iter(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)))
    batches = []
    while batch := list(islice(order, batch_sequences)):
        batches.append(batch)
    return batches
