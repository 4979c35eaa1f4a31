"""How far apart two ways to compute the same tensors may be, by the dtype that computes; written here only, and never
raised to pass.

Values are of order 1 in the small models of the tests; a sum of some hundred products in another order moves them by a
few roundings.
"""

import torch

CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}
CLOSE_FLOAT32 = CLOSE[torch.float32]
