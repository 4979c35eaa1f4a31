"""Computes cross-entropy straight from hidden states; it never holds the logits of more than a chunk of tokens."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.architecture.counts import logits_per_chunk
from model.architecture.float32_products import add_product
from model.kernels import elementwise_kernels

IGNORED = -100
"""Target that carries no loss."""
Chunk = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""From a chunk's logits, target columns and factors, and whether gradients are wanted: losses, gradient of the
logits."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of factor x -log softmax(hidden W^T)[target]. The gradients are computed in the forward pass, chunk by chunk,
    while the logits exist; the backward pass only scales them. `factors_T` carries no gradient and is 0 where the
    target is not kept."""

    @staticmethod
    def forward(
        ctx, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, factors_T: Tensor, losses_and_gradient: Chunk
    ) -> Tensor:
        wants_grad = any(ctx.needs_input_grad[:2])
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_grad else None
        chunks = vocabulary_chunks(hidden_TD.shape[0], weight_VD.shape[0], hidden_TD.device.type)
        # One buffer for all chunks, of logits and then of their gradient: memory traffic is the cost here.
        buffer_CV = hidden_TD.new_empty(chunks[0].stop if chunks else 0, weight_VD.shape[0])
        for rows in chunks:
            chunk_TD, factors_C = hidden_TD[rows], factors_T[rows]
            logits_CV = torch.mm(chunk_TD, weight_VD.t(), out=buffer_CV[: chunk_TD.shape[0]])
            losses_C, grad_logits_CV = losses_and_gradient(
                logits_CV, targets_T[rows].clamp(min=0), factors_C, wants_grad
            )
            total += (losses_C * factors_C).sum()
            if grad_hidden_TD is None or grad_weight_VD is None:
                continue
            torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_TD[rows])
            add_product(grad_weight_VD, grad_logits_CV.t(), chunk_TD)
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return (
            grad_hidden_TD * grads[0].to(grad_hidden_TD.dtype),
            (grad_weight_VD * grads[0]).to(grad_hidden_TD.dtype),
            None,
            None,
            None,
        )


def losses_and_gradient(
    logits_CV: Tensor, columns_C: Tensor, factors_C: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)[column] per row, and with gradients factor * (softmax - one-hot(column)) where the logits
    were."""
    if elementwise_kernels.fits(logits_CV):
        return elementwise_kernels.softmax_losses(logits_CV, columns_C, factors_C if wants_grad else None), logits_CV
    columns_C1 = columns_C.unsqueeze(1)
    if torch.compiler.is_compiling():
        return _compiled_losses(logits_CV, columns_C1, factors_C, wants_grad)
    log_probabilities_CV = logits_CV.float()
    torch.log_softmax(log_probabilities_CV, -1, out=log_probabilities_CV)
    losses_C = -log_probabilities_CV.gather(1, columns_C1).squeeze(1)
    if not wants_grad:
        return losses_C, logits_CV
    log_probabilities_CV.exp_().scatter_add_(1, columns_C1, torch.full_like(columns_C1, -1.0, dtype=torch.float32))
    return losses_C, log_probabilities_CV.mul_(factors_C.unsqueeze(1)).to(logits_CV.dtype)


def _compiled_losses(
    logits_CV: Tensor, columns_C1: Tensor, factors_C: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor]:
    """The same without writing in place: a compiler makes one kernel of it, which holds nothing in between."""
    log_probabilities_CV = logits_CV.float().log_softmax(-1)
    losses_C = -log_probabilities_CV.gather(1, columns_C1).squeeze(1)
    if not wants_grad:
        return losses_C, logits_CV
    is_target_CV = columns_C1 == torch.arange(logits_CV.shape[1], device=logits_CV.device)
    return losses_C, ((log_probabilities_CV.exp() - is_target_CV.float()) * factors_C.unsqueeze(1)).to(logits_CV.dtype)


def vocabulary_chunks(num_tokens: int, vocab_size: int, device_type: str = "cpu") -> list[slice]:
    """Slices of the tokens whose logits are held at once."""
    size = max(1, logits_per_chunk(device_type) // vocab_size)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


class LanguageHead(nn.Module):
    """The unembedding, shared by the trunk and the MTP layer: logits, losses or log-probabilities of hidden states."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.losses_and_gradient: Chunk = losses_and_gradient
        """Of a chunk of logits; tasks/training/parallel/compiled_layers.py replaces it by its compiled self."""

    def forward(
        self,
        hidden_BTD: Tensor,
        target_ids_BT: Tensor | None = None,
        target_weights_BT: Tensor | None = None,
        per_target: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) in the model's dtype; with targets the mean cross-entropy over the targets that are kept
        (not -100), a float32 scalar that is 0 where none is. Weights multiply each target's term and not the number
        that the mean divides by. `per_target`: `log_probabilities` instead, in a pass for which ZeRO 3 gathers the
        weight."""
        if target_ids_BT is None:
            return hidden_BTD @ self.weight.t()
        if per_target:
            return self.log_probabilities(hidden_BTD, target_ids_BT)
        targets_T = target_ids_BT.flatten()
        is_kept_T = targets_T != IGNORED
        factors_T = is_kept_T.float() if target_weights_BT is None else is_kept_T * target_weights_BT.flatten().float()
        hidden_TD, num_kept = hidden_BTD.flatten(0, 1), is_kept_T.sum().clamp(min=1)
        if hidden_TD.device.type == "cpu" and not bool(factors_T.all()):
            # Many rows are mostly prompt and padding: skip those positions. Not on a GPU, which would have to wait for
            # their number.
            rows_R = factors_T.nonzero().flatten()
            hidden_TD, targets_T, factors_T = hidden_TD.index_select(0, rows_R), targets_T[rows_R], factors_T[rows_R]
        total = _LinearCrossEntropy.apply(hidden_TD, self.weight, targets_T, factors_T, self.losses_and_gradient)
        return total / num_kept

    @torch.no_grad()
    def log_probabilities(self, hidden_BTD: Tensor, target_ids_BT: Tensor) -> Tensor:
        """log p(target) per position, float32 (B, T), from logits in float32 whatever the model computes in: in
        bfloat16 logits near 10 are rounded to 1/16. 0 where the target is -100."""
        hidden_TD, targets_T, weight_VD = hidden_BTD.flatten(0, 1), target_ids_BT.flatten(), self.weight.float()
        pieces = []
        for rows in vocabulary_chunks(hidden_TD.shape[0], weight_VD.shape[0], hidden_TD.device.type):
            logits_CV = hidden_TD[rows].float() @ weight_VD.t()
            columns_C1 = targets_T[rows].clamp(min=0).unsqueeze(1)
            pieces.append(logits_CV.gather(1, columns_C1).squeeze(1) - logits_CV.logsumexp(-1))
        return torch.cat(pieces).mul_(targets_T != IGNORED).view_as(target_ids_BT)
