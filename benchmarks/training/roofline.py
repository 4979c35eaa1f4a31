"""Roofline of a training step on an H100, from counts: python -m benchmarks.training.roofline [--write]

Nothing is measured. The passes of benchmarks.training.train_step_gpu's model and Muon's update run on the device
`meta`, on the branches of an accelerator, without torch.compile; each operation's FLOPs and the bytes of the tensors
that it takes and gives are counted. An operation takes the longer of its FLOPs at a share of peak and its bytes at a
share of the memory's rate (tasks/training/plan/machine.py, measured on an H200). All take the sum, or their launches on
the host where those take longer. `ours` is the share of peak that follows for the passes; a step adds one update to the
passes of all its micro-batches.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from math import prod

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.train_step_gpu import LARGE, PEAK_TFLOPS
from configs.load import load_scale
from configs.schema import ModelRecipe
from model.architecture.counts import training_flops_per_token
from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import build_optimizer
from tasks.training.plan.machine import ATTENTION_SHARE, H100, MATRIX_SHARE, MEMORY_SHARE

RECIPE, NUM_ROWS, LENGTH = LARGE, 4, 4096
LAUNCH_SECONDS = 5e-6
"""Assumed: what the host takes to launch an operation without torch.compile or CUDA graphs."""
ATTENTION_COUNTED = 7 / 3
"""FLOPs of the operations of attention over those of the formula, as which its share of peak is stated: they count the
scores that are computed again, and positions that are not seen."""
PRODUCTS = ("mm", "attn")
"""In the names of operations whose time is that of products."""
META = torch.device("meta")


@dataclass
class Counted(TorchDispatchMode):
    """Operations by name: number, bytes, FLOPs; views and allocations do nothing."""

    launches: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or "detach" in name or "empty" in name:
            return result
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        num_bytes = sum(each.numel() * each.element_size() for each in tensors)
        flops = _flops(func, args, kwargs or {}, result)
        self.launches[name] += 1
        self.num_bytes[name] += num_bytes
        self.flops[name] += flops
        share = ATTENTION_SHARE * ATTENTION_COUNTED if "attn" in name or "attention" in name else MATRIX_SHARE
        peak = PEAK_TFLOPS["H100"] * 1e12 * share
        self.seconds += max(flops / peak, num_bytes / (H100.memory_bytes_per_second * MEMORY_SHARE))
        return result

    @property
    def traffic(self) -> int:
        """Bytes of operations that are no products."""
        return sum(size for name, size in self.num_bytes.items() if not any(part in name for part in PRODUCTS))


def _flops(func, args: tuple, kwargs: dict, result) -> int:
    if "_grouped_mm" in str(func):
        rows, matrices = args[0], args[1]
        return 2 * prod(rows.shape) * matrices.shape[-1]
    if "addmm" in str(func):  # torch's formula takes the dtype of the sum for a shape
        rows, columns = args[1:3]
        return 2 * prod(rows.shape) * columns.shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def count_passes(recipe: ModelRecipe, num_rows: int, length: int) -> Counted:
    """Forward and backward of rows that are one document each, in bfloat16."""
    with META:
        model = Glm4Moe(recipe).bfloat16()
    tokens = torch.zeros(num_rows, length, dtype=torch.int64, device=META)
    with Counted() as counted:
        output = model(tokens, target_ids_BT=tokens, segment_ids_BT=torch.zeros_like(tokens), max_documents=num_rows)
        assert output.losses is not None
        output.losses.lm.backward()
    return counted


def count_update(recipe: ModelRecipe) -> Counted:
    """Muon on float32 masters."""
    with META:
        model = Glm4Moe(recipe)
    optimizer = build_optimizer(model, load_scale("full").phases[0].recipe.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with Counted() as counted:
        optimizer.step()
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record")
    parser.parse_args()
    tokens = NUM_ROWS * LENGTH
    passes, update = count_passes(RECIPE, NUM_ROWS, LENGTH), count_update(RECIPE)
    needed = training_flops_per_token(RECIPE, LENGTH) * tokens
    parts: dict[str, dict[str, float]] = {}
    taken = {}
    for name, counted in (("passes", passes), ("update", update)):
        launches = sum(counted.launches.values())
        taken[name] = max(counted.seconds, launches * LAUNCH_SECONDS)
        parts[name] = {
            "teraflops": round(sum(counted.flops.values()) / 1e12, 2),
            "gigabytes": round(sum(counted.num_bytes.values()) / 1e9, 1),
            "gigabytes_beside_products": round(counted.traffic / 1e9, 1),
            "launches": launches,
            "milliseconds": round(1000 * taken[name], 1),
        }
    report(
        "roofline",
        ours=100 * needed / (taken["passes"] * PEAK_TFLOPS["H100"] * 1e12),
        peer=None,
        unit="% of peak, computed and not measured",
        tokens=tokens,
        tokens_per_second=round(tokens / taken["passes"]),
        passes=parts["passes"],
        update=parts["update"],
    )


if __name__ == "__main__":
    main()
