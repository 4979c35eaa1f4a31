"""Conversions there and back bit for bit, what is refused, and what a failed one leaves."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Glm4MoeForCausalLM

from configs.schema import ModelRecipe
from infra.storage.store import hash_file
from model.formats.checkpoint_names import checkpoint_names
from model.formats.hf_checkpoint import VOCABULARY_KEY
from model.formats.safetensors_writer import write_safetensors
from model.generation.generation import Sampling
from model.text.tokenizer_layout import vocabulary_sha256
from tasks.evaluation.engine import load_engine
from tasks.release.checkpoint_source import open_source
from tasks.release.convert_checkpoint import ConversionCard, TargetFormat, card_path, convert_checkpoint
from tasks.release.generate_text import generate_text
from tasks.training.state.tensor_sources import open_weights
from tests.model.test_gguf import train_tiny_tokenizer
from tests.support.model_recipes import AIR, GLM46, random_model
from tests.support.pipeline import command, environment
from tests.support.saved_models import save_checkpoint

SHAPES = {
    # 3 dense layers of 92 and 96 heads on 8; 1 dense layer of 46: the same patterns, fewer and narrower layers.
    "355B": GLM46.model_copy(
        update={"vocab_size": 352, "num_hidden_layers": 5, "first_k_dense_replace": 3, "num_attention_heads": 12}
    ),
    "Air": AIR.model_copy(update={"vocab_size": 352}),
}


def saved(directory: Path, recipe: ModelRecipe, dtype: torch.dtype = torch.bfloat16) -> Path:
    directory.mkdir(parents=True)
    tokenizer = train_tiny_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    save_checkpoint(
        random_model(recipe), directory, eos_token_ids=[end], pad_token_id=end, dtype=dtype, max_shard_bytes=10**6
    )
    return directory


def convert(source: Path, target: Path, to: TargetFormat, **options) -> ConversionCard:
    return convert_checkpoint(open_source(source), target, to, **options)


def digests(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): hash_file(path) for path in directory.rglob("*") if path.is_file()}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("recipe", SHAPES.values(), ids=SHAPES)
def test_there_and_back_is_equal_bit_for_bit(recipe, tmp_path):
    first = saved(tmp_path / "first", recipe)
    start = convert(first, tmp_path / "start", "hf")
    cards = [start]
    for to, number in (("native", 1), ("megatron", 2)):
        cards.append(convert(first, tmp_path / to, to))
        cards.append(convert(tmp_path / to, tmp_path / f"back{number}", "hf"))
        assert digests(tmp_path / f"back{number}") == digests(tmp_path / "start")
    assert {card.tensors_sha256 for card in cards} == {start.tensors_sha256}
    differences = [card.largest_logit_differences for card in cards]
    assert {(card.num_equal, each["glm46"]) for card, each in zip(cards, differences, strict=True)} == {
        (start.num_source_tensors, 0.0)
    }
    assert [max(each.values()) < 1e-4 for each in differences] == [True] * len(cards)
    assert [list(each) for each in differences[:2]] == [["glm46", "transformers"], ["glm46"]]
    assert json.loads(card_path(tmp_path / "back1").read_text())["files"] == digests(tmp_path / "back1")


def test_both_layouts_of_the_mtp_layer_and_what_transformers_reads(tmp_path):
    first = saved(tmp_path / "first", SHAPES["355B"])
    convert(first, tmp_path / "4.6", "hf")
    convert(first, tmp_path / "4.5", "hf", mtp_layout="4.5")
    convert(tmp_path / "4.5", tmp_path / "back", "hf")
    assert digests(tmp_path / "back") == digests(tmp_path / "4.6")
    old, new = tensors_of(tmp_path / "4.5"), tensors_of(tmp_path / "4.6")
    assert set(old) - set(new) == {"model.layers.5.embed_tokens.weight", "model.layers.5.shared_head.head.weight"}
    assert torch.equal(old["model.layers.5.shared_head.head.weight"], new["lm_head.weight"])
    theirs = [Glm4MoeForCausalLM.from_pretrained(tmp_path / each, dtype=torch.float32) for each in ("4.5", "4.6")]
    assert torch.equal(*(model(torch.arange(20)[None]).logits for model in theirs))


def test_the_card_says_what_rounding_takes_from_masters(tmp_path):
    """Masters are float32; their config.json names the dtype of what is exported."""
    convert(saved(tmp_path / "first", SHAPES["Air"], torch.float32), tmp_path / "native", "native")
    path = tmp_path / "native" / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    card = convert(tmp_path / "native", tmp_path / "out", "hf")
    before, after = tensors_of(tmp_path / "native" / "handover"), tensors_of(tmp_path / "out")
    lost = {name: float((after[name].float() - each).abs().max() / each.abs().max()) for name, each in before.items()}
    assert (card.num_rounded, card.num_equal) == (sum(map(bool, lost.values())), list(lost.values()).count(0.0))
    assert card.num_rounded > card.num_equal > 0, "norms of ones are equal"
    assert card.largest_rounding == pytest.approx(max(lost.values()), rel=1e-6) and 0 < card.largest_rounding < 2**-8
    models = [Glm4MoeForCausalLM.from_pretrained(tmp_path / each, dtype=torch.float32) for each in ("first", "out")]
    token_ids = torch.randint(0, 352, (1, 32), generator=torch.Generator().manual_seed(0))
    wanted = float((models[0](token_ids).logits - models[1](token_ids).logits).abs().max().detach())
    assert wanted > 1e-4
    assert card.largest_logit_differences == {
        engine: pytest.approx(wanted, rel=0.1) for engine in ("glm46", "transformers")
    }
    assert f"{card.num_rounded:,} rounded" in card.describe(tmp_path / "out")


def test_a_phase_reads_the_hand_over(tmp_path):
    recipe = SHAPES["Air"]
    convert(saved(tmp_path / "first", recipe), tmp_path / "native", "native")
    weights, wanted = open_weights(tmp_path / "native" / "handover", tmp_path, recipe), tensors_of(tmp_path / "first")
    assert weights.names() == set(wanted)
    assert all(torch.equal(weights.read(name, each.shape), each.float()) for name, each in wanted.items())


@pytest.mark.parametrize("gguf_type", ["F32", "BF16", "F16", "Q8_0"])
def test_a_gguf_file_holds_what_its_card_says(gguf_type, tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    card = convert(first, tmp_path / "m.gguf", "gguf", gguf_type=gguf_type)
    assert any(name.startswith("model.layers.3.") for name in tensors_of(first)), "the MTP layer is among them"
    assert card.num_equal + card.num_rounded == card.num_source_tensors == len(tensors_of(first))
    assert list(card.largest_logit_differences) == ["llama.cpp"]
    assert card.largest_logit_differences["llama.cpp"] < (1e-4 if gguf_type == "F32" else 1.0)
    assert (card.num_rounded == 0) == (gguf_type in ("F32", "BF16"))
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert held["blk.1.ffn_up_exps.weight"].tensor_type.name == gguf_type
    names = checkpoint_names("model.layers.1.mlp.experts.up_proj", 8)
    wanted = torch.stack([tensors_of(first)[name].float() for name in names])
    read = held["blk.1.ffn_up_exps.weight"]
    found = torch.from_numpy(gguf.dequantize(read.data.copy(), read.tensor_type).copy())
    assert float((found - wanted).abs().max() / wanted.abs().max()) < (0.01 if gguf_type == "Q8_0" else 1e-3)


def test_streamed_files_are_those_of_the_library(tmp_path):
    tensors = {"b.é": torch.randn(3, 5).bfloat16(), "a": torch.randn(7), "B": torch.zeros(0, 3), "c": torch.tensor(1.0)}
    tensors["d"] = torch.randn(4, 4).half().T.contiguous()
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    layout = {name: (each.shape, each.dtype) for name, each in tensors.items()}
    write_safetensors(tmp_path / "streamed", layout, tensors.__getitem__)
    assert (tmp_path / "library").read_bytes() == (tmp_path / "streamed").read_bytes()


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"tensor {EXPERT} is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}), rf"{EXPERT} has shape \(64, 32\), .*it is transposed"),
        (lambda t: t[EXPERT].view(-1)[7:8].fill_(torch.nan), rf"tensor {EXPERT} has numbers that are not finite"),
        (lambda t: t.update({EXPERT: t[EXPERT].float()}), rf"tensor {EXPERT} is F32 and .* BF16"),
    ],
    ids=["missing", "extra", "transposed", "nan", "dtype"],
)
@pytest.mark.parametrize("to", ["hf", "native", "megatron", "gguf"])
def test_a_damaged_checkpoint_is_refused_by_name_and_leaves_nothing(damage, message, to, tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    (shard,) = [path for path in first.glob("*.safetensors") if EXPERT in load_file(path)]
    tensors = load_file(shard)
    damage(tensors)
    for path in (first / "model.safetensors.index.json", *first.glob("*.safetensors")):
        if path != shard and path.exists():
            tensors |= load_file(path) if path.suffix == ".safetensors" else {}
            path.unlink()
    shard.unlink(missing_ok=True)
    save_file(tensors, first / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        convert(first, tmp_path / ("x.gguf" if to == "gguf" else "x"), to)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    tokenizer.add_tokens([f"more {number}" for number in range(20)])
    tokenizer.save(str(first / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json is the tokenizer of another model: it has 36\d tokens"):
        open_source(first)
    train_tiny_tokenizer().save(str(first / "tokenizer.json"))
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"eos_token_id": [7]}))
    with pytest.raises(ValueError, match=r"ends answers with .* has vocab_size 352, eos_token_id \[7\]"):
        open_source(first)


def test_a_tokenizer_whose_ids_changed_places_is_refused_also_after_a_conversion(tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {VOCABULARY_KEY: vocabulary_sha256(tokenizer)}))
    convert(first, tmp_path / "native", "native")
    for directory, path in (
        (first, first / "tokenizer.json"),
        (tmp_path / "native", tmp_path / "native/hf/tokenizer.json"),
    ):
        tokenizer.save(str(path), pretty=False)
        open_source(directory)
        values = json.loads(path.read_text())
        ids = values["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        path.write_text(json.dumps(values))
        with pytest.raises(
            ValueError, match=r"tokenizer\.json is the tokenizer of another model: its ids stand for other"
        ):
            open_source(directory)


def test_unsuitable_conversions_are_refused(tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    convert(first, tmp_path / "native", "native")
    for source, target, to, options, message in (
        (first, tmp_path / "native", "hf", {}, "exists: name a new directory"),
        (first, tmp_path / "a" / "b", "hf", {}, "does not exist: make it first"),
        (first, tmp_path / "b", "gguf", {}, "ends in .gguf"),
        (first, tmp_path / "c", "native", {"mtp_layout": "4.5"}, "--mtp-layout 4.5 is one of hf"),
        (tmp_path / "native", tmp_path / "d.gguf", "gguf", {}, "convert it to hf first"),
        (tmp_path / "native", tmp_path / "e", "native", {}, "of format native already"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, target, to, **options)
    with pytest.raises(ValueError, match="is no checkpoint: name a directory with"):
        open_source(tmp_path)


def test_both_answer_alike_piece_by_piece(tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    convert(first, tmp_path / "native", "native")
    pieces = [list(generate_text(path, "Hello", 24, 0.0, 0, False, "cpu")) for path in (first, tmp_path / "native")]
    assert pieces[0] == pieces[1] and len(pieces[0]) > 4
    engine = load_engine(first, weights_version="", batch_sequences=1)
    sampling = Sampling(max_new_tokens=24, temperature=0.9, seed=3)
    (whole,) = engine.generate([[5, 6, 7]], sampling, "").token_ids
    assert list(engine.stream([5, 6, 7], sampling)) == whole
    with pytest.raises(ValueError, match="the model 512 positions: lower --max-tokens"):
        generate_text(first, "Hello", 600, 0.0, 0, False, "cpu")


@pytest.mark.long
@pytest.mark.parametrize("recipe", SHAPES.values(), ids=SHAPES)
def test_megatron_core_reads_the_export_and_computes_the_same_logits(recipe, tmp_path):
    convert(saved(tmp_path / "hf", recipe, torch.float32), tmp_path / "megatron", "megatron")
    words = [sys.executable, "-m", "tests.release.megatron_model", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong_keys"] == [] and found["num_not_loaded"] == 0
    assert found["difference"] < 1e-4


CONVERT_TO_ALL = """
import json, os, sys
from typer.testing import CliRunner
from flows.cli.command import app
source, small = sys.argv[1:]
for to in ("hf", "native", "megatron", "gguf"):
    target = os.path.join(small, "out.gguf" if to == "gguf" else "out")
    done = CliRunner().invoke(app, ["convert", source, target, "--to", to])
    print(json.dumps([to, done.exit_code, done.stderr, os.listdir(small)]))
"""


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, home):
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("a small file system of its own needs a namespace")
    first, small = saved(tmp_path / "first", SHAPES["Air"]), tmp_path / "small"
    small.mkdir()
    words = shlex.join([sys.executable, "-c", CONVERT_TO_ALL, str(first), str(small)])
    inside = f"mount -t tmpfs -o size=400k tmpfs {small}; {words}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside], env=environment(home.root), capture_output=True, text=True, check=False
    )
    ended = {to: rest for to, *rest in map(json.loads, done.stdout.splitlines())}
    assert list(ended) == ["hf", "native", "megatron", "gguf"], done.stderr
    for to, (code, said, left) in ended.items():
        assert (code, left) == (1, []), (to, said, left)
        assert said.startswith(f"glm46: no space left on {small} "), (to, said)


def test_a_disk_without_room_for_the_card_leaves_no_export_without_one(tmp_path, home):
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("a small file system of its own needs a namespace")
    first, small = saved(tmp_path / "first", SHAPES["Air"]), tmp_path / "small"
    small.mkdir()
    convert(first, tmp_path / "out", "native")
    pages = sum(-(-path.stat().st_size // 4096) for path in (tmp_path / "out").rglob("*") if path.is_file())
    words = shlex.join(command("convert", str(first), str(small / "out"), "--to", "native"))
    again = f"mount -o remount,size=100M {small}; {words} --json > /dev/null"
    inside = f"mount -t tmpfs -o size={pages * 4}k tmpfs {small}; {words}; ls -A {small}; {again}; ls -A {small}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside], env=environment(home.root), capture_output=True, text=True, check=False
    )
    assert f"no space left on {small}" in done.stderr, done.stderr
    assert done.stdout.split() == ["out", "out.conversion.json"], "the second attempt writes both"
