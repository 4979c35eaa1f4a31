"""Newton-Schulz orthogonalisation for Muon: turns matrices, single or stacked, into nearly U V^T of each.

The iteration and its coefficients are Keller Jordan's, as in DeepSpeed's Muon; tests compare the results with it.
DeepSpeed compiles its functions for every shape of matrix (torch.compile, tens of seconds at a training's start) and
computes in float16 where it can. Here each step is three fused products, on a CPU in the matrices' own dtype.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X X^T X and (X X^T)^2 X: tuned for five steps, which leave singular values between 0.7 and 1.2."""
RESTART_AT = 2
"""Step at which the long way starts again from the matrix itself: rounding errors in the squared one would grow."""


def orthogonalize(matrices: Tensor, num_steps: int) -> Tensor:
    """(..., rows, columns) of any scale to the same shape with singular values near 1; on an accelerator in float16,
    for its tensor cores: after the normalisation nothing leaves its range."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = (matrices.mT if is_tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    computed = matrices.dtype if matrices.device.type == "cpu" else torch.float16
    norms = torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7
    wide = torch.div(wide, norms, out=torch.empty_like(wide, dtype=computed))
    steps = _step_on_squares if 3 * wide.shape[1] <= 2 * wide.shape[2] else _step_on_matrices
    result = steps(wide, num_steps)
    return (result.mT if is_tall else result).reshape(matrices.shape)


def _step_on_matrices(wide: Tensor, num_steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(num_steps):
        square = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide


def _step_on_squares(wide: Tensor, num_steps: int) -> Tensor:
    """The same polynomial, collected in one small factor: far fewer products for long matrices (Gram Newton-Schulz)."""
    for first, last in ((0, min(RESTART_AT, num_steps)), (min(RESTART_AT, num_steps), num_steps)):
        if first < last:
            wide = _factor(wide @ wide.mT, last - first) @ wide
    return wide


def _factor(square: Tensor, num_steps: int) -> Tensor:
    """Q such that Q X is X after `num_steps` steps, from X X^T. All matrices here are polynomials of that one: they
    commute."""
    a, b, c = COEFFICIENTS
    identity = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    factor = None
    for step in range(num_steps):
        turn = torch.baddbmm(square, square, square, beta=b, alpha=c) + a * identity
        factor = turn if factor is None else turn @ factor
        if step < num_steps - 1:
            square = turn @ square @ turn
    assert factor is not None, num_steps
    return factor
