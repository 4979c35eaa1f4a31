"""Generation and scoring in this process: prompts as token ids in, tokens with their log-probabilities out.

`InProcessEngine` is one implementation of the engine protocol (`generate`, `score`) that evaluation, rollouts, chat and the smoke test use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from model.kv_cache import KVCache
from model.losses import IGNORED
from model.transformer import Glm4Moe


class NonFiniteLogitsError(ValueError):
    """Nothing can be drawn from NaN or infinity."""


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. Temperature 0 is greedy, `top_p` 1.0 keeps all tokens; `seed` and a prompt's place in the call decide its
    draws, so the size of a batch samples nothing else."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, is {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, is {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], is {self.top_p}")


@dataclass(frozen=True)
class Generation:
    """One entry per prompt, each as long as its continuation; a stop token that ended one is its last token."""

    token_ids: list[list[int]]
    log_probabilities: list[list[float]]
    """Under the model itself (temperature 1, all tokens), whatever the sampling, so that they compare with `score`."""
    sampled_log_probabilities: list[list[float]]
    """Under the model at the sampling's temperature, all tokens: the ratio of a policy gradient divides by it. As above if greedy."""
    top2_margins: list[list[float]]
    """Logit of the best token minus that of the second best: where it is small, rounding decides a greedy step."""
    weights_version: str


class _Continuation(NamedTuple):
    """Of one prompt, what `Generation` holds of all."""

    token_ids: list[int]
    log_probabilities: list[float]
    sampled_log_probabilities: list[float]
    top2_margins: list[float]


class InProcessEngine:
    """A loaded model that generates and scores in batches of at most `batch_sequences` sequences of similar length."""

    def __init__(self, model: Glm4Moe, *, weights_version: str, batch_sequences: int) -> None:
        self.model = model.eval()
        self.weights_version = weights_version
        self.batch_sequences = batch_sequences

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, weights_version: str) -> Generation:
        """Continue every prompt; refuses to answer for weights other than those it holds."""
        self._check_version(weights_version)
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty: give at least one token")
        # Drawn on the CPU for the whole call: the same numbers on every device and whatever the batches.
        draws_PT = torch.rand(len(prompts), sampling.max_new_tokens, generator=torch.Generator().manual_seed(sampling.seed))
        continuations = [_Continuation([], [], [], [])] * len(prompts)
        for members in _batches([len(prompt) for prompt in prompts], self.batch_sequences):
            batch = [prompts[member] for member in members]
            for member, continuation in zip(members, self._continue(batch, sampling, draws_PT[members].to(self._device)), strict=True):
                continuations[member] = continuation
        return Generation(
            [each.token_ids for each in continuations], [each.log_probabilities for each in continuations],
            [each.sampled_log_probabilities for each in continuations], [each.top2_margins for each in continuations], weights_version,
        )  # fmt: skip

    @torch.inference_mode()
    def score(self, token_id_sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token i | tokens before it) for i >= 1: one number less than the sequence has tokens."""
        scores: list[list[float]] = [[] for _ in token_id_sequences]
        self._check_length(max((len(sequence) for sequence in token_id_sequences), default=0))
        for members in _batches([len(sequence) for sequence in token_id_sequences], self.batch_sequences):
            width = max(len(token_id_sequences[member]) for member in members)
            if width < 2:
                continue
            # Padding behind a sequence is invisible to it: attention is causal.
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

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def _check_version(self, weights_version: str) -> None:
        if weights_version != self.weights_version:
            raise ValueError(
                f"weights version {weights_version!r} was asked for, this engine holds {self.weights_version!r}: load that one"
            )

    def _check_length(self, num_tokens: int) -> None:
        limit = self.model.recipe.max_position_embeddings
        if num_tokens > limit:
            raise ValueError(f"a sequence of {num_tokens} tokens exceeds max_position_embeddings ({limit}): cut it")

    @torch.inference_mode()
    def _continue(self, prompts: Sequence[Sequence[int]], sampling: Sampling, draws_BT: Tensor) -> list[_Continuation]:
        """Of one batch; prompts are padded on the left to one length."""
        width = max(len(prompt) for prompt in prompts)
        num_padding_B = torch.tensor([width - len(prompt) for prompt in prompts], device=self._device)
        token_ids_BT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self._device)
        cache = KVCache(
            self.model.recipe,
            len(prompts),
            width + sampling.max_new_tokens,
            num_padding_B=num_padding_B if bool(num_padding_B.any()) else None,
            dtype=self.model.lm_head.weight.dtype,
            device=self._device,
        )
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        is_done_B = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        lengths_B = torch.zeros(len(prompts), dtype=torch.int64, device=self._device)
        steps = []
        for draws_B in draws_BT.unbind(1):
            hidden_B1D = self.model.hidden_states(token_ids_BT, cache)[:, -1:]
            logits_BV = self.model.lm_head(hidden_B1D)[:, 0].float()
            chosen_B = choose_tokens(logits_BV, sampling, draws_B)
            top_B2 = logits_BV.topk(2, dim=-1).values
            log_probabilities_B = sampled_B = _log_probabilities(logits_BV, chosen_B)
            if sampling.temperature not in (0.0, 1.0):
                sampled_B = _log_probabilities(logits_BV / sampling.temperature, chosen_B)
            steps.append((chosen_B, log_probabilities_B, sampled_B, top_B2[:, 0] - top_B2[:, 1]))
            lengths_B += ~is_done_B
            is_done_B |= torch.isin(chosen_B, stops)
            if bool(is_done_B.all()):
                break
            token_ids_BT = chosen_B[:, None]
        columns = [torch.stack(column, dim=1).tolist() for column in zip(*steps, strict=True)]
        return [
            _Continuation(tokens[:length], log_probabilities[:length], sampled[:length], margins[:length])
            for length, tokens, log_probabilities, sampled, margins in zip(lengths_B.tolist(), *columns, strict=True)
        ]


def _log_probabilities(logits_BV: Tensor, chosen_B: Tensor) -> Tensor:
    return logits_BV.gather(1, chosen_B[:, None])[:, 0] - logits_BV.logsumexp(-1)


def choose_tokens(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """The next token per row: the best one, or the one that a draw from [0, 1) falls on within the smallest set of tokens that holds
    `top_p` of the mass."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
        mass_before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV.masked_fill_(mass_before_BV >= sampling.top_p, 0.0)
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter_(1, order_BV, sorted_BV)
    mass_BV = probabilities_BV.double().cumsum(-1)
    if not bool(mass_BV[:, -1].isfinite().all()):
        raise NonFiniteLogitsError("the model's logits are not finite: its weights are broken, load others")
    # To the right of equal masses, so that a token without mass is never hit; a draw below 1 never reaches past the last with mass.
    return torch.searchsorted(mass_BV, draws_B.double()[:, None] * mass_BV[:, -1:], right=True)[:, 0]


def _batches(lengths: Sequence[int], batch_sequences: int) -> list[list[int]]:
    """Indices in batches of similar length, longest first, ties in the given order."""
    order = iter(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)))
    batches = []
    while batch := list(islice(order, batch_sequences)):
        batches.append(batch)
    return batches
