"""Matrices in 4 bits against a plain reference, and a model of them against one of the matrices that they stand for."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.func import functional_call

pytest.importorskip("bitsandbytes", reason="bitsandbytes holds weights in 4 bits: pip install 'glm46[qlora]'")

from configs.schema import AdapterRecipe
from model.architecture.adapters import add_adapters, scaling_of
from model.architecture.counts import four_bit_bytes
from model.architecture.four_bit import FourBitMatrices
from model.architecture.four_bit_layers import four_bit_matrices
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_names, checkpoint_shapes, to_checkpoint_tensors
from tasks.training.state.adapter_export import MergedTensors
from tasks.training.state.tensor_sources import FreshAdapters, StateFiles
from tests.model.test_adapters import EVERYTHING, FAMILIES, TOKENS_BT, Weights, merge_one, written
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint

NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""Appendix E of the paper."""
QLORA = AdapterRecipe(kind="qlora", rank=3, alpha=6.0, dropout=0.0, targets=EVERYTHING)
ADAPTERS = {"everything": QLORA, "attention only": QLORA.model_copy(update={"targets": ("attention",)})}
LARGEST_SCALE_ERROR = 0.0075
"""Of a scale in 8 bits, as a share of the range of its 256: half the widest gap between two of their values."""


def quantized(*matrices: torch.Tensor) -> FourBitMatrices:
    held = FourBitMatrices(torch.Size((len(matrices), *matrices[0].shape)), torch.device("cpu"))
    for number, matrix in enumerate(matrices):
        held.put(number, matrix)
    return held


def test_the_values_of_the_code_come_back_as_they_are():
    """Every block has the scale 2, which equals their mean: double quantization loses nothing."""
    matrix_OI = (2 * NF4).repeat(16).view(8, 32)
    held = quantized(matrix_OI)
    assert held.whole(0, torch.float32).equal(matrix_OI)
    codes = torch.stack([held.codes[0] >> 4, held.codes[0] & 15], dim=1).flatten()
    assert codes.tolist() == list(range(16)) * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 64), (64, 32), (24, 66), (96, 1408)])
def test_whole_matrices_are_the_nearest_codes_times_scales_near_the_largest_magnitudes(shape, dtype):
    matrix_OI = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole_OI = quantized(matrix_OI, -matrix_OI).whole(0, torch.float32)
    missing = -matrix_OI.numel() % 64
    blocks = [
        torch.nn.functional.pad(each.flatten().float(), (0, missing)).view(-1, 64) for each in (matrix_OI, whole_OI)
    ]
    largest = blocks[0].abs().amax(1)
    nearest = NF4[(blocks[0] / largest[:, None]).unsqueeze(-1).sub(NF4).abs().argmin(-1)]
    nearest.view(-1)[matrix_OI.numel() :] = 0
    # The largest element has the code 1 or -1, which shows the scale that was kept.
    scales = blocks[1].abs().amax(1)
    torch.testing.assert_close(blocks[1], nearest * scales[:, None], rtol=1e-6, atol=0)
    assert (scales - largest).abs().max() <= LARGEST_SCALE_ERROR * (largest - largest.mean()).abs().max()
    rounded_OI = quantized(matrix_OI).whole(0, torch.bfloat16)
    torch.testing.assert_close(rounded_OI, whole_OI.bfloat16(), rtol=2**-7, atol=0)


def held_in_four_bits(recipe, adapter) -> tuple[Glm4Moe, dict[str, torch.Tensor]]:
    """A random model with random adapters, and its frozen weights under checkpoint names, made whole again."""
    model = random_model(recipe)
    weights = to_checkpoint_tensors({name: tensor.clone() for name, tensor in model.state_dict().items()})
    add_adapters(model, adapter)
    for name, held in four_bit_matrices(model).items():
        for number, each in enumerate(checkpoint_names(name, held.shape[0])):
            held.put(number, weights[each])
            weights[each] = held.whole(number, torch.float32)
    fresh = FreshAdapters(checkpoint_shapes(model), Weights(weights), seed=5)
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, tensor in to_checkpoint_tensors(model.state_dict()).items():
            if name in fresh.names():
                tensor.copy_(fresh.read(name, tensor.shape)).add_(
                    torch.empty_like(tensor).normal_(0, 0.1, generator=draw)
                )
    return model, weights


def plain_model(recipe, weights) -> Glm4Moe:
    """A model of these weights."""
    model = Glm4Moe(recipe)
    tensors = to_checkpoint_tensors(model.state_dict())
    assert tensors.keys() == weights.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
    return model


@pytest.mark.parametrize("recipe", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_logits_and_gradients_are_those_of_lora_on_the_matrices_that_the_codes_stand_for(recipe, adapter):
    model, weights = held_in_four_bits(recipe, adapter)
    own = {
        name: each.detach().clone().requires_grad_() for name, each in model.named_parameters() if each.requires_grad
    }
    plain = plain_model(recipe, weights)
    merged = {name: merge_one(name, value, own, adapter) for name, value in plain.state_dict().items()}
    expected = functional_call(plain, merged, (TOKENS_BT,)).logits_BTV
    torch.testing.assert_close(model(TOKENS_BT).logits_BTV, expected, rtol=1e-4, atol=1e-4)
    model(TOKENS_BT, target_ids_BT=TOKENS_BT.roll(-1, 1)).losses.lm.backward()
    functional_call(plain, merged, (TOKENS_BT,), {"target_ids_BT": TOKENS_BT.roll(-1, 1)}).losses.lm.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    for name, value in own.items():
        assert value.grad.abs().max() > 0, name
        torch.testing.assert_close(gradients.pop(name), value.grad, rtol=2e-4, atol=2e-5)
    assert all(gradient is None for gradient in gradients.values())


def test_the_trunk_takes_a_little_over_4_bits_whatever_is_adapted_and_the_rest_stays():
    whole = random_model(GLM46)
    trunk = {f"model.layers.{number}." for number in range(GLM46.num_hidden_layers)}
    wanted = {
        name: parameter
        for name, parameter in whole.named_parameters()
        if any(name.startswith(prefix) for prefix in trunk) and "_proj" in name and not name.endswith("bias")
    }
    for adapter in ADAPTERS.values():
        model, _ = held_in_four_bits(GLM46, adapter)
        held = four_bit_matrices(model)
        assert held.keys() == wanted.keys()
        for name, each in held.items():
            num_bytes = sum(buffer.nbytes for buffer in each.buffers())
            assert num_bytes == each.shape[0] * four_bit_bytes(each.shape[1] * each.shape[2]), name
            assert num_bytes < 4.2 / 32 * wanted[name].nbytes, name
        kept = {name for name, _ in model.named_parameters() if "lora_" not in name}
        assert kept == {name for name, _ in whole.named_parameters()} - held.keys()
        assert not held.keys() & model.state_dict().keys()
    assert 8 * four_bit_bytes(4096 * 1408) / (4096 * 1408) == pytest.approx(4.127, abs=1e-3)


def test_no_whole_matrix_outlives_its_product():
    model = held_in_four_bits(GLM46, QLORA)[0]
    shapes = {each.shape[1:] for each in four_bit_matrices(model).values()}
    before = [each for each in gc.get_objects() if type(each) is torch.Tensor]  # of other tests; held, so no id is new
    known = {id(each) for each in before}
    loss = model(TOKENS_BT, target_ids_BT=TOKENS_BT).losses.lm
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.is_floating_point()]
    new = [each.shape for each in alive if id(each) not in known]
    assert loss.requires_grad and not [shape for shape in new if shape in shapes and len(shape) == 2]


def test_a_cast_of_the_model_leaves_the_scales_as_they_are():
    model, _ = held_in_four_bits(GLM46, QLORA)
    before = {name: held.whole(0, torch.float32) for name, held in four_bit_matrices(model).items()}
    model.bfloat16()
    assert next(model.parameters()).dtype == torch.bfloat16
    assert all(held.whole(0, torch.float32).equal(before[name]) for name, held in four_bit_matrices(model).items())


def test_peft_and_merged_weights_compute_the_same_logits_from_the_written_adapter(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    recipe = GLM46.model_copy(update={"num_nextn_predict_layers": 0})
    model, weights = held_in_four_bits(recipe, QLORA)
    written(model, QLORA, tmp_path)
    shapes = {name: each.shape for name, each in weights.items()}
    merged = MergedTensors(Weights(weights), shapes, StateFiles(tmp_path, "master"), scaling_of(QLORA))
    exported = plain_model(recipe, {name: merged.tensor(name) for name in weights})
    torch.testing.assert_close(model(TOKENS_BT).logits_BTV, exported(TOKENS_BT).logits_BTV, rtol=1e-5, atol=1e-5)
    save_checkpoint(
        plain_model(recipe, weights),
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
