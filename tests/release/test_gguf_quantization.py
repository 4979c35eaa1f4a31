"""GGUF files of 4 to 6 bits: what their tensors are, what the importance matrix is, and what a broken file costs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configs.load import load_scale
from configs.schema import GgufType, ServingResources
from infra.home import Home
from infra.step import Artifact, Output, step
from infra.storage.open_store import open_store
from model.formats.gguf_checkpoint import write_gguf
from model.formats.gguf_importance import measure_importance
from model.formats.gguf_types import quantize
from model.formats.hf_checkpoint import load_model
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.evaluation.engine import document_token_ids, special_token_id
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.release.checkpoint_source import open_source
from tasks.release.convert_to_gguf import GgufFiles
from tasks.release.decide_quantization import Calibrations, QuantizedEvaluations, decide_quantization
from tasks.release.evaluate_gguf import evaluate_gguf
from tasks.release.gguf_comparison import compare_gguf
from tests.support.evaluation_fakes import (
    DOCUMENTS,
    EVALUATION_RESOURCES,
    VOCAB_SIZE,
    commit,
    evaluation_suite,
    toy_tokenizer,
)
from tests.support.evaluation_fakes import RECIPE as ANSWERS
from tests.support.evaluation_fakes import checkpoint as toy_checkpoint
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint

RECIPE = GLM46.model_copy(
    update={
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "num_hidden_layers": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "num_nextn_predict_layers": 1,
    }
)
CALIBRATED: tuple[GgufType, ...] = ("Q6_K", "Q5_K_M", "Q4_K_M")
SERVING = ServingResources(host="127.0.0.1", port=0, context_length=256, num_threads=1, startup_timeout_seconds=30)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    model, end = random_model(RECIPE, std=0.05), special_token_id(toy_tokenizer(), END_OF_TEXT)
    save_checkpoint(model, directory, eos_token_ids=[end], pad_token_id=end, dtype=torch.float32, max_shard_bytes=10**9)
    toy_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(None, Home(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def rows():
    return [document_token_ids(toy_tokenizer(), text)[:60] for text in DOCUMENTS.values()]


@pytest.fixture(scope="module")
def importance(source, rows):
    return measure_importance(load_model(source), rows)


@pytest.fixture(scope="module")
def files(source, importance, tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    weights = {name: values.numpy() for name, values in importance.columns.items()}
    paths: dict[GgufType, Path] = {gguf_type: directory / f"{gguf_type}.gguf" for gguf_type in ("F32", *CALIBRATED)}
    for gguf_type, path in paths.items():
        write_gguf(source, source / "tokenizer.json", path, gguf_type=gguf_type, name="toy", importance=weights)
    return paths


def test_the_importance_of_every_expert_is_the_mean_square_of_its_inputs(source, rows, importance):
    """Against a forward pass over all tokens by hand, whatever the router chose; its own choices are counted."""
    model, seen = load_model(source), []
    moe: Any = model.model.layers[3].mlp
    moe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
        tokens_TD = torch.cat(seen)
        torch.testing.assert_close(importance.columns["blk.3.ffn_up_exps.weight"], tokens_TD.square().mean(0))
        for expert in range(4):
            gate, up = (getattr(moe.experts, f"{kind}_proj")[expert] for kind in ("gate", "up"))
            product = F.silu(tokens_TD @ gate.T) * (tokens_TD @ up.T)
            measured = importance.columns["blk.3.ffn_down_exps.weight"][expert]
            torch.testing.assert_close(measured, product.square().mean(0), rtol=1e-4, atol=1e-9)
        chosen = torch.cat([moe.gate(tokens)[0] for tokens in seen]).flatten().bincount(minlength=4)
    num_dense = RECIPE.first_k_dense_replace
    assert importance.routed_LE[3 - num_dense].tolist() == chosen.tolist()
    assert importance.num_tokens == sum(map(len, rows)) == int(importance.routed_LE[0].sum())


def test_an_expert_that_no_token_reaches_is_named(source, rows, importance):
    assert importance.coverage.least_routed_tokens == int(importance.routed_LE.min())
    model, layer = load_model(source), RECIPE.first_k_dense_replace
    with torch.no_grad():
        model.get_buffer(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")[1] = -100.0
    starved = measure_importance(model, rows)
    assert starved.coverage.idle_experts == (f"model.layers.{layer}.mlp.experts.1",)
    assert starved.coverage.num_experts == starved.routed_LE.numel() and starved.num_tokens == sum(map(len, rows))


def test_an_expert_without_inputs_is_refused_by_number(source, rows):
    model = load_model(source)
    moe: Any = model.model.layers[3].mlp
    with torch.no_grad():
        moe.experts.up_proj[2].zero_()
    with pytest.raises(
        ValueError, match=r"blk\.3\.ffn_down_exps\.weight: the inputs of expert 2 are zero or not finite"
    ):
        measure_importance(model, rows)


@pytest.mark.parametrize("gguf_type", CALIBRATED)
def test_every_tensor_is_accounted_for_in_its_type(source, files, gguf_type):
    """Layers of 8: the eighth, the third and the seventh have more bits, as in llama.cpp. Rows of 128 are no
    super-blocks."""
    compared = compare_gguf(files[gguf_type], open_source(source))
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(files[gguf_type]).tensors}
    assert sum(compared.types.values()) == len(types)
    assert compared.num_equal + compared.num_rounded == len(open_source(source).shapes)
    matrix, short = {"Q6_K": ("Q6_K", "Q8_0"), "Q5_K_M": ("Q5_K", "Q5_1"), "Q4_K_M": ("Q4_K", "Q5_0")}[gguf_type]
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0"
    assert all(
        kind == "F32"
        for name, kind in types.items()
        if name.endswith(("inp.weight", "bias", "norm.weight", "eh_proj.weight"))
    )
    drafting = {kind for name, kind in types.items() if name.startswith("blk.8.")}
    assert drafting == {"Q8_0", "F32"} and types["blk.8.nextn.eh_proj.weight"] == "F32"
    for layer in range(8):
        more = layer in (0, 3, 6, 7)
        assert types[f"blk.{layer}.attn_q.weight"] == matrix
        assert types[f"blk.{layer}.attn_v.weight"] == ("Q6_K" if more else matrix)
        if layer >= RECIPE.first_k_dense_replace:
            assert types[f"blk.{layer}.ffn_up_exps.weight"] == matrix
            assert types[f"blk.{layer}.ffn_down_exps.weight"] == ("Q8_0" if more else short)


def test_importance_lowers_the_error_where_inputs_are_large():
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(64, 256)).astype(np.float32)
    columns = np.exp(generator.normal(scale=2, size=256)).astype(np.float32)
    inputs = generator.normal(size=(512, 256)).astype(np.float32) * np.sqrt(columns)
    errors = {}
    for importance in (None, columns):
        stored = gguf.GGMLQuantizationType.Q4_K
        found = gguf.dequantize(quantize(weights, stored, importance), stored)
        errors[importance is None] = float(np.square(inputs @ (found - weights).T).mean())
    assert errors[False] < 0.8 * errors[True]


@pytest.mark.parametrize("stored", ["Q8_0", "F16", "BF16"])
def test_llama_cpp_rounds_as_the_definition_of_the_format_says(stored):
    array = np.random.default_rng(1).normal(size=(3, 8, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[stored]
    assert quantize(array, kind, None).tobytes() == gguf.quantize(array, kind).tobytes()


def test_a_calibrated_type_without_importance_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match=r"Q4_K_M needs the importance of blk\.0\..* and \d+ more matrices"):
        write_gguf(source, source / "tokenizer.json", tmp_path / "m.gguf", gguf_type="Q4_K_M", name="toy")
    assert not (tmp_path / "m.gguf").exists()


def damaged(path, target, name, edit):
    """A copy of a file with the bytes of one tensor edited."""
    shutil.copyfile(path, target)
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    data = np.memmap(target, dtype=np.uint8, mode="r+", offset=int(tensor.data_offset), shape=(int(tensor.n_bytes),))
    data[:] = edit(np.array(data))
    data.flush()
    return target


def test_a_tensor_of_other_weights_is_an_error(source, files, tmp_path):
    """Blocks in another order: the right size and type, the wrong matrix."""
    broken = damaged(files["Q4_K_M"], tmp_path / "m.gguf", "blk.4.attn_q.weight", lambda data: np.roll(data, 144 * 7))
    with pytest.raises(RuntimeError, match=r"blk\.4\.attn_q\.weight differs from model\.layers\.4\.self_attn\.q_proj"):
        compare_gguf(broken, open_source(source))


def test_a_format_that_loses_too_much_is_refused_by_name(store):
    """Each type by its own bound: 4 bits may lose more. The toy file whose head was shuffled is measured for real."""
    recipe = load_scale("micro").release.recipe.model_copy(
        update={
            "gguf_types": ("F32", "Q6_K", "Q4_K_M"),
            "num_quantization_documents": 2,
            "max_quantization_document_tokens": 16,
            "max_quantization_bits_per_byte": 0.02,
            "max_4_bit_bits_per_byte": 0.3,
        }
    )
    trained, texts = toy_checkpoint(store, "trained"), evaluation_suite(store)
    answered = {"checkpoint": trained, "suite": texts, "recipe": ANSWERS, "resources": EVALUATION_RESOURCES}
    own = commit(store, evaluate_checkpoint, **answered)

    def measured(name, edit):
        @step(content=("*.gguf",))
        def convert_to_gguf(*, checkpoint: Artifact, output: Output) -> GgufFiles:
            hf = checkpoint.directory("hf")
            for gguf_type in recipe.gguf_types:
                path = output.path(f"{gguf_type}.gguf")
                write_gguf(hf, hf / "tokenizer.json", path, gguf_type="F32", name="toy")
            damaged(path, path.with_suffix(".tmp"), "output.weight", edit)
            path.with_suffix(".tmp").rename(path)
            names = {gguf_type: f"{gguf_type}.gguf" for gguf_type in recipe.gguf_types}
            return GgufFiles(
                checkpoint_digest="",
                file_names=names,
                num_bytes={},
                tensor_types={},
                largest_rounding={},
                num_calibration_tokens=0,
            )

        given = {"checkpoint": trained, "suite": texts, "evaluation": own, "resources": SERVING}
        given |= {"recipe": recipe.format_recipe(ANSWERS)}
        scores = commit(store, evaluate_gguf, gguf=commit(store, convert_to_gguf, name, checkpoint=trained), **given)
        given = {"quantized": QuantizedEvaluations({}), "calibrations": Calibrations({}), "recipe": recipe}
        return commit(store, decide_quantization, gguf_evaluation=scores, **given).record

    sound, broken = measured("sound", lambda data: data), measured("broken", lambda data: np.roll(data, 4 * 64 * 9))
    assert sound.accepted and [bound.limit for bound in sound.bounds] == [None, 0.02, 0.3]
    assert not broken.accepted and len(broken.refusals) == 1
    assert broken.refusals[0].startswith("bits per byte that Q4_K_M loses against F32 5.")
    assert ", at most 0.3 allowed (95 % interval " in broken.refusals[0], "of two documents a wide one"
