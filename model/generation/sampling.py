"""Chooses a next token from logits, and keeps the figures of the choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class NonFiniteLogitsError(ValueError):
    """Nothing can be drawn from NaN or infinity."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite: its weights are broken, load others")


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. Temperature 0 is greedy, `top_p` 1.0 keeps all tokens; `seed` and a prompt's index
    decide its draws, so the batch size does not change what is sampled."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    first_index: int = 0
    """Index of the call's first prompt: a call for some of the prompts draws for them as a call for all does."""
    keeps_routes: bool = False
    """Whether the experts of every token are returned."""
    is_speculative: bool = False
    """The MTP layer drafts a token, and the trunk checks it in the pass of the token before it: the same tokens, in
    fewer passes where drafts are right."""

    ends: Callable[[Sequence[int]], bool] | None = None
    """Whether a continuation ends with the tokens chosen so far, as where its text holds a stop text."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, is {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or positive, is {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], is {self.top_p}")


class Chosen(NamedTuple):
    """A next token; the numbers are described at `model.generation.generation.Generation`."""

    token_id: int
    log_probability: float
    sampled_log_probability: float
    top2_margin: float


def choose_tokens(logits_BV: Tensor, sampling: Sampling, draws_B: Tensor) -> Tensor:
    """The next token per row: the best one, or the one that a draw from [0, 1) falls on within the smallest set of
    tokens that holds `top_p` of the mass. It is drawn on the CPU: a GPU sums in no fixed order (torch.cumsum)."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV.cpu() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
        mass_before_BV = sorted_BV.cumsum(-1) - sorted_BV
        sorted_BV.masked_fill_(mass_before_BV >= sampling.top_p, 0.0)
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter_(1, order_BV, sorted_BV)
    mass_BV = probabilities_BV.double().cumsum(-1)
    if not bool(mass_BV[:, -1].isfinite().all()):
        raise NonFiniteLogitsError
    # To the right of equal masses, so that a token without mass is never hit; a draw below 1 never reaches past the
    # last with mass.
    chosen_B = torch.searchsorted(mass_BV, draws_B.double()[:, None] * mass_BV[:, -1:], right=True)[:, 0]
    return chosen_B.to(logits_BV.device)


def describe_choice(logits_BV: Tensor, chosen_B: Tensor, sampling: Sampling) -> list[Chosen]:
    """The chosen tokens with their numbers, one per row."""
    top_B2 = logits_BV.topk(2, dim=-1).values
    log_probabilities_B = sampled_B = _log_probabilities(logits_BV, chosen_B)
    if sampling.temperature not in (0.0, 1.0):
        sampled_B = _log_probabilities(logits_BV / sampling.temperature, chosen_B)
    columns = (chosen_B, log_probabilities_B, sampled_B, top_B2[:, 0] - top_B2[:, 1])
    return [Chosen(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _log_probabilities(logits_BV: Tensor, chosen_B: Tensor) -> Tensor:
    return logits_BV.gather(1, chosen_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
