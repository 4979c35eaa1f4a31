"""Decodes the sequences of one batch token by token: what an engine needs of a model.

Torch does it for every device and dtype, and is the reference. On a CPU in float32 the compiled pass does it
(`model.generation.kernel_decoding`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from configs.schema import ModelRecipe
from model.architecture.kv_cache import KVCache, check_positions
from model.architecture.rotary import rotary_tables
from model.architecture.routes import free_routes, recorded_routes
from model.architecture.transformer import Glm4Moe
from model.generation.sampling import Chosen, Sampling, choose_tokens, describe_choice

POSITIONS_PER_PASS = 2048
"""Prompts are read in passes of this many positions per row."""


class Decoding(Protocol):
    """Rows are given for all sequences; an empty one leaves its sequence as it is."""

    routes_LBTK: Tensor
    """The experts of each sequence's tokens (model/architecture/routes.py), T being `max_tokens`, where they are kept,
    else of no position."""

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

    def __init__(self, model: Glm4Moe, num_sequences: int, max_tokens: int, *, keeps_routes: bool = False) -> None:
        check_positions(model.recipe, max_tokens)
        self._model = model
        self.routes_LBTK = empty_routes(model.recipe, num_sequences, max_tokens, keeps_routes)
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
            hidden_BTD = self._read(part)
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

    def _read(self, part: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states of further tokens, (B, T, D)."""
        token_ids_BT = _padded(part, self._device)
        if not self.routes_LBTK.numel():
            return self._model.hidden_states(token_ids_BT, self._cache)
        starts = list(self._cache.lengths)
        with recorded_routes(self._model.trunk_layers) as recorded:
            hidden_BTD = self._model.hidden_states(token_ids_BT, self._cache)
        for layer, chosen_TK in enumerate(recorded):
            chosen_BTK = chosen_TK.view(*token_ids_BT.shape, -1).to(self.routes_LBTK)
            for row, (start, tokens) in enumerate(zip(starts, part, strict=True)):
                self.routes_LBTK[layer, row, start : start + len(tokens)] = chosen_BTK[row, : len(tokens)]
        return hidden_BTD

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


def empty_routes(recipe: ModelRecipe, num_sequences: int, max_tokens: int, keeps_routes: bool) -> Tensor:
    """Where the routes of a batch are written."""
    num_layers = recipe.num_hidden_layers - recipe.first_k_dense_replace
    return free_routes(num_layers, num_sequences, max_tokens * keeps_routes, recipe.num_experts_per_tok)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)
