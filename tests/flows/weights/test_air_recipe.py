"""The way of a person with GLM-4.5-Air and a file of conversations, with the recipe itself at other sizes: from a
checkpoint that transformers wrote to a promoted model that llama.cpp serves, in one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tasks.release.checkpoint_source import open_source
from tasks.release.convert_checkpoint import merge_adapter
from tasks.training.state.written_adapter import open_adapter
from tests.conftest import ROOT
from tests.flows.weights.test_given_weights import AIR, NUM_ORDINARY, write_checkpoint, write_conversations
from tests.support.pipeline import glm46

RECIPE = ROOT / "configs" / "recipes" / "glm45_air_lora.yaml"
CPU_RANKS = {
    "device": "cpu",
    "num_ranks": 4,
    "ranks_per_node": 4,
    "expert_parallel": 2,
    "node_dir": "",
    "bucket_elements": 5_000_000,
}
SIZES = {
    "data.recipe.tokenizer": {"num_ordinary_tokens": NUM_ORDINARY},
    "data.recipe.chats": {"validation_share": 0.3},
    "data.recipe.synthesize": {"num_evaluation_problems": 40},
    "data.resources": {"master": "local[2]", "driver_memory": "1g", "executor_memory": "1g", "shuffle_partitions": 2},
    "model.recipe": AIR | {"num_nextn_predict_layers": 0},
    "courses.0.recipe": {"start_batch_tokens": 2048, "peak_batch_tokens": 2048},
    "phases.0.recipe": {"num_tokens": 12288, "sequence_length": 256, "num_threads": 1},
    "phases.0.recipe.validation": {"interval_tokens": 12288},
    "phases.0.resources": CPU_RANKS,
    "evaluation.recipe": {
        "sequence_length": 128,
        "num_chat_problems": 20,
        "samples_per_problem": 2,
        "pass_k": 2,
        "max_answer_tokens": 8,
        "num_threads": 2,
    },
    "release.recipe": {"parity_prompts": 8, "num_quantization_documents": 8, "num_answered_problems": 20},
    "serving.resources": {"port": 0, "context_length": 1024, "num_threads": 1, "startup_timeout_seconds": 60},
}
"""What is smaller, by section: everything else is the recipe's."""
UNTRAINED = {
    "evaluation": {"suite": None},
    "phases.0.recipe.gate": {"max_bits_per_byte": 99.0},
    "release.recipe": {"smoke_min_margin": 0.02},
}
"""Weights that nobody trained have no quality and are seldom sure, and a test does not fetch benchmarks."""


def derived(start: Path) -> str:
    """The recipe's text with other sizes. Every key of them is one that it has."""
    tree = yaml.safe_load(RECIPE.read_text())
    for path, values in (*SIZES.items(), *UNTRAINED.items()):
        section = tree
        for key in path.split("."):
            section = section[int(key) if key.isdecimal() else key]
        assert values.keys() <= section.keys(), path
        section |= values
    return yaml.safe_dump(tree, sort_keys=False)


def spread_logits(directory: Path, factor: float) -> None:
    """A model that is surer of its answers."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    path = directory / index["lm_head.weight"]
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * factor}, path, metadata={"format": "pt"})


@pytest.mark.long
def test_the_recipe_of_air_leads_from_its_checkpoint_and_conversations_to_a_served_model(tmp_path):
    start, chats, scale = tmp_path / "air", tmp_path / "chats.jsonl", tmp_path / "mine.yaml"
    write_checkpoint(start)
    spread_logits(start, 8.0)
    write_conversations(chats)
    scale.write_text(derived(start))
    home = tmp_path / "home"
    ended = glm46("run", str(scale), "--data", str(chats), "--start", str(start), "--json", home=home)
    assert ended.exit_code == 0, ended.stderr
    assert (ended.outcome["promoted"], ended.outcome["alias"]) == (True, "champion")
    assert not {"extract_text", "deduplicate_documents", "train_tokenizer"} & set(ended.computed)

    (bf16,) = home.glob("store/objects/*/*/model-BF16.gguf")
    weights = sum(path.stat().st_size for path in start.glob("*.safetensors"))
    assert bf16.stat().st_size == pytest.approx(weights, rel=0.1), "no more bytes than the checkpoint"
    assert not list(home.glob("store/objects/*/*/model-F32.gguf"))
    answer = glm46("chat", "--scale", str(scale), "--prompt", "What is abs?", home=home)
    assert answer.exit_code == 0 and answer.stdout.strip(), answer.stderr

    (adapter_dir,) = [path.parent for path in home.glob("store/objects/*/*/adapter/adapter_config.json")]
    assert open_adapter(adapter_dir, start).names(), "it names the weights of DIR"
    merged = merge_adapter(open_source(start), adapter_dir)
    released = load_file(adapter_dir.with_name("hf") / "model.safetensors")
    assert released.keys() == merged.shapes.keys()
    assert all(tensor.equal(merged.read(name)) for name, tensor in released.items())
