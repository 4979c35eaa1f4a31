"""Layers that are compiled for an accelerator: captured whole and once per kind, and refused with a wrong gradient.

Here torch compiles them for the CPU and for the device `meta`, on the branches of an accelerator."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch._dynamo
from torch._inductor.exc import InductorError

from model.architecture import moe
from model.architecture.gated_mlp import grouped_products
from model.architecture.transformer import Glm4Moe
from model.kernels import attention_kernel, elementwise_kernels
from tasks.training.parallel import compiled_layers
from tasks.training.parallel.compiled_layers import (
    add_missing_barriers,
    compile_layers,
    gradient_differences,
    refuse_wrong_gradients,
)
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.parallel.recompute import recompute_activations
from tasks.training.plan.launch_rules import unavailable_training
from tests.support.model_recipes import GLM46
from tests.support.training_inputs import RESOURCES, small_recipe

RECIPE = GLM46.model_copy(update={"num_hidden_layers": 4, "n_routed_experts": 4})
ROWS, POSITIONS = 2, 32


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were captured; they run as they are."""
    captured: list[torch.fx.GraphModule] = []

    def run_captured(graph, inputs):
        captured.append(graph)
        return graph.forward

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # tests switch it off for speed
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=run_captured))
    compiled_layers._compiled.cache_clear()
    torch._dynamo.reset()
    yield captured
    compiled_layers._compiled.cache_clear()


@pytest.fixture
def of_accelerators(monkeypatch):
    """On a CPU the branches of an accelerator."""
    for kernels in (attention_kernel, elementwise_kernels):
        monkeypatch.setattr(kernels, "fits", lambda *tensors: False)
    monkeypatch.setattr(moe, "apply_grouped_mlp", grouped_products)
    monkeypatch.setattr(moe, "writes_by_comparing", lambda tensor: True)


@pytest.mark.parametrize(("recompute", "is_segmented", "has_masters"), [("none", True, False), ("full", False, True)])
def test_each_kind_of_layer_is_captured_whole_and_once(recompute, is_segmented, has_masters, graphs):
    with torch.device("meta"):
        model = Glm4Moe(RECIPE)
        token_ids = torch.zeros(ROWS, POSITIONS + 1, dtype=torch.int64)
    compile_layers(model)
    recompute_activations(model, recompute, 1)
    module = ComputeInBfloat16(model) if has_masters else model.bfloat16()
    segments = {"segment_ids_BT" if is_segmented else "mtp_segment_ids_BT": token_ids[:, 1:], "max_documents": ROWS}
    for _ in range(3):
        losses = module(token_ids[:, :-1], target_ids_BT=token_ids[:, 1:], **segments).losses
        (losses.lm + losses.mtp).backward()
    assert len(graphs) == 5, "dense, with experts, MTP; the loss of 64 targets and of 62"
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        module(token_ids[:, :9], target_ids_BT=token_ids[:, 1:10], **{name: None for name in segments})
    assert len(graphs) == 5, "without gradients nothing is compiled"


def test_compiled_gradients_are_those_of_the_plain_code(graphs, of_accelerators, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend="aot_eager"))
    model = toy_model()
    compile_layers(model)
    # Compiled, the copies of a token are added in float32 and rounded once, as here in bfloat16.
    names = [name for name, difference in gradient_differences(model, ROWS, POSITIONS) if difference > 0.01]
    assert names == []
    refuse_wrong_gradients(model, ROWS, POSITIONS)


def test_a_compiler_that_loses_a_gradient_is_refused(graphs, of_accelerators, monkeypatch):
    """As torch 2.11 did of a result that was changed in place."""
    model = toy_model()
    compile_layers(model)
    plain = compiled_layers._layer_gradients

    def without_one(*arguments):
        gradients = plain(*arguments)
        if not torch.compiler.is_compiling() and torch._dynamo.eval_frame._stance.stance == "default":
            gradients["self_attn.q_norm.weight"].zero_()
        return gradients

    monkeypatch.setattr(compiled_layers, "_layer_gradients", without_one)
    wrong = r"compiles a wrong gradient of model\.layers\.0\.self_attn\.q_norm\.weight: it differs by 100%"
    with pytest.raises(ValueError, match=wrong + ".*Set compile_layers to false"):
        refuse_wrong_gradients(model, ROWS, POSITIONS)


def test_a_kernel_that_reads_what_an_earlier_pass_left_is_refused(graphs, of_accelerators, monkeypatch):
    """As torch 2.13 generates them without barriers: it found the sum of the pass before in a few rows."""
    model = toy_model()
    compile_layers(model)
    plain, left = compiled_layers._layer_gradients, {}

    def with_old_rows(*arguments):
        gradients = plain(*arguments)
        if torch._dynamo.eval_frame._stance.stance == "default":
            weight = gradients["self_attn.o_proj.weight"]
            old, left["weight"] = left.get("weight"), weight.clone()
            if old is not None:
                weight[:2] = old[:2]
        return gradients

    monkeypatch.setattr(compiled_layers, "_layer_gradients", with_old_rows)
    with pytest.raises(
        ValueError, match=r"wrong gradient of model\.layers\.0\.self_attn\.o_proj\.weight: it differs by \d{5}%"
    ):
        refuse_wrong_gradients(model, ROWS, POSITIONS)


def sum_and_norm(rows: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer's backward pass does at a norm after experts: a float32 sum that is kept and normalised."""
    total = rows[slots].float().sum(1)
    weighted = total * weight
    return total, (weighted * 2048 - weighted.sum(-1, keepdim=True)).bfloat16()


def test_what_a_kernel_stored_is_read_back_behind_a_barrier(monkeypatch):
    """The kernel is generated here; only a GPU runs it."""
    codes: list[str] = []
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda *arguments: "none")
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(codes.append))
    add_missing_barriers()
    generated = torch.compile(
        sum_and_norm, options={"cpu_backend": "triton", "fx_graph_cache": False, "compile_threads": 1}
    )
    inputs = torch.randn(640, 2048).bfloat16(), torch.randint(640, (160, 4)), torch.randn(2048)
    with pytest.raises(InductorError, match="triton"):
        generated(*inputs)
    (stored,) = re.findall(r"tl\.store\((\w+) ", codes[0].split("for r0_offset")[1])
    assert re.search(rf"tl\.debug_barrier\(\)\s+tmp\d+ = tl\.load\({stored} ", codes[0].split("for r0_offset")[2])


def toy_model() -> Glm4Moe:
    model = Glm4Moe(RECIPE)
    model.init_weights(torch.Generator().manual_seed(46))
    return model.bfloat16()


def test_what_cannot_be_compiled_is_refused_by_name():
    resources = RESOURCES.model_copy(update={"compile_layers": True, "zero_stage": 3, "recompute": "selective"})
    reasons = unavailable_training(small_recipe(), resources)
    assert [reason.split(": ")[1].split()[0] for reason in reasons] == ["a", "torch", "zero_stage", "recompute"]
    assert all(reason.endswith(", or compile_layers to false") for reason in reasons)
    on_gpu = resources.model_copy(update={"device": "cuda", "zero_stage": 1, "recompute": "full"})
    assert unavailable_training(small_recipe(dtype="bfloat16"), on_gpu) == []
    divided = on_gpu.model_copy(update={"tensor_parallel": 2, "num_ranks": 2})
    assert unavailable_training(small_recipe(dtype="bfloat16"), divided) == [
        "compile_layers: tensor_parallel 2 exchanges data inside layers: set tensor_parallel to 1, or compile_layers "
        "to false"
    ]
