"""Sampled answers as rows: prompt then answer, and how likely a model finds each token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.architecture.losses import IGNORED
from model.architecture.routes import free_routes, own_routes, recorded_routes, route_differences
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.parallel.micro_batch import MicroBatch

if TYPE_CHECKING:
    from model.architecture.transformer import Glm4Moe
    from tasks.training.policy.rollouts import Rollout


@dataclass(frozen=True)
class AnswerRows:
    """Rollouts as rows, filled up at the end to the longest: an answer does not see these gaps, which carry no loss and
    go to no expert."""

    token_ids_BT: Tensor
    target_ids_BT: Tensor
    """The answer's tokens, IGNORED elsewhere, also where a tool wrote."""
    rollout_log_probabilities_BT: Tensor
    """Log-probabilities of the targets when they were sampled."""
    routes_LBTK: Tensor | None = None
    """The experts with which they were sampled; None where these are not kept."""
    replays: bool = False
    """Whether training computes with those experts."""
    gaps_BT: Tensor | None = None
    """True after a row's last token; None where every row is full."""
    num_parts: int = 1
    """Ranks can divide the positions into so many equal parts."""
    max_batch_tokens: int = 0
    """Positions of a micro-batch, which is filled with rows of alike lengths; 0: with a number of rows in turn."""

    @property
    def is_answer_BT(self) -> Tensor:
        return self.target_ids_BT != IGNORED

    def select(self, numbers: Tensor | slice) -> AnswerRows:
        """The rows with these numbers."""
        return self._cut((numbers,))

    def _cut(self, index: tuple[Tensor | slice, ...]) -> AnswerRows:
        """Rows, or rows and positions."""
        gaps_BT = None if self.gaps_BT is None else self.gaps_BT[index]
        return replace(
            self,
            token_ids_BT=self.token_ids_BT[index],
            target_ids_BT=self.target_ids_BT[index],
            rollout_log_probabilities_BT=self.rollout_log_probabilities_BT[index],
            routes_LBTK=None if self.routes_LBTK is None else self.routes_LBTK[:, *index],
            gaps_BT=gaps_BT,
        )

    def batches(self, numbers: Tensor, num_sequences: int) -> list[Tensor]:
        """The numbers of these rows by micro-batch: `num_sequences` in turn, or from the longest on as many as
        max_batch_tokens hold at the length of their longest, but at least one."""
        if not self.max_batch_tokens:
            return [each for each in numbers.split(num_sequences) if len(each)]
        lengths_B = self._lengths_B[numbers]
        order_B = lengths_B.argsort(descending=True, stable=True)
        ordered, lengths, batches = numbers[order_B], lengths_B[order_B].tolist(), []
        while lengths:
            size = max(1, self.max_batch_tokens // self._width_of(lengths[0]))
            batches.append(ordered[:size])
            ordered, lengths = ordered[size:], lengths[size:]
        return batches

    def batch(self, numbers: Tensor) -> AnswerRows:
        """The rows of a micro-batch, where max_batch_tokens fill it no wider than the longest of them."""
        own = self.select(numbers)
        return (
            own._cut((slice(None), slice(self._width_of(int(own._lengths_B.max()))))) if self.max_batch_tokens else own
        )

    @property
    def width(self) -> int:
        return self.token_ids_BT.shape[1]

    @property
    def _lengths_B(self) -> Tensor:
        if self.gaps_BT is None:
            return torch.full((len(self.token_ids_BT),), self.width, device=self.token_ids_BT.device)
        return (~self.gaps_BT).sum(1)

    def _width_of(self, length: int) -> int:
        return -(-length // self.num_parts) * self.num_parts

    @property
    def replayed_LBTK(self) -> Tensor | None:
        return self.routes_LBTK if self.replays else None

    def micro_batch(self, *, is_filler: bool, **settings: Any) -> MicroBatch:
        """These rows as a micro-batch with further `settings` of it; a filler has no targets."""
        targets_BT = torch.full_like(self.target_ids_BT, IGNORED) if is_filler else self.target_ids_BT
        segments_BT = torch.zeros_like(self.token_ids_BT)
        return MicroBatch(
            self.token_ids_BT,
            targets_BT,
            segments_BT if self.gaps_BT is None else segments_BT.masked_fill(self.gaps_BT, NO_SEGMENT),
            is_segmented=False,
            has_gaps=self.gaps_BT is not None,
            is_filler=is_filler,
            routes_LBTK=self.replayed_LBTK,
            **settings,
        )


def lay_out(
    rollouts: Sequence[Rollout],
    device: torch.device,
    replays: bool = False,
    num_parts: int = 1,
    max_batch_tokens: int = 0,
) -> AnswerRows:
    """One row per rollout, prompt then answer; see AnswerRows for the rest."""
    longest = max(len(rollout.prompt_ids) + len(rollout.answer_ids) for rollout in rollouts) - 1
    width = -(-longest // num_parts) * num_parts
    token_ids_BT = torch.zeros(len(rollouts), width, dtype=torch.int64)
    target_ids_BT = torch.full((len(rollouts), width), IGNORED)
    log_probabilities_BT = torch.zeros(len(rollouts), width)
    gaps_BT = torch.ones(len(rollouts), width, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        sequence = torch.tensor([*rollout.prompt_ids, *rollout.answer_ids])
        answer = slice(len(rollout.prompt_ids) - 1, len(sequence) - 1)
        token_ids_BT[row, : len(sequence) - 1] = sequence[:-1]
        gaps_BT[row, : len(sequence) - 1] = False
        target_ids_BT[row, answer] = sequence[len(rollout.prompt_ids) :]
        log_probabilities_BT[row, answer] = torch.tensor(rollout.log_probabilities)
        for start, stop in rollout.tool_spans:
            target_ids_BT[row, answer][start:stop] = IGNORED
    return AnswerRows(
        token_ids_BT.to(device),
        target_ids_BT.to(device),
        log_probabilities_BT.to(device),
        _lay_out_routes([rollout.routes_LTK for rollout in rollouts], width, device),
        replays,
        gaps_BT.to(device) if gaps_BT.any() else None,
        num_parts,
        max_batch_tokens,
    )


def sequence_rows(
    sequences: Sequence[Sequence[int]], device: torch.device, num_parts: int = 1, max_batch_tokens: int = 0
) -> AnswerRows:
    """One row per sequence, whole and without targets: a scalar head reads them."""
    width = -(-max(len(sequence) for sequence in sequences) // num_parts) * num_parts
    token_ids_BT = torch.zeros(len(sequences), width, dtype=torch.int64)
    gaps_BT = torch.ones(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        token_ids_BT[row, : len(sequence)] = torch.tensor(sequence)
        gaps_BT[row, : len(sequence)] = False
    return AnswerRows(
        token_ids_BT.to(device),
        torch.full_like(token_ids_BT, IGNORED, device=device),
        torch.zeros(token_ids_BT.shape, device=device),
        gaps_BT=gaps_BT.to(device) if gaps_BT.any() else None,
        num_parts=num_parts,
        max_batch_tokens=max_batch_tokens,
    )


def _lay_out_routes(routes: Sequence[Tensor | None], width: int, device: torch.device) -> Tensor | None:
    kept = [each for each in routes if each is not None]
    if not kept:
        return None
    num_layers, _, num_experts = kept[0].shape
    routes_LBTK = free_routes(num_layers, len(kept), width, num_experts)
    for row, routes_LTK in enumerate(kept):
        routes_LBTK[:, row, : routes_LTK.shape[1]] = routes_LTK
    return routes_LBTK.to(device)


class RouteComparison:
    """Counts routes of the rollout that the trainer's routers do not choose."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the ranks': NCCL adds nothing that is in host memory."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, layers: Sequence[nn.Module], chosen: Sequence[Tensor], kept_LBTK: Tensor) -> None:
        """What each router of the trunk's layers that is here chose, (B x T, K), beside what it chose in the rollout,
        of whole rows."""
        for (_, kept_TK), chosen_TK in zip(own_routes(layers, kept_LBTK), chosen, strict=True):
            self.counts += torch.stack(route_differences(chosen_TK, kept_TK))

    def share(self) -> float:
        """Over all ranks, of which no two computed the same routes."""
        counts = self.counts.clone()
        if dist.is_initialized():
            dist.all_reduce(counts)
        return int(counts[0]) / max(1, int(counts[1]))


@torch.no_grad()
def target_log_probabilities(
    model: Glm4Moe, rows: AnswerRows, temperature: float, num_sequences: int, comparison: RouteComparison | None = None
) -> Tensor:
    """log p(target) under the weights about to be trained, (B, T), at the temperature of the sampling. `comparison`
    counts where the routers choose otherwise than in the rollout."""
    whole_BT = torch.zeros_like(rows.rollout_log_probabilities_BT)
    for numbers in rows.batches(torch.arange(len(whole_BT), device=whole_BT.device), num_sequences):
        own = rows.batch(numbers)
        with nullcontext([]) if comparison is None else recorded_routes(model.trunk_layers) as recorded:
            hidden_BTD = model.hidden_states(own.token_ids_BT, routes_LBTK=own.replayed_LBTK, gaps_BT=own.gaps_BT)
        if comparison is not None and own.routes_LBTK is not None:
            comparison.add(model.trunk_layers, recorded, own.routes_LBTK)
        whole_BT[numbers, : own.width] = model.lm_head.log_probabilities(hidden_BTD / temperature, own.target_ids_BT)
    return whole_BT
