"""Activation recomputation: drops activations after the forward pass and computes them again for the backward pass.

It changes a built model in place. `selective` keeps the inputs of attention and experts and computes the two again.
`full` keeps only the input of every N trunk layers (the MTP layer is a block of its own). Losses, balance losses and
expert counts are those of the first pass. The second pass serves only gradients, so nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.architecture.decoder_layer import DecoderLayer
from model.architecture.moe import MixtureOfExperts
from model.architecture.mtp import MtpLayer
from model.architecture.transformer import Glm4Moe, LayersOutput, run_layers


def recompute_activations(model: Glm4Moe, kind: Literal["none", "selective", "full"], every_layers: int) -> None:
    """`every_layers` is how many trunk layers `full` computes again as one block. Comes after whatever else changes the
    forward pass (tensor, expert and context parallelism), so that it is repeated too: collectives run again in the same
    order on all ranks."""
    layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    if kind == "selective":
        for layer in layers:
            _recompute_module(layer.self_attn)
            if isinstance(layer.mlp, MixtureOfExperts):
                _recompute_module(layer.mlp)
    elif kind == "full":
        # A single layer is recomputed inside its own call: ZeRO 3 holds its weights from the hook before the backward
        # pass to the one after it. A call from outside would release them in between.
        if every_layers > 1:
            model.model.run_layers = partial(_run_blocks, every_layers)
        for layer in layers:
            if every_layers == 1 or isinstance(layer, MtpLayer):
                _recompute_module(layer)


def _recompute_module(module: nn.Module) -> None:
    # A bound method in a partial: a deep copy of the model then calls its own modules, a closure would call this one's.
    module.forward = partial(_run_again, [module], module.forward)


def _run_blocks(size: int, layers: Iterable[nn.Module], hidden_BTD: Tensor, *context: Any) -> LayersOutput:
    """model.architecture.transformer.run_layers in blocks of `size` layers."""
    balance, counts = [], []
    every = [layer for layer in layers if isinstance(layer, DecoderLayer)]  # of a pipeline stage: those that it holds
    for first in range(0, len(every), size):
        block = every[first : first + size]
        output = _run_again(block, partial(run_layers, block), hidden_BTD, *context)
        hidden_BTD = output.hidden_BTD
        balance += output.balance
        counts += output.counts
    return LayersOutput(hidden_BTD, balance, counts)


def _run_again(modules: Sequence[nn.Module], forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Does not use torch's reentrant way: its first pass runs without gradients, and then there is no balance loss."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    stand_ins = _stand_ins(modules)
    is_first = True

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal is_first
        if is_first or not stand_ins:
            is_first = False
            return forward(*arguments, **named)
        with _weights_of_first_pass(stand_ins):
            return forward(*arguments, **named)

    # No dropout, no random state. ZeRO 3 releases a module's weights after its forward pass: it must run to its end the
    # second time.
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, early_stop=False, **named)


def _stand_ins(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Tensors that replace parameters during this pass only (bfloat16 copies of float32 weights); they are gone when
    the backward pass runs."""
    pairs = []
    for owner in (owner for module in modules for owner in module.modules()):
        tensors = {
            name: tensor
            for name, tensor in owner._parameters.items()
            if tensor is not None and not isinstance(tensor, nn.Parameter)
        }
        if tensors:
            pairs.append((owner, tensors))
    return pairs


@contextmanager
def _weights_of_first_pass(stand_ins: list[tuple[nn.Module, dict[str, Tensor]]]) -> Iterator[None]:
    before = [(owner, {name: owner._parameters[name] for name in tensors}) for owner, tensors in stand_ins]
    for owner, tensors in stand_ins:
        owner._parameters.update(tensors)  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for owner, tensors in before:
            owner._parameters.update(tensors)
