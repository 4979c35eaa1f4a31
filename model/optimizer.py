"""Muon on every matrix but the embedding and AdamW on the rest, or AdamW on all: DeepSpeed's MuonWithAuxAdam, scaled as the report
states.

DeepSpeed scales an orthogonalised update of a (rows, cols) matrix by sqrt(max(1, rows / cols)). The report wants the update RMS that
AdamW has, rms * sqrt(max(rows, cols)), which is k = rms * sqrt(cols) times as much (arXiv 2502.16982, section 2.2). So there is one
group per fan-in (cols) with learning rate lr * k and weight decay wd / k: the decay lr * wd stays what was asked for.
Expert stacks (E, rows, cols) are orthogonalised per expert. lm_head and router are matrices like others, as the report has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from configs.schema import OptimizerRecipe

if TYPE_CHECKING:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

DEEPSPEED_NEWTON_SCHULZ_STEPS = 5


def is_decayed_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Every matrix but the word embedding: what Muon updates (report, section 2.3), and what is decayed."""
    return parameter.ndim >= 2 and "embed_tokens" not in name.split(".")


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> MuonWithAuxAdam:
    """The client optimizer for `deepspeed.initialize`; learning rates are 0 until `set_learning_rate`.

    Parameters carry `use_muon` afterwards, which DeepSpeed's ZeRO optimizers read. Raises ValueError for what DeepSpeed cannot do.
    """
    if recipe.muon_newton_schulz_steps != DEEPSPEED_NEWTON_SCHULZ_STEPS:
        raise ValueError(
            f"muon_newton_schulz_steps is {recipe.muon_newton_schulz_steps}, DeepSpeed's Muon does {DEEPSPEED_NEWTON_SCHULZ_STEPS}: set it"
        )
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    by_columns: dict[int, list[nn.Parameter]] = {}
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = is_decayed_matrix(name, parameter)
        parameter.use_muon = is_matrix and recipe.kind == "muon"  # pyright: ignore[reportAttributeAccessIssue]
        (by_columns.setdefault(parameter.shape[-1], []) if is_matrix else rest).append(parameter)
    if recipe.kind == "muon":
        groups = [_muon_group(columns, parameters, recipe) for columns, parameters in sorted(by_columns.items())]
    else:
        groups = [_adam_group([parameter for matrices in by_columns.values() for parameter in matrices], recipe.weight_decay, recipe)]
    return MuonWithAuxAdam(_experts_apart([*groups, _adam_group(rest, 0.0, recipe)]))


def _experts_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters of divided experts in groups of their own, as DeepSpeed wants them: their gradients are summed over other ranks. They
    carry `group_name` and allreduce = False (tasks/training/deepspeed_experts.py)."""
    divided: list[dict[str, Any]] = []
    for group in groups:
        names = {parameter: parameter.group_name for parameter in group["params"] if not getattr(parameter, "allreduce", True)}
        divided.append(group | {"params": [parameter for parameter in group["params"] if parameter not in names]})
        for name in sorted(set(names.values())):
            divided.append(group | {"params": [parameter for parameter in names if names[parameter] == name], "moe": True, "name": name})
    return [group for group in divided if group["params"]]


def set_learning_rate(optimizer: MuonWithAuxAdam, learning_rate: float) -> None:
    """Give every group its share of the scheduled rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def _adam_group(parameters: list[nn.Parameter], weight_decay: float, recipe: OptimizerRecipe) -> dict[str, Any]:
    return {
        "params": parameters, "use_muon": False, "lr": 0.0, "betas": (recipe.adam_beta1, recipe.adam_beta2), "eps": recipe.adam_eps,
        "weight_decay": weight_decay, "lr_scale": 1.0,
    }  # fmt: skip


def _muon_group(columns: int, parameters: list[nn.Parameter], recipe: OptimizerRecipe) -> dict[str, Any]:
    scale = recipe.muon_update_rms * columns**0.5
    # "gram" iterates on the small square side: the same result with fewer products, and in float32 where the CPU has no float16.
    return {
        "params": parameters, "use_muon": True, "lr": 0.0, "momentum": recipe.muon_momentum,
        "weight_decay": recipe.weight_decay / scale, "ns_method": "gram", "lr_scale": scale,
    }  # fmt: skip
