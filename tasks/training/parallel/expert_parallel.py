"""Expert parallelism: a rank holds n_routed_experts / expert_parallel experts of every layer.

Tokens are sent to the ranks of their experts, and the outputs come back. The exchange is exact and uneven: ranks
first exchange how many copies come for which expert, then send them. Nothing is dropped or padded. A rank whose
experts nobody chose takes part with no rows. A rank routes its own tokens among all experts, so counts for loss-free
balancing are those of its tokens. Summed over the ranks they equal the counts of one process.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model.architecture.moe import MixtureOfExperts
from tasks.training.parallel.all_to_all import Exchange, exchange_rows
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.shards import Shard, own_part

EXPERTS = Shard(axis="expert", dim=0)


def divide_experts(model: nn.Module, ranks: Ranks, *, is_overlapped: bool) -> None:
    """Keep this rank's experts of every layer and send tokens to where theirs are; before the optimizer is built.

    DeepSpeed sums their gradients over `ranks.expert_data` only, and ZeRO 3 divides their weights there. Frozen experts
    beside what is trained are none of its business.
    `is_overlapped`: the shared expert is computed while tokens are exchanged.
    """
    if ranks.expert.size == 1:
        return
    from tasks.training.parallel.deepspeed_experts import ExpertGroups

    groups = ExpertGroups(ranks)
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    are_trained = any(each.requires_grad for mixture in mixtures for each in mixture.experts.parameters())
    are_marked = are_trained or not any(each.requires_grad for each in model.parameters())
    for mixture in mixtures:
        for name, whole in list(mixture.experts.named_parameters()):
            part = nn.Parameter(own_part(whole.data, EXPERTS, ranks).clone(), whole.requires_grad)
            part.shard = EXPERTS  # pyright: ignore[reportAttributeAccessIssue]
            if are_marked:
                groups.mark_expert(part)
            setattr(mixture.experts, name, part)
        mixture.dispatcher = partial(RankDispatcher, axis=ranks.expert, is_overlapped=is_overlapped)
        groups.num_experts = mixture.num_experts
    if are_marked:
        model.add_module("expert_groups", groups)


class RankDispatcher:
    """Sends copies, sorted by expert, to the ranks that hold their experts, and their rows back."""

    def __init__(self, tokens_RD: Tensor, counts_E: Tensor, *, axis: Axis, is_overlapped: bool) -> None:
        assert axis.group is not None, axis
        self._group = axis.group
        sent_PE = counts_E.view(axis.size, -1)
        received_PE = torch.empty_like(sent_PE)
        dist.all_to_all_single(received_PE, sent_PE, group=axis.group)
        self._received_PE = received_PE
        self._sent, self._received = torch.stack([sent_PE.sum(1), received_PE.sum(1)]).tolist()
        self._exchange = Exchange(self._sent, self._received, axis.group)
        self._num_unsent = tokens_RD.shape[0] - sum(self._sent)  # copies of gaps, the last rows
        self._rows_RD = self._exchange.start(tokens_RD[: sum(self._sent)])
        self._is_here = not is_overlapped
        if self._is_here:
            self._rows_RD = self._exchange.finish(self._rows_RD)

    def dispatch(self) -> tuple[Tensor, Tensor]:
        """Received rows are sorted by rank, then by expert; experts need them sorted by expert."""
        num_ranks, num_experts = self._received_PE.shape
        experts_PE = torch.arange(num_experts, device=self._received_PE.device).repeat(num_ranks)
        expert_ids_R = experts_PE.repeat_interleave(self._received_PE.flatten(), output_size=sum(self._received))
        self._by_expert_R = expert_ids_R.argsort(stable=True)
        self._by_rank_R = torch.empty_like(self._by_expert_R)
        self._by_rank_R[self._by_expert_R] = torch.arange(self._by_expert_R.numel(), device=self._by_expert_R.device)
        rows_RD = self._rows_RD if self._is_here else self._exchange.finish(self._rows_RD)
        return _reorder(rows_RD, self._by_expert_R, self._by_rank_R), self._received_PE.sum(0)

    def combine(self, rows_RD: Tensor) -> Tensor:
        rows_RD = _reorder(rows_RD, self._by_rank_R, self._by_expert_R)
        rows_RD = exchange_rows(rows_RD, self._received, self._sent, self._group)
        return F.pad(rows_RD, (0, 0, 0, self._num_unsent)) if self._num_unsent else rows_RD


class _Reorder(torch.autograd.Function):
    """A permutation; the backward pass is the other one, without the scattered sums of autograd's index_select."""

    @staticmethod
    def forward(ctx, rows_RD: Tensor, order_R: Tensor, way_back_R: Tensor) -> Tensor:
        ctx.save_for_backward(way_back_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (way_back_R,) = ctx.saved_tensors
        return grads[0].index_select(0, way_back_R), None, None


def _reorder(rows_RD: Tensor, order_R: Tensor, way_back_R: Tensor) -> Tensor:
    return cast(Tensor, _Reorder.apply(rows_RD, order_R, way_back_R))
