"""Compiles what is between the matrix products of an accelerator's training passes (torch.compile).

Layers of one kind are compiled once, each as one graph: an operation that would divide it is an error. Passes without
gradients, whose shapes vary, run as they are. A compiler's error is silent, so before training the gradients of every
kind are compared with those of the plain code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from model.architecture.decoder_layer import DecoderLayer, LayerOutput
from model.architecture.losses import losses_and_gradient, vocabulary_chunks
from model.architecture.mtp import MtpLayer
from model.architecture.rotary import rotary_tables
from model.architecture.transformer import Glm4Moe

MAX_DIFFERENCE = 0.3
"""Of a gradient from that of the plain code, relative to its norm. In bfloat16 a rounded score sends some tokens to
another expert, which moves an expert's gradient by about a tenth."""
LARGE, SMALL = 1.0, 2.0**-12
"""Gradients of a layer's result: a first pass takes the large one, on other inputs, and what the next makes of the
small one is compared. A kernel that reads memory before it is written finds there what the first has left."""
CACHE_TAG = "glm46 barriers"
"""Keeps apart the kernels of a compiler's cache that were generated without `add_missing_barriers`."""
LEAST_NORM = 1e-3
"""Of the largest gradient's norm: a smaller gradient is a sum that cancels out, and its difference only rounding."""


def compile_layers(model: Glm4Moe) -> None:
    """Change the layers of a model in place, and the chunks of its loss. Comes before activations are recomputed, so
    that a whole layer is computed again by its compiled self."""
    import torch._inductor.config  # a second, of which ranks on CPUs have no use

    torch._inductor.config.deterministic = True  # no timing decides how sums are ordered
    add_missing_barriers()
    for layer in model.model.layers:
        if isinstance(layer, DecoderLayer):
            layer.forward = partial(_run, layer)
    if not model.is_scored:
        model.lm_head.losses_and_gradient = _run_chunk


@cache
def add_missing_barriers() -> None:
    """Make kernels wait before they read back what other threads of theirs stored.

    torch up to 2.13 generates reductions whose second loop reads what the first has stored, where no thread need have
    its own elements again: gradients were thousands of times too large (pytorch issue 190517, triton issue 10924).
    """
    from torch._inductor.codegen.triton import TritonKernel

    load = TritonKernel.load

    def load_after_barrier(kernel: TritonKernel, name: str, index: Any) -> Any:
        if name in kernel.cse.invalidated_stores:
            kernel.loads.writeline("tl.debug_barrier()")
        return load(kernel, name, index)

    TritonKernel.load = load_after_barrier  # pyright: ignore[reportAttributeAccessIssue]
    torch.compiler.config.cache_key_tag = CACHE_TAG


def _run(layer: DecoderLayer, *arguments: Any, **named: Any) -> LayerOutput:
    forward = type(layer).forward
    return (_compiled(forward) if torch.is_grad_enabled() else forward)(layer, *arguments, **named)


def _run_chunk(logits_CV: Tensor, columns_C: Tensor, factors_C: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor]:
    run = _compiled(losses_and_gradient) if wants_grad else losses_and_gradient
    return run(logits_CV, columns_C, factors_C, wants_grad)


def add_gradient(total: Tensor, gradient: Tensor) -> None:
    """total += gradient, of one kernel that reads both at full width: torch's own for two dtypes takes 1.4 times as
    long on an H200."""
    _compiled_add()(total.view(-1), gradient.view(-1))


@cache
def _compiled_add() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(Tensor.add_, dynamic=True)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def refuse_wrong_gradients(model: Glm4Moe, num_rows: int, num_positions: int) -> None:
    """Compare compiled layers and loss with the plain code, on random inputs of the shape of a micro-batch. Raises
    ValueError where a gradient differs by more than rounding."""
    for name, difference in gradient_differences(model, num_rows, num_positions):
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(
                f"compile_layers: torch {torch.__version__} compiles a wrong gradient of {name}: it differs by "
                f"{difference:.0%} from that of the plain code. Set compile_layers to false"
            )


def gradient_differences(model: Glm4Moe, num_rows: int, num_positions: int) -> Iterator[tuple[str, float]]:
    """By name the norm of the difference over the plain gradient's norm, of one layer of every kind and of the
    loss."""
    device = next(model.parameters()).device
    kinds = {
        (type(layer), type(layer.mlp)): (number, layer)
        for number, layer in enumerate(model.model.layers)
        if isinstance(layer, DecoderLayer)
    }
    for number, layer in kinds.values():
        gradients = partial(_layer_gradients, model, layer, num_rows, num_positions, device)
        yield from ((f"model.layers.{number}.{name}", each) for name, each in _differences(gradients))
    if not model.is_scored:
        yield from _differences(partial(_logit_gradients, model, num_rows * num_positions, device))


def _differences(gradients: Callable[[int, float], dict[str, Tensor]]) -> Iterator[tuple[str, float]]:
    gradients(45, LARGE)
    compiled = gradients(46, SMALL)
    with torch.compiler.set_stance("force_eager"):
        plain = gradients(46, SMALL)
    norms = {name: float(gradient.float().norm()) for name, gradient in plain.items()}
    floor = LEAST_NORM * max(norms.values())
    for name, gradient in plain.items():
        yield name, float((compiled[name].float() - gradient.float()).norm()) / max(norms[name], floor)


def _layer_gradients(
    model: Glm4Moe,
    layer: DecoderLayer,
    num_rows: int,
    num_positions: int,
    device: torch.device,
    seed: int,
    scale: float,
) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    num_inputs = 2 if isinstance(layer, MtpLayer) else 1
    shape = (num_inputs + 1, num_rows, num_positions - (num_inputs - 1), model.recipe.hidden_size)
    *inputs, probe_BTD = torch.randn(shape, generator=generator, device=device).bfloat16()
    weights = {name: each.detach().bfloat16().requires_grad_() for name, each in layer.named_parameters()}
    inputs = [each.requires_grad_() for each in inputs]
    rotary = rotary_tables(torch.arange(shape[2], device=device), model.recipe.rotary_dim, model.rope_theta)
    output = functional_call(layer, weights, (*inputs, rotary))
    loss = (output.hidden_BTD * probe_BTD).float().sum()
    if output.balance_loss is not None:
        loss = loss + output.balance_loss
    named = {**{f"input {number}": each for number, each in enumerate(inputs)}, **weights}
    return dict(zip(named, torch.autograd.grad(scale * loss, list(named.values())), strict=True))


def _logit_gradients(
    model: Glm4Moe, num_targets: int, device: torch.device, seed: int, scale: float
) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    num_rows = vocabulary_chunks(num_targets, model.recipe.vocab_size, device.type)[0].stop
    logits_CV = torch.randn(num_rows, model.recipe.vocab_size, generator=generator, device=device).bfloat16()
    columns_C = torch.randint(model.recipe.vocab_size, (num_rows,), generator=generator, device=device)
    factors_C = scale * torch.rand(num_rows, generator=generator, device=device)
    losses_C, gradient_CV = model.lm_head.losses_and_gradient(logits_CV, columns_C, factors_C, True)
    return {"the losses": losses_C, "the logits": gradient_CV}
