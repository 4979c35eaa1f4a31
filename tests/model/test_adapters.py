"""Adapters against merged weights, autograd through them, and PEFT on transformers' model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from configs.schema import AdapterRecipe
from model.architecture.adapters import (
    AdaptedLinear,
    add_adapters,
    is_frozen,
    merged_weight,
    scaling_of,
    without_adapters,
)
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes, to_checkpoint_tensors
from tasks.training.state import export
from tasks.training.state.adapter_export import MergedTensors, write_adapter
from tasks.training.state.tensor_sources import FreshAdapters, StateFiles
from tests.support.model_recipes import AIR, GLM46, random_model
from tests.support.saved_models import from_checkpoint_tensors, save_checkpoint

EVERYTHING = ("attention", "dense_mlp", "shared_experts", "routed_experts")
LORA = AdapterRecipe(kind="lora", rank=3, alpha=6.0, dropout=0.0, targets=EVERYTHING)
DORA = AdapterRecipe(kind="dora", rank=3, alpha=6.0, dropout=0.0, targets=("attention",))
ADAPTERS = {
    "lora": LORA,
    "dora": DORA,
    "experts only": LORA.model_copy(update={"targets": ("routed_experts",)}),
    "dense and attention": LORA.model_copy(update={"targets": ("attention", "dense_mlp")}),
    "shared only": LORA.model_copy(update={"targets": ("shared_experts",)}),
}
FAMILIES = {"glm46": GLM46, "air": AIR}
TOKENS_BT = torch.randint(GLM46.vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))


def adapted_model(recipe, adapter, *, is_fresh=False, std=0.2) -> Glm4Moe:
    """A random model whose adapters are random too, or as training starts."""
    model = random_model(recipe, std=std)
    weights = to_checkpoint_tensors(model.state_dict())
    add_adapters(model, adapter)
    fresh = FreshAdapters(checkpoint_shapes(model), Weights(weights), seed=5)
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, tensor in to_checkpoint_tensors(model.state_dict()).items():
            if name in fresh.names():
                tensor.copy_(fresh.read(name, tensor.shape))
                if not is_fresh:
                    tensor.add_(torch.empty_like(tensor).normal_(0.0, 0.1, generator=draw))
    return model


class Weights:
    """Tensors in memory, as a source."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return set(self.tensors)

    def read(self, name, shape):
        assert self.tensors[name].shape == shape
        return self.tensors[name]


def saved(model, adapter, directory, scaling: float | None = None) -> MergedTensors:
    """The adapter as a checkpoint and in PEFT's format (directory/adapter), and what merges it."""
    tensors = to_checkpoint_tensors(model.state_dict())
    own = {name: tensor.clone() for name, tensor in tensors.items() if ".lora_" in name}
    save_file(own, directory / "master-00001.safetensors")
    frozen = {name: tensor for name, tensor in tensors.items() if name not in own}
    files = StateFiles(directory, "master")
    write_adapter(files, adapter, "0" * 64, directory / "adapter")
    shapes = {name: each.shape for name, each in frozen.items()}
    return MergedTensors(Weights(frozen), shapes, files, scaling_of(adapter) if scaling is None else scaling)


def written(model, adapter, directory) -> dict[str, torch.Tensor]:
    """The merged tensors of an adapter that was saved."""
    merged = saved(model, adapter, directory)
    return {name: merged.tensor(name) for name in merged.shapes}


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_a_fresh_adapter_computes_what_the_model_computes(recipe, adapter):
    expected = random_model(recipe)(TOKENS_BT).logits_BTV
    model = adapted_model(recipe, adapter, is_fresh=True)
    torch.testing.assert_close(model(TOKENS_BT).logits_BTV, expected, rtol=1e-5, atol=1e-5)
    assert is_frozen(model) and not is_frozen(random_model(recipe))


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_merged_weights_compute_what_the_adapter_computes(recipe, adapter, tmp_path):
    model = adapted_model(recipe, adapter)
    expected = model(TOKENS_BT).logits_BTV
    assert (expected - random_model(recipe)(TOKENS_BT).logits_BTV).abs().max() > 0.1  # the adapter does something
    merged = Glm4Moe(recipe)
    merged.load_state_dict(from_checkpoint_tensors(written(model, adapter, tmp_path)))
    torch.testing.assert_close(merged(TOKENS_BT).logits_BTV, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_a_phase_ends_where_the_merge_is_not_what_was_trained(recipe, adapter, tmp_path, monkeypatch):
    model, job = (
        adapted_model(recipe, adapter, std=0.05),
        SimpleNamespace(recipe=SimpleNamespace(model=recipe, adapter=adapter, phase="sft")),
    )
    for wrong in (0.0, 0.001):
        directory = tmp_path / str(wrong)
        directory.mkdir()
        merged = saved(model, adapter, directory, scaling_of(adapter) * (1 + wrong))
        monkeypatch.setattr(export, "merged_tensors", lambda *given, merged=merged: merged)
        if wrong:
            with pytest.raises(ValueError, match=r"phase sft: with the adapter merged in, a logit differs by .*1e-06"):
                export.check_merge(job, None, directory)
        else:
            export.check_merge(job, None, directory)
            assert 0 < json.loads((directory / "merge.json").read_text())["largest_logit_difference"] < 1e-6


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_without_its_adapters_a_model_is_the_frozen_one(adapter):
    model, frozen = adapted_model(GLM46, adapter), random_model(GLM46)
    adapted = model(TOKENS_BT).logits_BTV
    with without_adapters(model):
        torch.testing.assert_close(model(TOKENS_BT).logits_BTV, frozen(TOKENS_BT).logits_BTV, rtol=1e-5, atol=1e-5)
    assert model(TOKENS_BT).logits_BTV.equal(adapted)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_gradients_are_those_of_autograd_through_the_merged_matrices(adapter):
    model = adapted_model(GLM46, adapter)
    own = {
        name: value.detach().clone().requires_grad_() for name, value in model.named_parameters() if value.requires_grad
    }
    assert own and all(".lora_" in name or "_lora_" in name for name in own)
    model(TOKENS_BT, target_ids_BT=TOKENS_BT.roll(-1, 1)).losses.lm.backward()
    plain = random_model(GLM46)
    merged = {name: merge_one(name, value, own, adapter) for name, value in plain.state_dict().items()}
    functional_call(plain, merged, (TOKENS_BT,), {"target_ids_BT": TOKENS_BT.roll(-1, 1)}).losses.lm.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    for name, value in own.items():
        assert value.grad.abs().max() > 0, name
        torch.testing.assert_close(gradients.pop(name), value.grad, rtol=2e-4, atol=2e-5)
    assert all(gradient is None for gradient in gradients.values())


def merge_one(name, weight, own, adapter):
    """W + s B A by plain products, of a stack of experts too; DoRA's norms carry no gradient."""
    stem = name if f"{name}_lora_A" in own else name.removesuffix("weight")
    a, b, magnitude = (
        own.get(stem + end) if stem != name else own.get(name + other)
        for end, other in (("lora_A.weight", "_lora_A"), ("lora_B.weight", "_lora_B"), ("lora_magnitude_vector", ""))
    )
    if a is None:
        return weight
    total = weight + scaling_of(adapter) * (b @ a)
    if stem == name or magnitude is None:
        return total
    return total * (magnitude / total.detach().norm(dim=1)).unsqueeze(1)


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_peft_computes_the_same_logits_from_the_written_adapter(recipe, adapter, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    recipe = recipe.model_copy(update={"num_nextn_predict_layers": 0})
    model = adapted_model(recipe, adapter)
    written(model, adapter, tmp_path)
    save_checkpoint(
        random_model(recipe),
        tmp_path / "hf",
        eos_token_ids=(0,),
        pad_token_id=0,
        dtype=torch.float32,
        max_shard_bytes=1 << 30,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS_BT).logits_BTV, theirs(TOKENS_BT).logits, rtol=1e-4, atol=1e-4)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == adapter.rank
    assert len(saved) == sum(".lora_" in name for name in checkpoint_shapes(model))


def hashed(value: int) -> int:
    """splitmix64's finalizer on integers that are never negative."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31


def stays(seed: int, row: int, position: int, matrix: int, feature: int, rate: float) -> bool:
    golden_ratio = 0x9E3779B97F4A7C15
    key = hashed((hashed((row + seed * golden_ratio) % 2**64) + position * golden_ratio) % 2**64)
    return hashed((key + (feature + matrix * 2**32) * golden_ratio) % 2**64) % 2**24 >= rate * 2**24


def test_dropout_leaves_out_inputs_by_seed_row_position_matrix_and_feature():
    rate, rows_B, seed = 0.3, torch.tensor([5, 2**40]), 46
    adapter = LORA.model_copy(update={"dropout": rate, "targets": ("attention", "dense_mlp")})
    model = random_model(GLM46)
    add_adapters(model, adapter, seed)
    linears = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    last = linears[-1]
    torch.nn.init.normal_(last.lora_A.weight), torch.nn.init.normal_(last.lora_B.weight)
    input_BTI = torch.randn(2, 7, last.in_features, generator=torch.Generator().manual_seed(1))
    kept_BTI = torch.tensor(
        [
            [[stays(seed, row, t, len(linears) - 1, i, rate) for i in range(last.in_features)] for t in range(7)]
            for row in rows_B.tolist()
        ]
    )
    assert kept_BTI.float().mean().item() == pytest.approx(1 - rate, abs=0.05)
    model.begin_rows(rows_B, 7)
    base_BTO = torch.nn.functional.linear(input_BTI, last.weight, last.bias)
    for inputs_BTI, is_trained in ((input_BTI * kept_BTI / (1 - rate), True), (input_BTI, False)):
        added_BTO = inputs_BTI @ last.lora_A.weight.t() @ last.lora_B.weight.t() * scaling_of(adapter)
        last.train(is_trained)
        torch.testing.assert_close(last(input_BTI), base_BTO + added_BTO, rtol=1e-4, atol=1e-5)


def test_the_norms_of_dora_need_no_merged_matrix():
    layer = adapted_model(GLM46, DORA).model.layers[0].self_attn.q_proj
    merged = merged_weight(layer.weight, layer.lora_A.weight, layer.lora_B.weight, None, scaling_of(DORA))
    torch.testing.assert_close(layer._row_norms(), merged.norm(dim=1), rtol=1e-5, atol=1e-6)
