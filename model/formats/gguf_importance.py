"""The importance matrix of a model: how large the inputs of every matrix are on given tokens.

llama.cpp's quantizer weighs the rounding of a column by the mean square of what it is multiplied with. Every routed
expert is measured on every token, whatever the router chooses: an expert that few tokens reach would else be rounded
blindly. How many tokens the router itself sends to each expert is counted beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.architecture.gated_mlp import GatedMlp
from model.architecture.moe import MixtureOfExperts, MoeOutput
from model.architecture.transformer import Glm4Moe
from model.formats.expert_coverage import ExpertCoverage, expert_coverage


@dataclass(frozen=True)
class Importance:
    """Mean squares over the tokens, by name of the GGUF tensor, and the router's counts."""

    columns: dict[str, Tensor]
    """Float32, (columns,), or (experts, columns) where each expert has inputs of its own."""
    routed_LE: Tensor
    """Tokens that the router sent to each expert, by layer with experts."""
    num_tokens: int
    """Tokens by which every matrix of every expert was measured."""
    coverage: ExpertCoverage


def measure_importance(model: Glm4Moe, rows: Sequence[Sequence[int]]) -> Importance:
    """`rows` are token ids. Raises ValueError where there are none, or an expert's inputs are zero or not finite."""
    num_tokens = sum(map(len, rows))
    if not num_tokens:
        raise ValueError("no calibration tokens: raise release.recipe.calibration_rows, or bring more text")
    sums: dict[str, Tensor] = {}
    routed: dict[int, Tensor] = {}
    handles = [
        handle
        for layer in range(model.recipe.num_hidden_layers)
        for handle in _watch_layer(model.model.layers[layer], layer, sums, routed)
    ]
    try:
        with torch.inference_mode():
            for row in rows:
                if row:
                    model(torch.tensor([row], device=next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    columns = {name: (total / num_tokens).float().cpu() for name, total in sums.items()}
    for name, values in columns.items():
        dead = (~values.isfinite()).any(-1) | (values.sum(-1) == 0)
        if dead.any():
            which = f" of expert {int(dead.nonzero()[0])}" if values.dim() == 2 else ""
            raise ValueError(
                f"{name}: the inputs{which} are zero or not finite on all {num_tokens} calibration tokens: leave "
                "Q6_K, Q5_K_M and Q4_K_M out of release.recipe.gguf_types"
            )
    routed_LE = torch.stack([routed[layer] for layer in sorted(routed)]) if routed else torch.zeros(0, 0)
    return Importance(columns, routed_LE.to(torch.int64).cpu(), num_tokens, expert_coverage(routed))


def _watch_layer(block: Any, layer: int, sums: dict[str, Tensor], routed: dict[int, Tensor]) -> list[Any]:
    """Hooks that add up the squares of the inputs of every matrix of a layer."""

    def add(names: Sequence[str], squares: Tensor) -> None:
        for name in names:
            key = f"blk.{layer}.{name}.weight"
            sums[key] = sums[key] + squares if key in sums else squares

    def watch_linear(*names: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: add(names, _squares(inputs[0]))

    def watch_mlp(suffix: str) -> Callable[[GatedMlp, tuple[Tensor, ...]], None]:
        def hook(mlp: GatedMlp, inputs: tuple[Tensor, ...]) -> None:
            add([f"ffn_gate{suffix}", f"ffn_up{suffix}"], _squares(inputs[0]))
            product = F.silu(mlp.gate_proj(inputs[0])) * mlp.up_proj(inputs[0])
            add([f"ffn_down{suffix}"], _squares(product))

        return hook

    def watch_experts(moe: MixtureOfExperts, inputs: tuple[Tensor, ...], output: MoeOutput) -> None:
        tokens_TD, experts = inputs[0].flatten(0, 1), moe.experts
        add(["ffn_gate_exps", "ffn_up_exps"], _squares(tokens_TD))
        matrices = zip(experts.gate_proj, experts.up_proj, strict=True)
        products = (F.silu(tokens_TD @ gate_FD.t()) * (tokens_TD @ up_FD.t()) for gate_FD, up_FD in matrices)
        add(["ffn_down_exps"], torch.stack([_squares(product_TF) for product_TF in products]))
        routed[layer] = routed[layer] + output.counts_E if layer in routed else output.counts_E

    attention, mlp = block.self_attn, block.mlp
    handles = [
        attention.q_proj.register_forward_pre_hook(watch_linear("attn_q", "attn_k", "attn_v")),
        attention.o_proj.register_forward_pre_hook(watch_linear("attn_output")),
    ]
    if not isinstance(mlp, MixtureOfExperts):
        return [*handles, mlp.register_forward_pre_hook(watch_mlp(""))]
    if mlp.shared_experts is not None:
        handles.append(mlp.shared_experts.register_forward_pre_hook(watch_mlp("_shexp")))
    return [*handles, mlp.register_forward_hook(watch_experts)]


def _squares(inputs: Tensor) -> Tensor:
    """Sum of squares of every column, in float64."""
    return inputs.flatten(0, -2).double().square().sum(0)
