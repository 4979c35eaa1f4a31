"""Muon on every matrix but the embedding and AdamW on the rest, or AdamW on all: one optimizer for DeepSpeed.

It works at every ZeRO stage. An orthogonalised update of a (rows, cols) matrix is scaled by rms * sqrt(max(rows,
cols)), which gives it the RMS of AdamW's updates (arXiv 2502.16982, section 2.2). Expert stacks (E, rows, cols) are
orthogonalised per expert. lm_head and router are matrices like others, as in the report.

Momentum and moments are element-wise, so under ZeRO they are in the flat partitions that DeepSpeed passes. Only the
orthogonalisation needs whole matrices, and it is replaceable (`Muon.orthogonalize`;
tasks/training/parallel/whole_matrices.py). DeepSpeed's own MuonWithAuxAdam orthogonalises inside ZeRO instead: it keeps
momenta of whole matrices on every rank, and it overwrites the gradients with updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import OptimizerRecipe
from model.architecture.mtp import MtpLayer
from model.optimizer.newton_schulz import orthogonalize

LISTS: Any = torch
"""Has torch's operations on lists of tensors, `_foreach_*`: one launch on an accelerator for many tensors."""


def is_decayed_matrix(name: str, parameter: Tensor) -> bool:
    """Every matrix but the word embedding: what Muon updates (report, section 2.3), and what is decayed. Of a parameter
    that ZeRO 3 has divided DeepSpeed keeps the shape."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return len(shape) >= 2 and "embed_tokens" not in name.split(".")


def is_router(name: str) -> bool:
    """The matrix that scores experts."""
    return name.endswith(".mlp.gate.weight")


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe, rests_mtp: bool = False) -> Muon:
    """Learning rates are 0 until `set_learning_rate`. `rests_mtp`: the MTP layer has groups of its own, which that can
    leave at 0."""
    mtp = {id(each) for module in model.modules() if isinstance(module, MtpLayer) for each in module.parameters()}
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix, is_mtp = is_decayed_matrix(name, parameter), rests_mtp and id(parameter) in mtp
            ratio = recipe.router_rate_ratio if is_router(name) else 1.0 if is_matrix else recipe.adam_rate_ratio
            groups.setdefault((is_matrix, ratio, is_mtp), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "is_muon": is_matrix and recipe.kind == "muon",
            "weight_decay": recipe.weight_decay if is_matrix else 0.0,
            "rate_ratio": ratio,
            "is_mtp": is_mtp,
        }
        for (is_matrix, ratio, is_mtp), parameters in sorted(groups.items(), key=lambda group: group[0], reverse=True)
    ]
    return Muon(_experts_apart(settings), recipe)


def _experts_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters of divided experts in groups of their own, as DeepSpeed requires: their gradients are summed over
    other ranks. They carry `group_name` and allreduce = False (tasks/training/parallel/deepspeed_experts.py)."""
    divided: list[dict[str, Any]] = []
    for group in groups:
        names = {
            parameter: parameter.group_name
            for parameter in group["params"]
            if not getattr(parameter, "allreduce", True)
        }
        divided.append(group | {"params": [parameter for parameter in group["params"] if parameter not in names]})
        for name in sorted(set(names.values())):
            divided.append(
                group
                | {"params": [parameter for parameter in names if names[parameter] == name], "moe": True, "name": name}
            )
    return [group for group in divided if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float, trains_mtp: bool = True) -> None:
    """Every group's own, by its ratio to that of the matrices. An MTP layer that is not trained rests: whether it has
    no gradient or one of zeros is the engine's choice, and by the latter decay and old momentum would move it."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if group["is_mtp"] and not trains_mtp else learning_rate * group["rate_ratio"]


def largest_of(tensors: Sequence[Tensor]) -> int:
    """What `batches` takes for a list of its own."""
    return max((tensor.numel() for tensor in tensors), default=0)


def batches(tensors: Sequence[Tensor], max_elements: int) -> Iterator[list[Tensor]]:
    """Neighbours of at most so many elements together, so that a list needs no more memory than the largest tensor; on
    a CPU, which gains nothing, each by itself."""
    batch: list[Tensor] = []
    for tensor in tensors:
        is_full = tensor.device.type == "cpu" or sum(map(torch.numel, batch)) + tensor.numel() > max_elements
        if batch and is_full:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


class Muon(torch.optim.Optimizer):
    """Groups with `is_muon` take momentum steps along orthogonal matrices, the others AdamW's. State under DeepSpeed's
    names: `momentum_buffer`, or `exp_avg`, `exp_avg_sq` and `step`."""

    def __init__(self, groups: list[dict[str, Any]], recipe: OptimizerRecipe) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.recipe = recipe
        self._with_momentum = {id(parameter) for group in groups if group["is_muon"] for parameter in group["params"]}
        self.state_dtype: torch.dtype = getattr(torch, recipe.state_dtype)
        self.orthogonalize: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]] = self._orthogonalize_each
        """Function from parameters and their directions to scaled updates of the same shapes; it may overwrite the
        directions. For a flat partition the updates are parts of those of whole matrices."""

    def has_momentum(self, parameter: Tensor) -> bool:
        """Whether Muon updates a parameter of the model; ZeRO replaces parameters in the groups, but not in the
        model."""
        return id(parameter) in self._with_momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, closure
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["is_muon"]:
                self._step_muon(parameters, group["lr"], group["weight_decay"])
            else:
                for batch in batches(parameters, largest_of(parameters)):
                    self._step_adam(batch, group["lr"], group["weight_decay"])

    def ensure_state(self, parameter: Tensor, *, use_muon: bool) -> dict[str, Any]:
        """The parameter's state, zeros before its first step."""
        state: dict[str, Any] = self.state[parameter]
        for name in ("momentum_buffer",) if use_muon else ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)
        if not use_muon:
            state.setdefault("step", 0)
        return state

    def _step_muon(self, parameters: list[Tensor], learning_rate: float, weight_decay: float) -> None:
        directions: list[Tensor] = []
        for batch in batches(parameters, largest_of(parameters)):
            buffers = [self.ensure_state(parameter, use_muon=True)["momentum_buffer"] for parameter in batch]
            momenta = [buffer.float() for buffer in buffers]
            gradients = [parameter.grad.float() for parameter in batch if parameter.grad is not None]
            LISTS._foreach_lerp_(momenta, gradients, 1 - self.recipe.muon_momentum)
            if self.state_dtype != torch.float32:
                LISTS._foreach_copy_(buffers, momenta)
            LISTS._foreach_lerp_(gradients, momenta, self.recipe.muon_momentum)  # Nesterov's, in the gradient's place
            directions += gradients
        if parameters:
            updates = self.orthogonalize(parameters, directions)
            LISTS._foreach_mul_(parameters, 1 - learning_rate * weight_decay)
            LISTS._foreach_add_(parameters, updates, alpha=-learning_rate)

    def _step_adam(self, parameters: list[Tensor], learning_rate: float, weight_decay: float) -> None:
        states = [self.ensure_state(parameter, use_muon=False) for parameter in parameters]
        for state in states:
            state["step"] += 1
        beta1, beta2 = self.recipe.adam_beta1, self.recipe.adam_beta2
        gradients = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
        firsts, seconds = ([state[name].float() for state in states] for name in ("exp_avg", "exp_avg_sq"))
        LISTS._foreach_lerp_(firsts, gradients, 1 - beta1)
        LISTS._foreach_lerp_(seconds, LISTS._foreach_mul(gradients, gradients), 1 - beta2)
        if self.state_dtype != torch.float32:
            LISTS._foreach_copy_([state["exp_avg"] for state in states], firsts)
            LISTS._foreach_copy_([state["exp_avg_sq"] for state in states], seconds)
        scales = LISTS._foreach_div(seconds, [1 - beta2 ** state["step"] for state in states])
        LISTS._foreach_sqrt_(scales)
        LISTS._foreach_add_(scales, self.recipe.adam_eps)
        LISTS._foreach_mul_(parameters, 1 - learning_rate * weight_decay)
        rates = [-learning_rate / (1 - beta1 ** state["step"]) for state in states]
        LISTS._foreach_addcdiv_(parameters, firsts, scales, rates)

    def _orthogonalize_each(self, parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
        return [self.scaled_polar_factor(direction) for direction in directions]

    def scaled_polar_factor(self, matrix: Tensor) -> Tensor:
        """The update of one whole matrix, or of a stack of them; float16 on an accelerator."""
        return orthogonalize(matrix, self.recipe.muon_newton_schulz_steps).mul_(
            self.recipe.muon_update_rms * max(matrix.shape[-2:]) ** 0.5
        )
