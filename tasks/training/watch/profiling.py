"""Profiles some steps, on rank 0, into the work directory's profile/: flops.txt and flops.json, trace.json.

DeepSpeed's FLOP profiler patches torch's functions. So it sees only the forward pass, and nothing inside our own
autograd functions (the MLPs, the loss). Beside it torch's FlopCounterMode counts every matrix product of both passes
below autograd. Attention is counted by the shapes it is called with. Their sum is compared with the formula of
model/architecture/counts.py. trace.json opens in Perfetto or chrome://tracing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from model.architecture.attention import Attention, WithinDocuments
from model.architecture.counts import training_flops_per_token
from tasks.training.schedule.schedules import trains_mtp
from tasks.training.state.job import TrainingJob

if TYPE_CHECKING:
    from tasks.training.parallel.micro_batch import MicroBatch
    from tasks.training.parallel.trainable import Trainable

WARMUP_STEPS = 2
"""Number of steps that are skipped at each start of the process: they allocate and, on an accelerator, compile."""
TABLE_DEPTH = 4
PASSES = 3
"""A backward pass takes twice the products of the forward pass."""


class StepProfiler:
    """`with profiler.step(): ...` around each step that is taken; `observed` is what take_step enters around its
    passes."""

    def __init__(self, job: TrainingJob, trainable: Trainable) -> None:
        self._job, self._trainable, self._profile = job, trainable, job.resources.profile
        self._directory = Path(job.work_dir) / "profile"
        self._num_seen = self._num_positions = self._squared_lengths = 0
        self._flops = FlopCounterMode(display=False, depth=TABLE_DEPTH, custom_mapping=FLOP_FORMULAS)
        self._num_flops = 0
        self._forward = io.StringIO()
        self._tracer = (
            torch.profiler.profile(
                record_shapes=True,
                profile_memory=True,
                with_stack=True,
                schedule=torch.profiler.schedule(wait=WARMUP_STEPS - 1, warmup=1, active=self._profile.steps, repeat=1),
                on_trace_ready=self._write_trace,
            )
            if self._profile.trace
            else None
        )

    @property
    def _is_profiled(self) -> bool:
        return WARMUP_STEPS < self._num_seen <= WARMUP_STEPS + self._profile.steps

    @contextmanager
    def step(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """One optimizer step over these micro-batches of this rank."""
        self._num_seen += 1
        if self._is_profiled:
            self._num_positions += sum(batch.num_positions for batch in micro_batches)
            self._squared_lengths += sum(int(batch.attended[1]) for batch in micro_batches)
        if self._tracer is not None and self._num_seen == 1:
            self._tracer.start()
        yield
        if self._tracer is not None and self._num_seen <= WARMUP_STEPS + self._profile.steps:
            self._tracer.step()
        if self._profile.flops and self._num_seen == WARMUP_STEPS + self._profile.steps:
            self._write_flops()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Around the forward and backward passes: the optimizer's products are not the model's."""
        if not (self._profile.flops and self._is_profiled):
            yield
            return
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        profiler = FlopsProfiler(self._trainable.model, self._trainable.engine)
        profiler.start_profile()
        with counted_attention(self._trainable.model) as attention, self._flops:
            yield
        self._num_flops += self._flops.get_total_flops() + round(attention[0])
        profiler.stop_profile()
        self._forward = io.StringIO()
        with redirect_stdout(self._forward):
            profiler.print_model_profile(profile_step=self._num_seen, module_depth=TABLE_DEPTH, detailed=False)
        profiler.end_profile()

    def _write_flops(self) -> None:
        num_positions, recipe = max(1, self._num_positions), self._job.recipe
        formula = training_flops_per_token(
            recipe.model,
            self._squared_lengths / num_positions,
            recipe.adapter.kind != "none",
            trains_mtp=trains_mtp(recipe),
        )
        counted = self._num_flops / num_positions
        figures = {"counted_flops_per_token": counted, "formula_flops_per_token": formula, "ratio": counted / formula}
        self._directory.mkdir(exist_ok=True)
        (self._directory / "flops.json").write_text(json.dumps(figures, indent=1))
        (self._directory / "flops.txt").write_text(
            f"counted by FlopCounterMode: {counted:.4g} FLOP per token, forward and backward, rank 0\n"
            f"formula of model/architecture/counts.py: {formula:.4g}; counted / formula: {counted / formula:.4f}\n"
            "(where the model is divided among ranks, rank 0 counts its part)\n\n"
            f"FlopCounterMode, last profiled step:\n{self._flops.get_table()}\n\n"
            "DeepSpeed's FLOP profiler, last profiled step, forward pass; blind inside our own autograd functions:\n"
            f"{self._forward.getvalue()}\n"
        )

    def _write_trace(self, tracer: torch.profiler.profile) -> None:
        self._directory.mkdir(exist_ok=True)
        tracer.export_chrome_trace(str(self._directory / "trace.json"))


@contextmanager
def counted_attention(model: nn.Module) -> Iterator[list[float]]:
    """Products of attention, forward and backward, by the shapes it is called with: half the square of each row or
    document, as all of it is causal. Kernels of our own and flash kernels alike are one call to torch."""
    counted = [0.0]
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    plain = [module.attend for module in attentions]

    def count(attend: Any) -> Any:
        def counting(query_BTNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, visible: Any) -> Tensor:
            num_rows, num_positions, num_heads, head_dim = query_BTNH.shape
            squares = float(num_rows * num_positions * key_BSGH.shape[1])
            if isinstance(visible, WithinDocuments):
                squares = float(visible.bounds.diff().double().square().sum())
            counted[0] += PASSES * 2 * squares * num_heads * head_dim
            return attend(query_BTNH, key_BSGH, value_BSGH, visible)

        return counting

    for module, attend in zip(attentions, plain, strict=True):
        module.attend = count(attend)
    try:
        yield counted
    finally:
        for module, attend in zip(attentions, plain, strict=True):
            module.attend = attend


def _grouped_product(
    rows: torch.Size, matrices: torch.Size, *others: Any, out_shape: Any = None, **options: Any
) -> int:
    """rows (R, K) by expert matrices (E, K, N), or the gradient of such matrices, (M, R) by (R, N): the shared R counts
    once."""
    return 2 * rows[0] * rows[1] * matrices[-1]


def _added_product(
    into: torch.Size, left: torch.Size, right: torch.Size, *others: Any, out_shape: Any = None, **options: Any
) -> int:
    return 2 * left[0] * left[1] * right[1]


def _counted_elsewhere(*others: Any, **options: Any) -> int:
    return 0


FLOP_FORMULAS: dict[Any, Any] = {
    **{
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{suffix}"): _counted_elsewhere
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
        for suffix in ("", "_backward")
    },
    torch.ops.aten._grouped_mm: _grouped_product,
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten.addmm: _added_product,  # torch's own takes the dtype of a float32 sum for a shape
}
"""Formulas of products that FlopCounterMode does not know, and none for attention, which `counted_attention` counts."""
