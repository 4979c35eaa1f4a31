"""Embedding and unembedding with their rows divided over the tensor ranks: rank r holds the r-th slice of the
vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model.architecture.losses import IGNORED, LanguageHead, vocabulary_chunks
from tasks.training.parallel.ranks import Axis
from tasks.training.parallel.tensor_collectives import gather_positions, sum_to_slices


class VocabularyParallelEmbedding(nn.Embedding):
    """Turns token ids of all positions into embeddings of this rank's slice of the positions."""

    def __init__(self, weight_VD: nn.Parameter, axis: Axis) -> None:
        super().__init__(weight_VD.shape[0], weight_VD.shape[1], _weight=weight_VD)
        self.weight = weight_VD
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        rows_BT = input - self.axis.rank * self.num_embeddings
        is_elsewhere_BT = (rows_BT < 0) | (rows_BT >= self.num_embeddings)
        embedded_BTD = F.embedding(rows_BT.masked_fill(is_elsewhere_BT, 0), self.weight)
        return sum_to_slices(embedded_BTD.masked_fill(is_elsewhere_BT.unsqueeze(-1), 0.0), self.axis)


class VocabularyParallelHead(LanguageHead):
    """Turns hidden states of this rank's slice into the loss over all positions, the same on every rank. No rank sees
    another's logits."""

    def __init__(self, weight_VD: nn.Parameter, axis: Axis) -> None:
        super().__init__(weight_VD.shape[1], 0)
        self.weight = weight_VD
        self.axis = axis

    def forward(
        self,
        hidden_BTD: Tensor,
        target_ids_BT: Tensor | None = None,
        target_weights_BT: Tensor | None = None,
        per_target: bool = False,
    ) -> Tensor:
        assert target_ids_BT is not None, "logits are never put together under tensor parallelism: give targets"
        if per_target:
            return self.log_probabilities(hidden_BTD, target_ids_BT)
        targets_T = target_ids_BT.flatten()
        is_kept_T = targets_T != IGNORED
        factors_T = is_kept_T.float() if target_weights_BT is None else is_kept_T * target_weights_BT.flatten().float()
        whole_BTD = gather_positions(hidden_BTD, target_ids_BT.shape[1], self.axis)
        total = _VocabularyCrossEntropy.apply(whole_BTD.flatten(0, 1), self.weight, targets_T, factors_T, self.axis)
        return total / is_kept_T.sum().clamp(min=1)

    @torch.no_grad()
    def log_probabilities(self, hidden_BTD: Tensor, target_ids_BT: Tensor) -> Tensor:
        whole_TD = gather_positions(hidden_BTD, target_ids_BT.shape[1], self.axis).flatten(0, 1)
        targets_T, weight_VD = target_ids_BT.flatten(), self.weight.float()
        pieces = []
        for rows in vocabulary_chunks(whole_TD.shape[0], weight_VD.shape[0], whole_TD.device.type):
            logits_CV = whole_TD[rows].float() @ weight_VD.t()
            pieces.append(_SoftmaxOverRanks(logits_CV, targets_T[rows], self.axis).log_probabilities_C)
        return torch.cat(pieces).mul_(targets_T != IGNORED).view_as(target_ids_BT)


class _SoftmaxOverRanks:
    """Softmax over logits whose columns are this rank's slice of the vocabulary: a chunk's maximum, sum and target
    logit are reduced over the ranks. These are three numbers per position: the maximum first, and then the sum and
    the target logit together."""

    def __init__(self, logits_CV: Tensor, targets_C: Tensor, axis: Axis) -> None:
        """Puts the exponentials where the logits are."""
        columns_C = targets_C - axis.rank * logits_CV.shape[1]
        self.is_own_C1 = ((columns_C >= 0) & (columns_C < logits_CV.shape[1])).unsqueeze(1)
        self.columns_C1 = columns_C.unsqueeze(1).masked_fill(~self.is_own_C1, 0)
        highest_C = logits_CV.amax(-1)
        dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=axis.group)
        logits_CV.sub_(highest_C.unsqueeze(1))
        target_C = logits_CV.gather(1, self.columns_C1).mul_(self.is_own_C1).squeeze(1)
        sums_2C = torch.stack([logits_CV.exp_().sum(-1), target_C])
        dist.all_reduce(sums_2C, group=axis.group)
        self.sums_C = sums_2C[0]
        self.log_probabilities_C = sums_2C[1] - sums_2C[0].log()


class _VocabularyCrossEntropy(torch.autograd.Function):
    """model/architecture/losses.py's fused loss on a slice of the vocabulary, by _SoftmaxOverRanks. The gradient of the
    hidden states is this rank's partial one."""

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, factors_T: Tensor, axis: Axis) -> Tensor:
        wants_grad = any(ctx.needs_input_grad[:2])
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_grad else None
        for rows in vocabulary_chunks(hidden_TD.shape[0], weight_VD.shape[0], hidden_TD.device.type):
            chunk_TD, factors_C = hidden_TD[rows], factors_T[rows]
            buffer_CV = (chunk_TD @ weight_VD.t()).float()
            softmax = _SoftmaxOverRanks(buffer_CV, targets_T[rows], axis)
            total -= (softmax.log_probabilities_C * factors_C).sum()
            if grad_hidden_TD is None or grad_weight_VD is None:
                continue
            buffer_CV.div_(softmax.sums_C.unsqueeze(1)).scatter_add_(1, softmax.columns_C1, -softmax.is_own_C1.float())
            grad_logits_CV = buffer_CV.mul_(factors_C.unsqueeze(1)).to(hidden_TD.dtype)
            torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_TD[rows])
            grad_weight_VD.add_(grad_logits_CV.t() @ chunk_TD)
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden_TD * scale.to(grad_hidden_TD.dtype),
            (grad_weight_VD * scale).to(grad_hidden_TD.dtype),
            None,
            None,
            None,
        )
