"""Decodes the sequences of one batch token by token: what an engine needs of a model.

Torch does it for every device and dtype, and is the reference. On a CPU in float32 the compiled pass does it
(`model.generation.kernel_decoding`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.architecture.kv_cache import KVCache, check_positions
from model.architecture.rotary import rotary_tables
from model.architecture.transformer import Glm4Moe
from model.generation.sampling import Chosen, Sampling, choose_tokens, describe_choice

POSITIONS_PER_PASS = 2048
"""Prompts are read in passes of this many positions per row."""


class Decoding(Protocol):
    """Rows are given for all sequences; an empty one leaves its sequence as it is."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence holds."""
        ...

    def extend(
        self,
        tokens: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
        *,
        keeps_hidden: bool,
    ) -> tuple[list[list[Chosen]], list[Tensor]]:
        """Add tokens to each sequence and choose what follows its last `len(draws)` ones, a draw each. Also returns the
        tokens' hidden states where drafts need them."""
        ...

    def draft(self, next_tokens: Sequence[Sequence[int]], hidden: Sequence[Tensor]) -> list[int | None]:
        """The token per sequence that the MTP layer expects after the last of the next tokens. It sees every token of a
        sequence but the first exactly once, in order, each with the hidden state of the one before it."""
        ...

    def cut(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after the given lengths; `draft` never saw them."""
        ...


class TorchDecoding:
    """Decodes by the model's own forward pass; rows are padded after their tokens."""

    def __init__(self, model: Glm4Moe, num_sequences: int, max_tokens: int) -> None:
        check_positions(model.recipe, max_tokens)
        self._model = model
        head = model.lm_head.weight
        num_layers = model.recipe.num_hidden_layers
        # One more than there are tokens: a full row is padded by a token where another row of the batch has a draft.
        self._cache, self._mtp_cache = (
            KVCache(model.recipe, num_sequences, max_tokens + 1, layers=layers, dtype=head.dtype, device=head.device)
            for layers in (range(num_layers), range(num_layers, num_layers + model.recipe.num_nextn_predict_layers))
        )

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def extend(
        self,
        tokens: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
        *,
        keeps_hidden: bool,
    ) -> tuple[list[list[Chosen]], list[Tensor]]:
        pieces: list[list[Tensor]] = [[] for _ in tokens]
        for start in range(0, max(len(row) for row in tokens), POSITIONS_PER_PASS):
            part = [row[start : start + POSITIONS_PER_PASS] for row in tokens]
            lengths = [length + len(row) for length, row in zip(self._cache.lengths, part, strict=True)]
            hidden_BTD = self._model.hidden_states(_padded(part, self._device), self._cache)
            self._cache.cut(lengths)
            for row, hidden_TD, kept in zip(part, hidden_BTD, pieces, strict=True):
                kept.append(hidden_TD[: len(row)])
        hidden = [torch.cat(kept) for kept in pieces]
        read_RD = torch.cat(
            [hidden_TD[len(hidden_TD) - len(drawn) :] for hidden_TD, drawn in zip(hidden, draws, strict=True)]
        )
        logits_RV = self._model.lm_head(read_RD[None])[0].float()
        draws_R = torch.tensor([draw for drawn in draws for draw in drawn], dtype=torch.float64)
        choices = iter(describe_choice(logits_RV, choose_tokens(logits_RV, sampling, draws_R), sampling))
        return [[next(choices) for _ in drawn] for drawn in draws], hidden if keeps_hidden else []

    def draft(self, next_tokens: Sequence[Sequence[int]], hidden: Sequence[Tensor]) -> list[int | None]:
        model, cache = self._model, self._mtp_cache
        lengths = [length + len(row) for length, row in zip(cache.lengths, next_tokens, strict=True)]
        embedded_BTD = model.model.embed_tokens(_padded(next_tokens, self._device))
        hidden_BTD = torch.nn.utils.rnn.pad_sequence(list(hidden), batch_first=True)
        num_new = embedded_BTD.shape[1]
        rotary = rotary_tables(cache.positions(num_new), model.recipe.rotary_dim, model.rope_theta)
        output = model.model.layers[-1](embedded_BTD, hidden_BTD, rotary, cache.visible_BTS(num_new), cache)
        cache.cut(lengths)
        last_BD = torch.stack(
            [row_TD[len(row) - 1] for row, row_TD in zip(next_tokens, output.hidden_BTD, strict=True)]
        )
        best = model.lm_head(last_BD[None])[0].argmax(-1).tolist()
        return [token_id if row else None for row, token_id in zip(next_tokens, best, strict=True)]

    def cut(self, lengths: Sequence[int]) -> None:
        self._cache.cut(lengths)

    @property
    def _device(self) -> torch.device:
        return self._model.lm_head.weight.device


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)
