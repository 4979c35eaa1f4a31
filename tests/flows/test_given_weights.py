"""A checkpoint of GLM-4.5-Air's shape that transformers wrote, with its own tokenizer, and a file of conversations: SFT,
evaluation, gate, release and report, without documents and without a trained tokenizer."""

from __future__ import annotations

import builtins
import hashlib
import inspect
import json
import textwrap

import pytest
import torch
import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from model.text.tokenizer_layout import PUBLISHED_PRETOKENIZER_PATTERN, SHOWN_TOKENS, SPECIAL_TOKENS
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tests.conftest import ROOT
from tests.support.pipeline import glm46

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


def write_scale(path, directory, digest: str, **resources) -> None:
    """micro with the checkpoint's model and tokenizer, and SFT on conversations alone."""
    scale = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    scale["scale"] = "air_chats"
    scale["data"]["recipe"]["tokenizer"] |= {
        "kind": "given",
        "path": str(directory / "tokenizer.json"),
        "sha256": digest,
    }
    scale["data"]["recipe"]["chats"] |= {"validation_share": 0.2, "max_rejected_share": 0.0}
    scale["model"]["recipe"] = AIR | {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "num_nextn_predict_layers": 0}
    scale["courses"] = [course for course in scale["courses"] if course["recipe"]["name"] == "sft"]
    scale["courses"][0]["recipe"]["mtp_loss_weight"] = [{"until_share": 1.0, "value": 0.0}]
    scale["phases"] = [phase for phase in scale["phases"] if phase["name"] == "sft"]
    sft = scale["phases"][0]
    sft["recipe"] |= {"mixture": {"chat": 1.0}, "dtype": "bfloat16"}
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
