"""Quantized checkpoints: every tensor is accounted for, read back to what the file says, and measured."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.formats.expert_coverage import ExpertCoverage
from model.formats.hf_checkpoint import load_model
from model.formats.quantized_checkpoint import write_quantized
from model.formats.quantized_model import is_quantized, load_original, load_quantized
from model.generation.generation import InProcessEngine
from model.generation.sampling import Sampling
from tasks.release.routing import chosen_experts
from tasks.release.transformers_engine import TransformersEngine
from tests.support.evaluation_fakes import toy_tokenizer
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint

RECIPE = GLM46.model_copy(
    update={
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
    }
)
FORMATS = ("FP8_DYNAMIC", "FP8_BLOCK", "FP8_EXPERTS", "GPTQ_W4A16", "AWQ_W4A16")
NUM_MATRICES = 4 * 2 + 3 + 3 + 3 * 4
"""Of attention, the dense MLP, the shared expert and the routed experts of two layers."""
NUM_EXPERT_MATRICES = 3 + 3 * 4
ROWS = torch.randint(0, RECIPE.vocab_size, (4, 48), generator=torch.Generator().manual_seed(1)).tolist()


def save_random(directory, dtype=torch.float32, max_shard_bytes=10**9):
    model = random_model(RECIPE, std=0.05)
    save_checkpoint(model, directory, eos_token_ids=[1], pad_token_id=0, dtype=dtype, max_shard_bytes=max_shard_bytes)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    save_random(directory)
    toy_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module", params=FORMATS)
def written(request, source, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, write_quantized(source, directory, request.param, ROWS)


def tensors_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def num_matrices(name):
    """What a format quantizes."""
    return NUM_EXPERT_MATRICES if name == "FP8_EXPERTS" else NUM_MATRICES


def decoded(tensors, name):
    """The matrix that the file says, by the formats' definitions."""
    scale = tensors[f"{name}_scale"].float()
    if name in tensors:  # e4m3
        codes = tensors[name].float()
        height, width = codes.shape
        blocks = scale.repeat_interleave(-(-height // len(scale)), 0).repeat_interleave(-(-width // scale.shape[1]), 1)
        return codes * blocks[:height, :width]
    height, width = tensors[f"{name}_shape"].tolist()
    packed = tensors[f"{name}_packed"]
    codes = torch.stack([packed >> 4 * place & 15 for place in range(8)], -1).view(height, -1)[:, :width]
    zero = torch.full_like(scale, 8.0)
    if f"{name}_zero_point" in tensors:
        points = tensors[f"{name}_zero_point"]
        zero = torch.stack([points >> 4 * place & 15 for place in range(8)], 1).view(-1, points.shape[1])[:height]
    groups = codes.view(height, scale.shape[1], -1).float()
    return ((groups - zero[:, :, None]) * scale[:, :, None]).view(height, width)


def test_every_tensor_is_accounted_for(written, source):
    name, directory, counted = written
    before, after = tensors_of(source), tensors_of(directory)
    assert (counted.num_quantized, counted.num_expert_matrices) == (num_matrices(name), 12)
    assert counted.num_quantized + counted.num_kept + counted.num_rescaled == len(before)
    assert counted.num_rescaled == (3 if name.startswith("AWQ") else 0)
    assert counted.num_calibration_tokens == (0 if name.startswith("FP8") else 4 * 48)
    routed = (0, 0) if name.startswith("FP8") else (4, 4 * 48)
    assert (counted.coverage.num_experts, counted.coverage.least_routed_tokens) == routed, "all four see all tokens"
    kept = ("mlp.gate.weight", "e_score_correction_bias", "embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    kept = [each for each in before if each.endswith(kept) or each.startswith("model.layers.2.")]
    assert any("eh_proj" in each for each in kept)
    assert all(torch.equal(before[each], after[each]) and before[each].dtype == after[each].dtype for each in kept)
    ignored = json.loads((directory / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored and r"re:model\.layers\.2\..*" in ignored


def test_what_is_read_back_is_what_the_file_says(written, source):
    """Also that experts, and not only attention, hold few different values."""
    name, directory, _ = written
    tensors, model = tensors_of(directory), load_quantized(directory)
    matrices = [each.removesuffix("_scale") for each in tensors if each.endswith("weight_scale")]
    assert len(matrices) == num_matrices(name)
    assert all("experts" in each for each in matrices) is (name == "FP8_EXPERTS")
    for each in matrices:
        torch.testing.assert_close(model.get_parameter(each).detach(), decoded(tensors, each), rtol=1e-6, atol=1e-8)
        if "W4" in name:
            assert max(len(row.unique()) for row in model.get_parameter(each).detach()[:, :128]) <= 16
    ids = torch.tensor(ROWS)
    with torch.no_grad():
        before, after = load_original(source)(ids).logits, model(ids).logits
    relative = float((after - before).norm() / before.norm())
    assert 0 < relative < (0.4 if "W4" in name else 0.2), relative


def test_the_unquantized_model_is_ours(source):
    """So a loss is the format's, and not that of another implementation."""
    model = load_model(source)
    ids = torch.tensor(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(load_original(source)(ids).logits, model(ids).logits_BTV, rtol=1e-3, atol=1e-3)


def test_the_unquantized_model_draws_what_our_engine_draws(source):
    """Prompts of several lengths in one batch; so a paired change of pass@1 is the format's too."""
    model = load_model(source)
    ours = InProcessEngine(model, weights_version="v", batch_sequences=3)
    theirs, stops = TransformersEngine(load_original(source), "v"), tuple(range(0, RECIPE.vocab_size, 7))
    prompts = [row[: 5 + 3 * number] for number, row in enumerate(ROWS) for _ in range(2)]
    for temperature in (0.0, 1.0):
        sampling = Sampling(12, temperature, stop_token_ids=stops, seed=3)
        one, two = (engine.generate(prompts, sampling, "v") for engine in (ours, theirs))
        assert one.token_ids == two.token_ids
        assert len({len(row) for row in two.token_ids}) > 1
        for first, second in zip(one.log_probabilities, two.log_probabilities, strict=True):
            assert second == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("name", ["GPTQ_W4A16", "AWQ_W4A16"])
def test_an_expert_that_no_token_reaches_is_named_and_calibrated_all_the_same(name, tmp_path):
    """Against the choices of our own routers; the bias lets one expert starve."""
    model = random_model(RECIPE.model_copy(update={"num_experts_per_tok": 2}), std=0.05)
    with torch.no_grad():
        model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[2] = -100.0
    save_checkpoint(
        model, tmp_path / "hf", eos_token_ids=[1], pad_token_id=0, dtype=torch.float32, max_shard_bytes=10**9
    )
    toy_tokenizer().save(str(tmp_path / "hf" / "tokenizer.json"))
    made = write_quantized(tmp_path / "hf", tmp_path / "out", name, ROWS)
    (chosen,) = torch.cat(chosen_experts(tmp_path / "hf", ROWS, "cpu"), 1)
    counts = chosen.flatten().bincount(minlength=4).tolist()
    assert made.coverage == ExpertCoverage(4, 0, ("model.layers.1.mlp.experts.2",))
    assert counts[2] == 0 and min(counts[:2] + counts[3:]) > 0
    assert made.num_calibration_tokens == 4 * 48 and made.num_expert_matrices == 12


def test_awq_divides_and_multiplies_by_the_same_numbers(source, tmp_path):
    """A norm times the matrix after it stays what it was, up to a step of four bits."""
    write_quantized(source, tmp_path, "AWQ_W4A16", ROWS)
    before, after = tensors_of(source), tensors_of(tmp_path)
    norm, matrix = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(before[norm], after[norm])
    product, expected = decoded(after, matrix) * after[norm], before[matrix] * before[norm]
    assert float((product - expected).norm() / expected.norm()) < 0.12
    untouched = "model.layers.1.post_attention_layernorm.weight"  # the router reads it
    assert torch.equal(before[untouched], after[untouched])


def test_the_same_inputs_give_the_same_bytes(written, source, tmp_path):
    name, directory, _ = written
    write_quantized(source, tmp_path, name, ROWS)
    files = sorted(path.name for path in directory.iterdir())
    assert files == sorted(path.name for path in tmp_path.iterdir())
    assert all((directory / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bf16")
    save_random(directory, dtype=torch.bfloat16)
    toy_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_kept_keeps_its_dtype(name, bf16, tmp_path):
    made = write_quantized(bf16, tmp_path, name, ROWS)
    before, after = tensors_of(bf16), tensors_of(tmp_path)
    kept = [each for each in before if f"{each}_scale" not in after]
    assert len(kept) == made.num_kept + made.num_rescaled == len(before) - made.num_quantized
    assert [each for each in kept if after[each].dtype != before[each].dtype] == []
    assert {before[each].dtype for each in kept} == {torch.bfloat16, torch.float32}, "router biases are float32"
    assert made.num_kept == sum(torch.equal(before[each], after[each]) for each in kept)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    sizes = [sum(path.stat().st_size for path in each.glob("*.safetensors")) for each in (tmp_path, bf16)]
    assert sizes[0] < sizes[1]
    ids = torch.tensor(ROWS)
    with torch.no_grad():
        wanted, found = load_original(bf16)(ids).logits, load_quantized(tmp_path)(ids).logits
    assert 0 < float((found - wanted).norm() / wanted.norm()) < (0.4 if "W4" in name else 0.2)


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "GPTQ_W4A16"])
def test_weights_in_several_files_are_those_of_one(name, source, tmp_path):
    """FP8 has the files of the checkpoint, and another has files of its own size."""
    one, many, parts = tmp_path / "one", tmp_path / "many", tmp_path / "parts"
    save_random(parts, max_shard_bytes=200_000)
    write_quantized(source, one, name, ROWS)
    write_quantized(parts if name == "FP8_DYNAMIC" else source, many, name, ROWS, 200_000)
    assert len(list(many.glob("*.safetensors"))) > 3
    before, after = tensors_of(one), tensors_of(many)
    assert set(before) == set(after) and all(torch.equal(before[each].float(), after[each].float()) for each in before)
    index = json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    held = {path.name: set(load_file(path)) for path in many.glob("*.safetensors")}
    assert {file: {each for each in index if index[each] == file} for file in set(index.values())} == held
    ids = torch.tensor(ROWS)
    with torch.no_grad():
        assert torch.equal(load_quantized(one)(ids).logits, load_quantized(many)(ids).logits)


@pytest.mark.parametrize(
    ("constant", "pattern", "message"),
    [
        ("HEAD", "no_head", "changed 1 tensors .*'lm_head.weight is quantized'"),
        (
            "ROUTER",
            r"re:.*\.mlp\.(gate$|experts\.1\..*)",
            r"changed 3 tensors .*experts\.1\.\w+_proj\.weight is not quantized",
        ),
        ("ROUTER", r"re:.*(mlp\.gate|o_proj)$", r"changed 2 tensors .*o_proj\.weight is not quantized"),
    ],
)
def test_other_matrices_than_those_of_the_format_are_an_error(
    constant, pattern, message, source, tmp_path, monkeypatch
):
    """A rounded head, an expert left whole, attention left whole."""
    monkeypatch.setattr(f"model.formats.quantized_checkpoint.{constant}", pattern)
    with pytest.raises(ValueError, match=f"FP8_DYNAMIC lost or {message}"):
        write_quantized(source, tmp_path, "FP8_DYNAMIC", [])


def test_a_null_is_no_quantization(tmp_path):
    """As both readers of config.json take it: a checkpoint is opened by one of them."""
    for settings, expected in ((None, False), ({"quant_method": "compressed-tensors"}, True)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        assert is_quantized(tmp_path) is expected


def test_a_lost_tensor_is_an_error(written, tmp_path):
    _, directory, _ = written
    tensors = load_file(directory / "model.safetensors")
    lost = next(each for each in tensors if each.endswith("weight_scale"))
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({each: tensor for each, tensor in tensors.items() if each != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors are missing, 0 are unknown"):
        load_quantized(tmp_path)
