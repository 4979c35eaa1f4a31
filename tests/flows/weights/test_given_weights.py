"""A checkpoint of GLM-4.5-Air's shape that transformers wrote, with its tokenizer, and a file of conversations: an
adapter, evaluation, gate, release and report, without documents and without a trained tokenizer."""

from __future__ import annotations

import builtins
import hashlib
import inspect
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from configs.load import load_scale
from configs.schema import served_gguf_type
from flows.stages import choose_stages, refuse_missing_inputs, with_tokenizer_of_start
from model.text.tokenizer_layout import PUBLISHED_PRETOKENIZER_PATTERN, SHOWN_TOKENS, SPECIAL_TOKENS
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tests.conftest import ROOT
from tests.support.pipeline import glm46
from tests.support.toy_steps import local_output

NUM_ORDINARY = 960
AIR = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": True,
    "use_qk_norm": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def explained() -> list[tuple[str, str]]:
    """Names and descriptions that differ from one another: what Python says about its own parts."""
    modules = [builtins, inspect, json, textwrap, hashlib]
    named = {name: inspect.getdoc(value) for module in modules for name, value in sorted(vars(module).items())}
    return [(name, text[:300]) for name, text in sorted(named.items()) if text and len(text) > 40]


def write_conversations(path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"What is {name}?"}, {"role": "assistant", "content": text}]}
        for name, text in explained()
    ]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def write_tokenizer(path) -> str:
    """GLM's own layout: its spelling of the pre-tokenizer, its 36 special tokens; returns the sha256."""
    trained = json.loads(train_bpe((text for _, text in explained() for _ in range(2)), NUM_ORDINARY).to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer = Tokenizer(models.BPE(trained["vocab"], merges))
    split = pre_tokenizers.Split(Regex(PUBLISHED_PRETOKENIZER_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=token not in SHOWN_TOKENS) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_checkpoint(directory) -> str:
    """bfloat16, in shards, as transformers writes it: config.json still counts the MTP layer that it leaves out."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = Glm4MoeConfig(**AIR, num_nextn_predict_layers=1, rope_parameters=rope, eos_token_id=[NUM_ORDINARY])
    Glm4MoeForCausalLM(config).save_pretrained(directory.with_name("float32"))
    # Loaded as people load it: router biases stay float32.
    loaded = Glm4MoeForCausalLM.from_pretrained(directory.with_name("float32"), dtype=torch.bfloat16)
    loaded.save_pretrained(directory, max_shard_size="2MB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return write_tokenizer(directory / "tokenizer.json")


def write_scale(path, directory, digest: str, adapter: str = "lora", **resources) -> None:
    """micro with the checkpoint's model and tokenizer, and an adapter trained on conversations alone."""
    scale = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    scale["scale"] = "air_chats"
    scale["data"]["recipe"]["tokenizer"] |= {
        "kind": "given",
        "path": str(directory / "tokenizer.json"),
        "sha256": digest,
    }
    scale["data"]["recipe"]["chats"] |= {"validation_share": 0.3, "max_rejected_share": 0.0}
    scale["release"]["recipe"] |= {"smoke_min_margin": 0.002}  # a model that has hardly learned is seldom sure
    scale["data"]["recipe"]["synthesize"]["num_chats"] = 0
    scale["model"]["recipe"] = AIR | {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "num_nextn_predict_layers": 0}
    scale["courses"] = [course for course in scale["courses"] if course["recipe"]["name"] == "sft"]
    scale["phases"] = [phase for phase in scale["phases"] if phase["name"] == "sft"]
    sft = scale["phases"][0]
    sft["recipe"] |= {"mixture": {"chat": 1.0}, "dtype": "bfloat16"}
    sft["recipe"]["adapter"] |= {"kind": adapter}
    sft["recipe"]["gate"] |= {"max_bits_per_byte": 99.0, "min_choice_accuracy": 0.0, "own_figure": "bits_per_byte"}
    sft["resources"] |= resources
    path.write_text(yaml.safe_dump(scale, sort_keys=False))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """(directory of the checkpoint, file of conversations, scale)."""
    root = tmp_path_factory.mktemp("given")
    digest = write_checkpoint(root / "air")
    write_conversations(root / "chats.jsonl")
    write_scale(root / "air_chats.yaml", root / "air", digest)
    return root / "air", root / "chats.jsonl", root / "air_chats.yaml"


def run(given, home, scale=None, start=None, until="release_model"):
    directory, chats, own = given
    options = ("--data", str(chats), "--from", "sft", "--start", str(start or directory), "--until", until, "--json")
    return glm46("run", str(scale or own), *options, home=home)


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
    home = tmp_path_factory.mktemp("home") / "home"
    ended = run(given, home)
    assert ended.exit_code == 0, ended.stderr
    return ended, home


DATA_STEPS = {
    "import_tokenizer",
    "ingest_documents",
    "synthesize_problems",
    "verify_solutions",
    "vary_problems",
    "collect_chats",
    "shard_chats",
    "select_evaluation_items",
    "measure_contamination",
    "pack sft",
}


@pytest.mark.long
def test_a_model_of_others_is_tuned_on_conversations_released_and_reported(given, finished):
    ended, _ = finished
    outcome = ended.outcome
    assert (outcome["promoted"], outcome["alias"]) == (True, "champion")
    stages = [stage["name"] for stage in outcome["stages"] if stage["digest"] and "contract" not in stage["name"]]
    assert set(stages[: stages.index("import_checkpoint")]) == DATA_STEPS, "no step of documents"
    card = Path(outcome["report"]).with_name("air_chats-model-card.md").read_text()
    assert "| sft | sft, lora of rank 16 |" in card
    assert "bits per byte, chat" in card and "multiple choice | not measured" in card


def released_dir(home: Path) -> Path:
    """The export of the phase that trains an adapter, beside the imported weights and the quantized ones."""
    (directory,) = [path.parent.with_name("hf") for path in home.glob("store/objects/*/*/adapter/adapter_config.json")]
    return directory


@pytest.mark.long
def test_the_adapter_merged_by_peft_is_the_released_model(given, finished):
    _, home = finished
    (adapter,) = [path.parent for path in home.glob("store/objects/*/*/adapter/adapter_config.json")]
    base = Glm4MoeForCausalLM.from_pretrained(given[0], dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()
    released = released_dir(home) / "model.safetensors"
    compared = 0
    for name, tensor in load_file(released).items():
        if re.search(r"self_attn\..*_proj\.weight|shared_experts", name):
            torch.testing.assert_close(tensor, merged[name].bfloat16(), rtol=2**-7, atol=1e-6)
            compared += not before[name].equal(merged[name])
    assert compared == AIR["num_hidden_layers"] * 4 + (AIR["num_hidden_layers"] - 1) * 3


@pytest.mark.long
def test_the_store_holds_names_of_the_given_weights_and_no_copy(given, finished):
    directory, _, _ = given
    _, home = finished
    weights = {path.stat().st_ino for path in directory.glob("*.safetensors")}
    held = [path for path in home.glob("store/objects/*/*/*/*.safetensors") if path.stat().st_ino in weights]
    assert len(held) == len(weights) and {path.parent.name for path in held} == {"hf"}
    assert {path.stat().st_mode & 0o777 for path in directory.glob("*.safetensors")} == {0o600}


@pytest.mark.long
def test_the_model_that_it_made_is_entered_as_any_other(given, finished):
    """Its export has the tokenizer of the data and a config.json that needs no change."""
    _, home = finished
    exported = released_dir(home)
    again = run(given, home, start=exported, until="sft")
    assert again.exit_code == 0, again.stderr
    assert again.computed[0] == "import_checkpoint" and "train sft" in again.computed


@pytest.mark.long
def test_all_of_its_weights_are_tuned_as_well(given, tmp_path):
    directory, _, own = given
    digest = yaml.safe_load(own.read_text())["data"]["recipe"]["tokenizer"]["sha256"]
    write_scale(tmp_path / "mine.yaml", directory, digest, adapter="none")
    ended = run(given, tmp_path / "home", scale=tmp_path / "mine.yaml", until="sft")
    assert ended.exit_code == 0, ended.stderr


@pytest.mark.long
def test_four_ranks_read_their_shares_of_it_and_learn_the_same(given, finished, tmp_path):
    directory, _, own = given
    digest = yaml.safe_load(own.read_text())["data"]["recipe"]["tokenizer"]["sha256"]
    divided = {"num_ranks": 4, "ranks_per_node": 4, "expert_parallel": 2, "zero_stage": 1, "micro_batch_sequences": 2}
    write_scale(tmp_path / "mine.yaml", directory, digest, **divided)
    ended = run(given, tmp_path / "home", scale=tmp_path / "mine.yaml", until="sft")
    assert ended.exit_code == 0, ended.stderr
    losses = [
        float(re.search(r"lm loss ([\d.]+)", stage["figures"])[1])
        for outcome in (finished[0].outcome, ended.outcome)
        for stage in outcome["stages"]
        if stage["name"] == "train sft"
    ]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


@pytest.mark.parametrize("name", ["air_lora", "recipes/glm45_air_lora", "recipes/glm45_air_sft"])
def test_the_recipes_of_air_read_conversations_alone_make_no_problems_to_train_on_and_serve_16_bits(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr("model.device.refuse_missing_gpu", lambda rank: None)
    scale = load_scale(name)
    window = choose_stages(scale, None, "champion", None)
    assert [phase.name for phase in window.phases] == ["sft"] and not window.reads_documents
    problems = synthesize_problems(recipe=scale.data.recipe.synthesize, output=local_output(tmp_path))
    made = (sum(problems.training_problems_by_family.values()), problems.num_evaluation_problems, problems.num_prompts)
    assert made == (1, 2000, 1)
    assert served_gguf_type(scale.release.recipe.gguf_types) == "BF16" and scale.phases[0].recipe.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/nowhere/tokenizer.json"}, "/nowhere/tokenizer.json is no file: name the tokenizer.json of"),
        ({"sha256": "0" * 64}, f"the configuration {'0' * 64}: name the file that is meant"),
        ({"num_ordinary_tokens": 900}, "num_ordinary_tokens is 900, "),
        ({"kind": "bpe"}, "go together and with kind given, kind is bpe"),
    ],
)
def test_a_wrong_given_tokenizer_is_refused_before_anything_starts(change, message, given, tmp_path):
    scale = yaml.safe_load(given[2].read_text())
    scale["data"]["recipe"]["tokenizer"] |= change
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(scale))
    refused = run(given, tmp_path / "home", scale=tmp_path / "mine.yaml")
    assert refused.exit_code == 2 and message in refused.stderr, refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1 and not (tmp_path / "home" / "prefect").exists()


def test_the_tokenizer_of_the_start_needs_no_path_and_documents_that_are_not_read_choose_nothing(given, tmp_path):
    directory, chats, own = given
    named = load_scale(str(own))
    text = own.read_text().replace(str(directory / "tokenizer.json"), "''")
    (tmp_path / "mine.yaml").write_text(text.replace(named.data.recipe.tokenizer.sha256, "''"))
    scale = load_scale(str(tmp_path / "mine.yaml"))
    assert with_tokenizer_of_start(scale, str(directory)) == named == with_tokenizer_of_start(named, "elsewhere")
    window = choose_stages(scale, "sft", "champion", None)
    assert not window.reads_documents and choose_stages(scale, None, "champion", None) == window
    best = yaml.safe_load(own.read_text())
    best["phases"][0]["recipe"]["validation"]["keep"] = "best"
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(best))
    chooser = load_scale(str(tmp_path / "best.yaml"))
    with pytest.raises(ValueError, match=r"phase sft: validation\.keep best chooses weights by held-out documents"):
        refuse_missing_inputs(chooser, choose_stages(chooser, "sft", "champion", None), str(chats))
    with pytest.raises(ValueError, match=r"no file is named: set tokenizer\.path and sha256, or name with --start"):
        refuse_missing_inputs(with_tokenizer_of_start(scale, "champion"), window, str(chats))


def test_a_start_with_another_tokenizer_or_an_mtp_layer_that_it_lacks_is_refused(given, tmp_path):
    directory, _, own = given
    shutil.copytree(directory, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    refused = run(given, tmp_path / "home", start=tmp_path / "other")
    assert refused.exit_code == 2 and "other: its tokenizer.json is not the one" in refused.stderr
    scale = yaml.safe_load(own.read_text())
    scale["model"]["recipe"]["num_nextn_predict_layers"] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(scale))
    refused = run(given, tmp_path / "home", scale=tmp_path / "mine.yaml")
    assert refused.exit_code == 2 and "holds no MTP layer" in refused.stderr
    (next(tmp_path.glob("other/model-00002*"))).unlink()
    shutil.copyfile(directory / "tokenizer.json", tmp_path / "other" / "tokenizer.json")
    refused = run(given, tmp_path / "home", start=tmp_path / "other")
    assert refused.exit_code == 2 and "the checkpoint is incomplete" in refused.stderr


def test_conversations_that_nobody_named_are_asked_for(given, tmp_path):
    refused = glm46("run", str(given[2]), "--from", "sft", "--start", str(given[0]), home=tmp_path / "home")
    assert refused.exit_code == 2 and "read only conversations: name them with --data FILE" in refused.stderr
