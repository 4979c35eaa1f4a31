"""Multiplies rows that are sorted by expert with their expert's matrix, and rows with a matrix in 4 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.architecture.four_bit import FourBitMatrices
from model.kernels.cpu_products import mkl_products


class _GroupedLinear(torch.autograd.Function):
    """Frozen matrices get no gradient: for adapters that is a third of the work and all of the memory."""

    @staticmethod
    @mkl_products()
    def forward(ctx, rows_RI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])
        for expert, rows in expert_rows(counts):
            torch.mm(rows_RI[rows], weight_EOI[expert].t(), out=out_RO[rows])
        ctx.save_for_backward(rows_RI if weight_EOI.requires_grad else None, weight_EOI)
        ctx.counts = counts
        return out_RO

    @staticmethod
    @mkl_products()
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RI, weight_EOI = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], weight_EOI.shape[2]) if ctx.needs_input_grad[0] else None
        grad_EOI = torch.zeros_like(weight_EOI) if ctx.needs_input_grad[1] else None
        for expert, rows in expert_rows(ctx.counts):
            if grad_RI is not None:
                torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_RI[rows])
            if grad_EOI is not None:
                torch.mm(grad_RO[rows].t(), rows_RI[rows], out=grad_EOI[expert])
        return grad_RI, grad_EOI, None


class _FourBitLinear(torch.autograd.Function):
    """One matrix is whole at a time; the backward pass makes it whole again."""

    @staticmethod
    @mkl_products()
    def forward(ctx, rows_RI: Tensor, matrices: FourBitMatrices, counts: list[int]) -> Tensor:
        ctx.matrices, ctx.counts = matrices, counts
        out_RO = rows_RI.new_empty(rows_RI.shape[0], matrices.shape[1])
        for number, rows in expert_rows(counts):
            torch.mm(rows_RI[rows], matrices.whole(number, rows_RI.dtype).t(), out=out_RO[rows])
        return out_RO

    @staticmethod
    @mkl_products()
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_RO = grads[0].contiguous()
        grad_RI = grad_RO.new_empty(grad_RO.shape[0], ctx.matrices.shape[2])
        for number, rows in expert_rows(ctx.counts):
            torch.mm(grad_RO[rows], ctx.matrices.whole(number, grad_RO.dtype), out=grad_RI[rows])
        return grad_RI, None, None


def expert_rows(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that received a token."""
    start, rows = 0, []
    for expert, count in enumerate(counts):
        if count:
            rows.append((expert, slice(start, start + count)))
        start += count
    return rows


def frozen_linear(input: Tensor, weight_OI: Tensor | FourBitMatrices) -> Tensor:
    """(..., O): F.linear with a matrix as it is, or with one in 4 bits."""
    if isinstance(weight_OI, Tensor):
        return F.linear(input, weight_OI)
    rows_RI = input.flatten(0, -2)
    return _FourBitLinear.apply(rows_RI, weight_OI, [rows_RI.shape[0]]).unflatten(0, input.shape[:-1])


def grouped_linear(rows_RI: Tensor, weight_EOI: Tensor | FourBitMatrices, counts_E: Tensor) -> Tensor:
    """(R, O): each row times its expert's transposed matrix; `counts_E` says how many rows each expert has. In 4 bits
    the counts are read on the host, for which an accelerator waits."""
    if isinstance(weight_EOI, FourBitMatrices):
        return _FourBitLinear.apply(rows_RI, weight_EOI, counts_E.tolist())
    if rows_RI.device.type == "cpu":
        return _GroupedLinear.apply(rows_RI, weight_EOI, counts_E.tolist())
    return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=counts_E.cumsum(0, dtype=torch.int32))
