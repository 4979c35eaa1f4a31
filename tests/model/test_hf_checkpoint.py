"""The on-disk layout, both ways against transformers, and what damaged checkpoints say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from configs.schema import ModelRecipe
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import to_checkpoint_tensors
from model.formats.checkpoint_template import checkpoint_template, given_template, renders_otherwise
from model.formats.hf_checkpoint import canonical_config, load_model, load_weights, read_config
from model.text.chat_template import CHAT_TEMPLATE
from tests.conftest import ROOT
from tests.support.model_recipes import AIR, GLM46, random_model
from tests.support.saved_models import from_checkpoint_tensors, save_checkpoint
from tests.support.tolerances import CLOSE_FLOAT32

pytestmark = pytest.mark.usefixtures("clear_routing")

TOKENS = torch.randint(0, GLM46.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))


def save(model: Glm4Moe, directory: Path, *, dtype: torch.dtype = torch.float32, max_shard_bytes: int = 10**9) -> Path:
    save_checkpoint(
        model, directory, eos_token_ids=[300, 307], pad_token_id=300, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    return directory


@pytest.mark.parametrize("recipe", [GLM46, AIR], ids=["glm46", "air"])
def test_our_checkpoint_gives_the_same_logits_and_gradients_in_transformers(
    recipe: ModelRecipe, tmp_path: Path
) -> None:
    model = random_model(recipe)
    theirs = Glm4MoeForCausalLM.from_pretrained(save(model, tmp_path), dtype=torch.float32)
    ours_logits, theirs_logits = model(TOKENS).logits_BTV, theirs(TOKENS).logits
    torch.testing.assert_close(ours_logits, theirs_logits, **CLOSE_FLOAT32)
    ours_logits.square().mean().backward()
    theirs_logits.square().mean().backward()
    torch.testing.assert_close(
        model.model.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad, **CLOSE_FLOAT32
    )
    experts = model.model.layers[1].mlp.experts
    fused = torch.cat([experts.gate_proj.grad, experts.up_proj.grad], dim=1)
    torch.testing.assert_close(fused, theirs.model.layers[1].mlp.experts.gate_up_proj.grad, **CLOSE_FLOAT32)


def test_a_transformers_checkpoint_gives_the_same_logits_here(tmp_path: Path) -> None:
    save(random_model(GLM46.model_copy(update={"num_nextn_predict_layers": 0})), tmp_path / "ours")
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    torch.testing.assert_close(ours(TOKENS).logits_BTV, theirs(TOKENS).logits, **CLOSE_FLOAT32)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rotary_fields_that_disagree_are_resolved_as_transformers_does(theta: float, tmp_path: Path) -> None:
    recipe = GLM46.model_copy(update={"num_nextn_predict_layers": 0})
    save(random_model(recipe), tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    inside = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}
    (tmp_path / "ours" / "config.json").write_text(
        json.dumps(config | {"rope_parameters": inside})
    )  # beside 0.5 at the top level
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    for directory in ("ours", "theirs"):
        ours = load_model(tmp_path / directory)
        assert (ours.recipe.partial_rotary_factor, ours.recipe.rope_theta) == (1.0, theta)
        torch.testing.assert_close(ours(TOKENS).logits_BTV, theirs(TOKENS).logits, **CLOSE_FLOAT32)
    canonical = canonical_config(tmp_path / "theirs")
    assert (
        canonical["rope_theta"] == theta
        and set(ModelRecipe.model_fields) <= set(canonical)
        and "rope_parameters" not in canonical
    )


@pytest.mark.parametrize("max_shard_size", ["1GB", "30KB"], ids=["one file", "shards"])
def test_a_model_that_transformers_saved_without_its_mtp_layer_has_none(max_shard_size: str, tmp_path: Path) -> None:
    save(random_model(GLM46), tmp_path / "ours")
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    ours = load_model(tmp_path / "theirs")
    assert ours.recipe.num_nextn_predict_layers == 0
    torch.testing.assert_close(ours(TOKENS).logits_BTV, theirs(TOKENS).logits, **CLOSE_FLOAT32)
    assert canonical_config(tmp_path / "theirs")["num_nextn_predict_layers"] == 0


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = save(random_model(GLM46), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"config\.json: the weights are quantized \(fp8\): give the same model"):
        read_config(tmp_path)


def test_shared_experts_of_width_0_are_none(tmp_path: Path) -> None:
    recipe = GLM46.model_copy(update={"num_nextn_predict_layers": 0, "n_shared_experts": 0})
    save(random_model(recipe), tmp_path / "ours")
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    assert any(0 in tensor.shape for tensor in load_file(tmp_path / "theirs" / "model.safetensors").values())
    torch.testing.assert_close(
        load_model(tmp_path / "theirs")(TOKENS).logits_BTV, theirs(TOKENS).logits, **CLOSE_FLOAT32
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 4}, "n_group and topk_group must be 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: Input should be False"),
    ],
)
def test_an_architecture_that_is_not_supported_is_named_with_its_file(
    change: dict, message: str, tmp_path: Path
) -> None:
    path = save(random_model(GLM46), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"config\.json: this architecture is not supported: .*{message}") as error:
        read_config(tmp_path)
    assert "pydantic" not in str(error.value)


def test_mtp_layer_equals_transformers_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers knows the MTP layer of the published models by its number, 92 or 46.
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    model = random_model(GLM46)
    theirs = Glm4MoeForCausalLM.from_pretrained(save(model, tmp_path), dtype=torch.float32)
    mtp = MtpModel.from_pretrained(theirs)
    layer = mtp.layers[0]
    hidden = model.hidden_states(TOKENS)[:, :-1]
    embedded = model.model.embed_tokens(TOKENS[:, 1:])
    rotary = model._rotary(TOKENS.shape[1] - 1, 0, TOKENS.device)
    ours = model.model.layers[-1](embedded, hidden, rotary).hidden_BTD
    position_embeddings = tuple(table.unsqueeze(0) for table in rotary)
    expected = layer(embedded, hidden, position_embeddings, None, None, None)
    torch.testing.assert_close(ours, expected, **CLOSE_FLOAT32)


def test_checkpoint_returns_every_tensor_and_equal_bytes(tmp_path: Path) -> None:
    model = random_model(GLM46)
    save(model, tmp_path / "first")
    save(load_model(tmp_path / "first"), tmp_path / "second")
    for path in sorted((tmp_path / "first").iterdir()):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name
    loaded = load_model(tmp_path / "first").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    model = random_model(GLM46)
    save(model, tmp_path, max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert all(path.stat().st_size < 130_000 for path in tmp_path.glob("model-*.safetensors"))
    loaded = load_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    assert Glm4MoeForCausalLM.from_pretrained(tmp_path) is not None


def test_bfloat16_checkpoint_keeps_router_biases_in_float32(tmp_path: Path) -> None:
    tensors = load_file(save(random_model(GLM46), tmp_path, dtype=torch.bfloat16) / "model.safetensors")
    kinds = {name.endswith("e_score_correction_bias"): tensor.dtype for name, tensor in tensors.items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_config_returns_the_recipe_with_the_models_own_rope_theta(tmp_path: Path) -> None:
    model = Glm4Moe(GLM46, rope_theta=5_000.0)
    assert read_config(save(model, tmp_path)) == GLM46.model_copy(update={"rope_theta": 5_000.0})


def with_mtp_copies(directory: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def test_the_mtp_layout_of_glm45_is_read(tmp_path: Path) -> None:
    model = random_model(GLM46)
    tensors = with_mtp_copies(save(model, tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path).lm_head.weight, model.lm_head.weight)


def test_mtp_copies_that_differ_from_the_trunk_are_refused(tmp_path: Path) -> None:
    tensors = with_mtp_copies(save(random_model(GLM46), tmp_path))
    tensors["model.layers.3.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors: model\.layers\.3\.shared_head\.head\.weight differs from lm_head\.weight",
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"), r"experts\.5\.up_proj\.weight is missing"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), r"model\.safetensors: unexpected tensor model\.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model\.safetensors: tensor model\.norm\.weight has shape \(3,\)",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(8).bfloat16()}),
            r"e_score_correction_bias is BF16, must be float32",
        ),
    ],
    ids=["missing", "unexpected", "shape", "bias_dtype"],
)
def test_every_tensor_is_accounted_for(damage, message: str, tmp_path: Path) -> None:
    tensors = load_file(save(random_model(GLM46), tmp_path) / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("kept_bytes", [5, 500, -1], ids=["header", "header_cut", "data_cut"])
def test_a_truncated_file_is_named(kept_bytes: int, tmp_path: Path) -> None:
    path = save(random_model(GLM46), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged .*again"):
        load_weights(Glm4Moe(GLM46), tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    """As where a program writes changed tensors into a file of their own, and leaves the old ones where they were."""
    save(random_model(GLM46), tmp_path, max_shard_bytes=100_000)
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    (name, tensor), *_ = load_file(first).items()
    tensors = load_file(second)
    save_file(tensors | {name: torch.zeros_like(tensor)}, second)
    with pytest.raises(ValueError, match=rf"{second.name} holds {re.escape(name)}: copy the checkpoint again"):
        load_model(tmp_path)
    lost = min(tensors)
    save_file({each: tensors[each] for each in tensors if each != lost}, second)
    with pytest.raises(ValueError, match=rf"{second.name} does not hold {re.escape(lost)}"):
        load_model(tmp_path)


def test_a_single_file_beside_an_index_of_other_files_is_refused(tmp_path: Path) -> None:
    """Which of the two is of an earlier model cannot be seen: transformers takes the file, vLLM the index."""
    save(random_model(GLM46, seed=1), tmp_path, max_shard_bytes=100_000)
    save(random_model(GLM46, seed=2), tmp_path)
    with pytest.raises(ValueError, match=r"holds model\.safetensors and .*json, which names other files: remove"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="names other files"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    kept = load_model(tmp_path).state_dict()
    assert all(tensor.equal(kept[name]) for name, tensor in random_model(GLM46, seed=2).state_dict().items())


def test_an_index_that_names_the_single_file_is_read(tmp_path: Path) -> None:
    names = load_file(save(random_model(GLM46), tmp_path) / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    kept = load_model(tmp_path).state_dict()
    assert all(tensor.equal(kept[name]) for name, tensor in random_model(GLM46).state_dict().items())


@pytest.mark.parametrize("index", [{"metadata": {}}, [], {"weight_map": {"a": 1}}, {"weight_map": {"a": "../b"}}])
def test_a_damaged_index_is_named(index, tmp_path: Path) -> None:
    save(random_model(GLM46), tmp_path, max_shard_bytes=100_000)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json (has no weight_map|holds no JSON object)"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": "fp8"}, "the weights are quantized"),
        ({"rope_parameters": [1]}, "rope_parameters is .1., no object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*only None is supported"),
    ],
)
def test_a_damaged_config_is_named(change: dict, message: str, tmp_path: Path) -> None:
    path = save(random_model(GLM46), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        read_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        read_config(tmp_path)


def test_what_the_files_say_need_not_be_in_the_config(tmp_path: Path) -> None:
    recipe = GLM46.model_copy(update={"num_nextn_predict_layers": 0})
    path = save(random_model(recipe), tmp_path) / "config.json"
    config = json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "default"}}
    del config["num_nextn_predict_layers"]
    is_default = recipe.head_dim == recipe.hidden_size // recipe.num_attention_heads
    config |= {"head_dim": None} if is_default else {}
    path.write_text(json.dumps(config))
    assert read_config(tmp_path) == recipe


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": "a", "tokenizer_config.json": '{"chat_template": "b"}'}, "a"),
        ({"tokenizer_config.json": '{"chat_template": "b"}'}, "b"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "c"}]}'}, "c"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "tools", "template": "c"}]}'}, None),
        ({"tokenizer_config.json": "{}"}, None),
        ({}, None),
    ],
)
def test_the_template_is_found_where_transformers_writes_it(files: dict, template: str | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert checkpoint_template(tmp_path) == template


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (("{%- set thinks", "{%- set other = 1 -%}{%- set thinks"), False),
        (("<|user|>\\n", "<|user|>"), True),
        (("<|observation|>", ""), True),
        (("/nothink' -}}", "/no_think' -}}"), True),
        (("{{- '[gMASK]<sop>' -}}", "{{- raise_exception('no system') -}}"), True),
    ],
)
def test_templates_are_compared_by_what_they_write(changed: tuple[str, str], differs: bool, tmp_path: Path) -> None:
    assert changed[0] in CHAT_TEMPLATE
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(*changed))
    template = given_template(tmp_path)
    assert template is not None and renders_otherwise(template) is differs


def test_a_lost_shard_and_a_foreign_config_are_named(tmp_path: Path) -> None:
    save(random_model(GLM46), tmp_path, max_shard_bytes=100_000)
    next(iter(sorted(tmp_path.glob("model-00002-*")))).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-\d+\.safetensors does not exist"):
        load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama', must be 'glm4_moe'"):
        read_config(tmp_path)


def test_checkpoint_names_map_both_ways_without_copying() -> None:
    state = random_model(GLM46).state_dict()
    tensors = to_checkpoint_tensors(state)
    assert (
        tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].data_ptr()
        == state["model.layers.1.mlp.experts.gate_proj"][3].data_ptr()
    )
    back = from_checkpoint_tensors(tensors)
    assert set(back) == set(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


MEASURE = """
import resource, sys
from pathlib import Path
import torch
from model.formats.hf_checkpoint import load_model

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

load_model(Path(sys.argv[2]))
before = resident()
model = load_model(Path(sys.argv[1]))
size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
print((peak() - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc")
def test_a_checkpoint_of_many_files_is_streamed(tmp_path: Path) -> None:
    recipe = GLM46.model_copy(update={"hidden_size": 384, "moe_intermediate_size": 384, "n_routed_experts": 16})
    save(Glm4Moe(recipe), tmp_path / "large", max_shard_bytes=2_400_000)
    save(Glm4Moe(GLM46), tmp_path / "small")  # loaded first: what loading needs once is not counted
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 30
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large"), str(tmp_path / "small")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(run.stdout) < 1.2
