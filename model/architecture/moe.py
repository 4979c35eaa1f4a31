"""Mixture of experts of GLM-4.5/4.6: sigmoid router with selection bias, routed and shared experts.

Balancing is loss-free. Between `dispatch` and `combine` tokens are sorted by expert. There
`MixtureOfExperts.dispatcher` is the seam of expert parallelism: it may send them to the ranks that hold their experts
and back
(tasks/training/parallel/expert_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelRecipe, RouterBiasRule
from model.architecture.float32_products import linear_in_float32
from model.architecture.gated_mlp import GatedMlp, apply_grouped_mlp
from model.architecture.grouped_linear import grouped_linear


class Dispatched(NamedTuple):
    """Routed copies of tokens, sorted by expert (ties by token)."""

    tokens_RD: Tensor
    counts_E: Tensor
    """Copies per expert, int64."""
    order_R: Tensor
    """Which copy (t * K + k) each row is."""
    slots_TK: Tensor
    """The way back: the row that holds the k-th copy of token t."""


class MoeOutput(NamedTuple):
    hidden_BTD: Tensor
    balance_loss: Tensor
    """Sequence-level balance loss of this layer, a float32 scalar."""
    counts_E: Tensor


class _Gather(torch.autograd.Function):
    """Copy tokens to their rows. The backward pass gathers too: autograd's index_add is slow, and on a GPU not
    deterministic."""

    @staticmethod
    def forward(ctx, tokens_TD: Tensor, order_R: Tensor, slots_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slots_TK)
        return tokens_TD.index_select(0, order_R // slots_TK.shape[1])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slots_TK,) = ctx.saved_tensors
        return _sum_of_copies(grads[0], slots_TK), None, None


class _WeightedGather(torch.autograd.Function):
    """Sum over a token's copies of weight times row: out[t] = sum_k weights[t, k] * rows[slots[t, k]]."""

    @staticmethod
    def forward(ctx, rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor, slots_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, order_R, slots_TK)
        return _sum_of_copies(rows_RD, slots_TK, weights_TK)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_TK, order_R, slots_TK = ctx.saved_tensors
        grad_RD = grads[0].index_select(0, order_R // slots_TK.shape[1])
        grad_weights_TK = torch.linalg.vecdot(rows_RD, grad_RD)[slots_TK]
        return grad_RD.mul_(weights_TK.flatten()[order_R].unsqueeze(1)), grad_weights_TK, None, None


def _sum_of_copies(rows_RD: Tensor, slots_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """out[t] = sum_k weights[t, k] * rows[slots[t, k]], (T, D), added in float32."""
    if not torch.compiler.is_compiling():
        return F.embedding_bag(slots_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)
    # A compiler makes one kernel of this, which takes a ninth of the bag's time on an H200; run as it is, it would
    # hold every copy in float32.
    copies_TKD = rows_RD[slots_TK].float()
    if weights_TK is not None:
        copies_TKD = copies_TKD * weights_TK.float().unsqueeze(-1)
    return copies_TKD.sum(1).to(rows_RD.dtype)


def writes_by_comparing(tensor: Tensor) -> bool:
    """Whether what goes to given places is found by comparing or sorting instead of writing there. With deterministic
    algorithms an accelerator sorts before every such write (0.17 ms in a layer on an H200); a CPU writes."""
    return tensor.device.type != "cpu"


class _Chosen(torch.autograd.Function):
    """The scores of the chosen experts."""

    @staticmethod
    def forward(ctx, scores_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        ctx.save_for_backward(expert_ids_TK)
        ctx.num_experts = scores_TE.shape[1]
        return scores_TE.gather(1, expert_ids_TK)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (expert_ids_TK,) = ctx.saved_tensors
        if not writes_by_comparing(expert_ids_TK):
            zeros_TE = grads[0].new_zeros(expert_ids_TK.shape[0], ctx.num_experts)
            return zeros_TE.scatter_add_(1, expert_ids_TK, grads[0]), None
        return (_is_expert(expert_ids_TK, ctx.num_experts) * grads[0].unsqueeze(-1)).sum(1), None


def _is_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """(..., E): whether the number is that expert's."""
    return expert_ids.unsqueeze(-1) == torch.arange(num_experts, device=expert_ids.device)


def dispatch(tokens_TD: Tensor, expert_ids_TK: Tensor, num_experts: int) -> Dispatched:
    """Copy every token to its experts' rows and count the rows of each expert."""
    ids_R, order_R = expert_ids_TK.flatten().sort(stable=True)
    if writes_by_comparing(order_R):
        slots_R = order_R.argsort()
    else:
        slots_R = torch.empty_like(order_R)
        slots_R[order_R] = torch.arange(order_R.numel())
    slots_TK = slots_R.view_as(expert_ids_TK)
    # Not bincount: on a GPU it reads the highest id on the host, which waits for all kernels before it.
    ends_E = torch.searchsorted(ids_R, torch.arange(num_experts, device=ids_R.device), right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    return Dispatched(_Gather.apply(tokens_TD, order_R, slots_TK), counts_E, order_R, slots_TK)


def combine(rows_RD: Tensor, weights_TK: Tensor, dispatched: Dispatched) -> Tensor:
    """Bring the experts' rows back to their tokens, (T, D), weighted and summed over the K copies."""
    return _WeightedGather.apply(rows_RD, weights_TK.to(rows_RD.dtype), dispatched.order_R, dispatched.slots_TK)


class Dispatcher(Protocol):
    """Takes routed copies to the ranks of their experts and back. Rows after those of all experts are copies of gaps:
    no expert computes them, and what they hold is not read."""

    def dispatch(self) -> tuple[Tensor, Tensor]:
        """The rows to compute here, sorted by expert, and their number per expert held here."""
        ...

    def combine(self, rows_RD: Tensor) -> Tensor:
        """The experts' rows, in the order of the copies that were sent."""
        ...


class LocalDispatcher:
    """Every expert is on this rank."""

    def __init__(self, tokens_RD: Tensor, counts_E: Tensor) -> None:
        self._here = tokens_RD, counts_E

    def dispatch(self) -> tuple[Tensor, Tensor]:
        return self._here

    def combine(self, rows_RD: Tensor) -> Tensor:
        return rows_RD


class Router(nn.Module):
    """Scores experts in float32 whatever the dtype of the model. The bias affects which experts are selected, never
    their weights."""

    e_score_correction_bias: Tensor

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.num_experts_per_tok = recipe.num_experts_per_tok
        self.norm_topk_prob = recipe.norm_topk_prob
        self.routed_scaling_factor = recipe.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(recipe.n_routed_experts, recipe.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(recipe.n_routed_experts, dtype=torch.float32))
        self.record: Callable[[Tensor], None] | None = None
        """Takes the experts that each pass chose, (T, K) (model/architecture/routes.py)."""
        self.replayed_TK: Tensor | None = None
        """Experts to use in place of the chosen ones; -1 where the router chooses."""

    def _apply(self, fn, recurse: bool = True):
        # A cast to bfloat16 would merge neighbouring biases and re-route tokens (sglang #37133): only the device may
        # change.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(self.e_score_correction_bias.device)
        return self

    def forward(self, tokens_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expert numbers (T, K), their weights (T, K) and all sigmoid scores (T, E), the last two float32."""
        scores_TE = linear_in_float32(tokens_TD, self.weight).sigmoid()
        expert_ids_TK = (
            (scores_TE.detach() + self.e_score_correction_bias)
            .topk(self.num_experts_per_tok, dim=-1, sorted=False)
            .indices
        )
        if self.record is not None:
            self.record(expert_ids_TK)
        if self.replayed_TK is not None:
            expert_ids_TK = torch.where(self.replayed_TK < 0, expert_ids_TK, self.replayed_TK)
        weights_TK = _Chosen.apply(scores_TE, expert_ids_TK)
        if self.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return expert_ids_TK, weights_TK * self.routed_scaling_factor, scores_TE


class Experts(nn.Module):
    """All experts' matrices, stacked per kind. Gate and up are separate because Muon orthogonalises each on its own."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        num_experts, width, hidden = recipe.n_routed_experts, recipe.moe_intermediate_size, recipe.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        return apply_grouped_mlp(tokens_RD, self.gate_proj, self.up_proj, self.down_proj, counts_E)


class SeparateExperts(Experts):
    """Experts whose three products are made one after the other: with adapters, or in 4 bits."""

    def forward(self, tokens_RD: Tensor, counts_E: Tensor) -> Tensor:
        gate_RF, up_RF = (self.product(name, tokens_RD, counts_E) for name in ("gate_proj", "up_proj"))
        return self.product("down_proj", F.silu(gate_RF) * up_RF, counts_E)

    def product(self, name: str, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        """(R, O): each row times its expert's matrix of that name."""
        return grouped_linear(rows_RI, getattr(self, name), counts_E)


class MixtureOfExperts(nn.Module):
    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.gate = Router(recipe)
        self.experts = Experts(recipe)
        self.num_experts = recipe.n_routed_experts
        shared_width = recipe.moe_intermediate_size * recipe.n_shared_experts
        self.shared_experts = GatedMlp(recipe.hidden_size, shared_width) if shared_width else None
        self.dispatcher: Callable[[Tensor, Tensor], Dispatcher] = LocalDispatcher
        self.sum_over_parts: Callable[[Tensor], Tensor] | None = None
        """Sums a (B, E) tensor over the ranks that hold other positions of the same sequences; None where they are
        whole."""
        self.own_positions: Callable[[Tensor], Tensor] = _all_positions
        """From a (B, T) tensor of whole rows the positions whose hidden states are here."""

    def forward(self, hidden_BTD: Tensor, gaps_BT: Tensor | None = None) -> MoeOutput:
        """`gaps_BT` is true where whole rows hold no token: no expert computes such a position, and none counts it."""
        tokens_TD = hidden_BTD.flatten(0, 1)
        expert_ids_TK, weights_TK, scores_TE = self.gate(tokens_TD)
        gaps_BT = None if gaps_BT is None else self.own_positions(gaps_BT)
        if gaps_BT is not None:
            # Expert number E: their rows come after those of all experts, and products leave them out. What is in these
            # rows, in both directions, is masked.
            gaps_T1 = gaps_BT.reshape(-1, 1)
            expert_ids_TK = expert_ids_TK.masked_fill(gaps_T1, self.num_experts)
            tokens_TD, weights_TK = tokens_TD.masked_fill(gaps_T1, 0), weights_TK.masked_fill(gaps_T1, 0)
        dispatched = dispatch(tokens_TD, expert_ids_TK, self.num_experts)
        dispatcher = self.dispatcher(dispatched.tokens_RD, dispatched.counts_E)
        # Before the experts, so that it can be computed while the copies are exchanged.
        shared_BTD = None if self.shared_experts is None else self.shared_experts(hidden_BTD)
        rows_RD = dispatcher.combine(self.experts(*dispatcher.dispatch()))
        mixed_BTD = combine(rows_RD, weights_TK, dispatched).view_as(hidden_BTD)
        if gaps_BT is not None:
            mixed_BTD = mixed_BTD.masked_fill(gaps_BT.unsqueeze(-1), 0)
        if shared_BTD is not None:
            mixed_BTD = mixed_BTD + shared_BTD
        loss = sequence_balance_loss(
            scores_TE.view(*hidden_BTD.shape[:2], -1), expert_ids_TK.shape[1], self.sum_over_parts, gaps_BT
        )
        return MoeOutput(mixed_BTD, loss, dispatched.counts_E)


def _all_positions(rows_BT: Tensor) -> Tensor:
    return rows_BT


def sequence_balance_loss(
    scores_BTE: Tensor,
    num_experts_per_tok: int,
    sum_over_parts: Callable[[Tensor], Tensor] | None = None,
    gaps_BT: Tensor | None = None,
) -> Tensor:
    """Mean over sequences of sum_e f_e P_e (DeepSeek-V3 report, eq. 17-20): 1.0 at perfect balance, E / K at collapse.

    f_e is E/K times the share of positions whose K highest scores, without the selection bias, include expert e; P_e
    the mean normalised score. Only P carries gradient. Where T is a part of the positions, f is that of the whole
    sequence (`sum_over_parts`) and P the part's share: the results of all parts add up to the loss. A sequence ends
    where its gaps begin.
    """
    if not torch.is_grad_enabled():
        return scores_BTE.new_zeros(())
    num_experts = scores_BTE.shape[-1]
    chosen_BTK = scores_BTE.detach().topk(num_experts_per_tok, dim=-1, sorted=False).indices
    copies_BTK = torch.ones_like(chosen_BTK, dtype=scores_BTE.dtype)
    if gaps_BT is not None:
        copies_BTK = copies_BTK.masked_fill(gaps_BT.unsqueeze(-1), 0)
        scores_BTE = scores_BTE.masked_fill(gaps_BT.unsqueeze(-1), 0)
    if writes_by_comparing(copies_BTK):
        counts_BE = (_is_expert(chosen_BTK, num_experts) * copies_BTK.unsqueeze(-1)).sum((1, 2))
    else:
        counts_BE = scores_BTE.new_zeros(scores_BTE.shape[0], num_experts)
        counts_BE.scatter_add_(1, chosen_BTK.flatten(1), copies_BTK.flatten(1))
    if sum_over_parts is not None:
        counts_BE = sum_over_parts(counts_BE)
    num_positions_B1 = counts_BE.sum(-1, keepdim=True).clamp(min=1) / num_experts_per_tok
    share_BE = counts_BE * (num_experts / (num_experts_per_tok * num_positions_B1))
    mean_score_BE = (scores_BTE / (scores_BTE.sum(-1, keepdim=True) + 1e-20)).sum(1) / num_positions_B1
    return (share_BE * mean_score_BE).sum(-1).mean()


BY_SIGN = RouterBiasRule(kind="sign", max_bias=0.0)


@torch.no_grad()
def update_router_bias(model: nn.Module, expert_counts_LE: Tensor, rate: float, rule: RouterBiasRule = BY_SIGN) -> None:
    """Loss-free balancing, once per optimizer step: bias += rate * sign(mean count - count), or by the rule `ratio`
    rate * (1 - count / mean count); then within the rule's bound.

    `expert_counts_LE` are the integer token counts of the whole step, summed over micro-batches and data-parallel
    ranks, in the order of the model's MoE layers. Integers, because counts in bfloat16 flip the sign of the update
    (Megatron-LM #7081); the comparison multiplies by E instead of dividing the sum, so it is exact.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert expert_counts_LE.dtype == torch.int64, expert_counts_LE.dtype
    assert expert_counts_LE.shape[0] == len(routers), (expert_counts_LE.shape, len(routers))
    totals_L1 = expert_counts_LE.sum(-1, keepdim=True)
    missing_LE = totals_L1 - expert_counts_LE * expert_counts_LE.shape[1]
    moves_LE = missing_LE.sign() if rule.kind == "sign" else missing_LE.double() / totals_L1.clamp(min=1)
    for router, move_E in zip(routers, moves_LE, strict=True):
        router.e_score_correction_bias.add_(move_E.to(router.e_score_correction_bias), alpha=rate)
        if rule.max_bias:
            router.e_score_correction_bias.clamp_(-rule.max_bias, rule.max_bias)
