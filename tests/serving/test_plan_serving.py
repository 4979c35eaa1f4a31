"""The plan of a server: its sum against the tensors themselves, its choices, and each refusal with a way out."""

from __future__ import annotations

import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from configs.load import load_scale
from model.architecture.counts import kv_cache_bytes_per_token
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from tasks.serving.fleet import Fleet, find_fleet, fleet_of
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import SCENARIOS, PlannedModel, Wishes
from tasks.serving.served_bytes import FORMATS, Layout, kv_bytes_per_token, weight_bytes
from tasks.serving.served_model import model_of_gguf, model_of_scale

FULL = model_of_scale(load_scale("full"))
WHOLE = Layout(1, 1, 1, 1)


def held(name: str, size: int, layout: Layout, kv_heads: int) -> float:
    """Elements of a tensor on one GPU, read off its name."""
    if ".mlp.experts." in name:
        return size / (layout.tp * layout.dp)
    if ".k_proj" in name or ".v_proj" in name:
        return size / min(layout.tp, kv_heads)
    divided = (
        "q_proj",
        "o_proj",
        "shared_experts",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "embed",
        "lm_head",
    )
    return size / layout.tp if any(part in name for part in divided) else size


@pytest.mark.parametrize("layout", [WHOLE, Layout(4, 1, 1, 1), Layout(2, 1, 2, 4), Layout(8, 1, 1, 1)])
def test_weights_on_a_gpu_are_those_of_the_checkpoints_tensors(layout):
    recipe = load_scale("scaled_down").model.recipe
    with torch.device("meta"):
        shapes = checkpoint_shapes(Glm4Moe(recipe))
    expected = 2 * sum(held(name, shape.numel(), layout, recipe.num_key_value_heads) for name, shape in shapes.items())
    assert weight_bytes(recipe, FORMATS["bfloat16"], layout, with_mtp=True) == pytest.approx(expected, rel=2e-3)


def test_the_whole_of_glm46_is_what_is_published():
    """714 GB and 376,832 bytes of a token (docs/scale.md counts the same parameters)."""
    recipe = FULL.recipe
    assert weight_bytes(recipe, FORMATS["bfloat16"], WHOLE, with_mtp=True) / 1e9 == pytest.approx(713.6, abs=0.1)
    assert kv_bytes_per_token(recipe, WHOLE, with_mtp=False) == kv_cache_bytes_per_token(recipe) == 376_832
    assert kv_bytes_per_token(recipe, Layout(16, 1, 1, 1), with_mtp=False) == 376_832 / 8, "8 heads, two copies"
    stages = [weight_bytes(recipe, FORMATS["bfloat16"], Layout(8, pp, 1, 1), with_mtp=False) for pp in (1, 2, 4)]
    assert stages[0] / 2 < stages[1] < 0.55 * stages[0] and stages[2] < 0.55 * stages[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("hardware", ["8xH100", "8xH200", "4xA100-80", "2x8xH100", "1xH100"])
@pytest.mark.parametrize("scale", ["full", "air_lora", "tiny"])
def test_what_is_planned_fits_and_divides_the_model(scale, hardware, engine):
    model, fleet = model_of_scale(load_scale(scale)), find_fleet(hardware)
    planned = 0
    for scenario in SCENARIOS:
        for stored in ("bfloat16", "FP8_BLOCK", "W4A16"):
            try:
                plan = plan_serving(replace(model, stored_format=stored), fleet, Wishes(engine, scenario))
            except ValueError as error:
                assert " does not fit " in str(error), error
                continue
            planned, layout = planned + 1, plan.layout
            assert plan.needs.fits and layout.num_gpus <= fleet.num_gpus and layout.tp <= fleet.gpus_per_node
            assert model.recipe.num_attention_heads % layout.tp == 0
            assert model.recipe.n_routed_experts % layout.ep == 0 and (layout.tp * layout.dp) % layout.ep == 0
            rows = model.recipe.moe_intermediate_size * layout.ep / (layout.tp * layout.dp)
            assert rows % (FORMATS[stored].group or 1) == 0
            assert plan.needs.cached_tokens >= plan.context
    assert planned == 9 or scale != "tiny"


def test_scenarios_differ_as_they_say():
    fleet = find_fleet("8xH200")
    plans = {name: plan_serving(FULL, fleet, Wishes("vllm", name, quantization="fp8")) for name in SCENARIOS}
    assert plans["low_latency"].layout == plans["balanced"].layout == Layout(8, 1, 1, 1)
    assert plans["high_throughput"].layout.dp > 1 and plans["high_throughput"].layout.ep == 8
    slots = [plans[name].num_slots for name in ("low_latency", "balanced", "high_throughput")]
    assert slots == sorted(set(slots))
    assert [plans[name].is_drafting for name in SCENARIOS] == [each.is_drafting for each in SCENARIOS.values()]
    undrafted = plan_serving(FULL, fleet, Wishes("vllm", "balanced", quantization="fp8", drafts=False))
    assert undrafted.needs.weights < plans["balanced"].needs.weights, "the MTP layer stays on disk"


def test_a_model_that_does_not_fit_is_refused_with_the_sum_and_changes_that_help():
    fleet, wishes = find_fleet("8xH100"), Wishes("vllm", "balanced")
    with pytest.raises(ValueError) as refused:
        plan_serving(FULL, fleet, wishes)
    text = str(refused.value)
    sums = re.search(
        r"weights ([\d.]+) GB .* tokens ([\d.]+) GB \+ overhead ([\d.]+) GB = ([\d.]+) GB of 73.6 GB", text
    )
    assert sums and sum(map(float, sums.groups()[:3])) == pytest.approx(float(sums[4]), abs=0.11)
    for change in ("--quantization fp8", "a checkpoint of AWQ_W4A16 or GPTQ_W4A16", "2 nodes of 8 x H100"):
        assert change in text
    assert plan_serving(FULL, fleet, replace(wishes, quantization="fp8")).quantization == "fp8"
    assert plan_serving(replace(FULL, stored_format="W4A16"), fleet, wishes).quantization == ""
    assert plan_serving(FULL, find_fleet("2x8xH100"), wishes).num_nodes == 2


def test_the_context_that_is_proposed_is_the_longest_that_fits():
    fleet = fleet_of("H100", 4, 2)
    wishes = Wishes("vllm", "balanced", quantization="fp8", tp=4, pp=2)
    enough = plan_serving(FULL, fleet, wishes).needs
    small = fleet.model_copy(update={"gpu_memory_gb": (enough.total - enough.kv / 2) / 0.92})
    with pytest.raises(ValueError, match=r"It fits with --context \d+;? ?") as refused:
        plan_serving(FULL, small, wishes)
    context = int(re.search(r"--context (\d+)", str(refused.value))[1])
    assert plan_serving(FULL, small, replace(wishes, context=context)).context == context
    with pytest.raises(ValueError, match="does not fit"):
        plan_serving(FULL, small, replace(wishes, context=context + 1024))


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"tp": 2, "pp": 4}, r"weights 91\.3 GB .* does not fit|does not fit 8 x H100"),
        ({"tp": 5}, r"tp 5 does not divide num_attention_heads \(96\)"),
        ({"tp": 16}, "needs 16 GPUs of 8"),
        ({"pp": 9}, "needs 9 GPUs of 8"),
        ({"ep": 3}, r"ep 3 must be 1 or tp x dp \(1\) in vllm"),
        ({"engine": "sglang", "tp": 8, "ep": 3}, r"ep 3 must be a divisor of tp x dp \(8\) in sglang"),
        ({"drafts": True, "pp": 2}, "drafts with pp 2 are not planned: set pp to 1"),
        ({"context": 202753}, r"--context 202753 exceeds max_position_embeddings of glm46-full \(202752\): lower it"),
        ({"quantization": "awq"}, "--quantization awq: engines round to fp8 while they load"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(wishes, message):
    with pytest.raises(ValueError, match=message):
        plan_serving(FULL, find_fleet("8xH100"), Wishes(**{"engine": "vllm", "scenario": "balanced", **wishes}))


def test_groups_of_128_keep_experts_whole():
    """A GPU's part of 1,536 rows is 192, which AWQ's and GPTQ's groups do not divide."""
    four_bit, fleet = replace(FULL, stored_format="W4A16"), find_fleet("8xH100")
    assert plan_serving(four_bit, fleet, Wishes("vllm", "balanced", quantization="awq")).layout == Layout(8, 1, 1, 8)
    with pytest.raises(ValueError, match=r"192 rows of an expert on a GPU are no multiple of 128 \(W4A16\): raise ep"):
        plan_serving(four_bit, fleet, Wishes("vllm", "balanced", tp=8, ep=1))
    assert plan_serving(four_bit, find_fleet("4xA100-80"), Wishes("vllm", "balanced")).layout == Layout(4, 1, 1, 1)
    with pytest.raises(ValueError, match="is stored in W4A16 already: leave --quantization fp8 out"):
        plan_serving(four_bit, fleet, Wishes("vllm", "balanced", quantization="fp8"))


def test_llamacpp_is_planned_for_the_memory_of_its_node():
    recipe = load_scale("tiny").model.recipe
    model = PlannedModel("tiny", recipe, "GGUF", is_chat_trained=True, file_bytes=41_000_000)
    node = Fleet(gpu="none", gpu_memory_gb=0, gpus_per_node=0, num_nodes=1, host_memory_gb=0.4)
    plan = plan_serving(model, node, Wishes("llamacpp", "low_latency", context=1024))
    assert (plan.num_slots, plan.context) == (1, 1024) and plan.needs.fits
    with pytest.raises(
        ValueError, match=r"does not fit no GPU, 0\.4 GB of memory: .*; it fits with --slots (\d+)"
    ) as no:
        plan_serving(model, node, Wishes("llamacpp", "balanced", context=2048, slots=64))
    slots = int(re.search(r"--slots (\d+)", str(no.value))[1])
    assert plan_serving(model, node, Wishes("llamacpp", "balanced", context=2048, slots=slots)).num_slots == slots
    with pytest.raises(ValueError, match="does not fit"):
        plan_serving(model, node, Wishes("llamacpp", "balanced", context=2048, slots=slots + 1))
    with pytest.raises(ValueError, match="--tp divides GPUs, and llamacpp serves on processors here"):
        plan_serving(model, node, Wishes("llamacpp", "balanced", tp=2))
    with pytest.raises(ValueError, match=r"host_memory_gb of 8 x H100 .* is not known, and llamacpp uses it"):
        plan_serving(model, find_fleet("8xH100"), Wishes("llamacpp", "balanced"))
    with pytest.raises(ValueError, match="sglang is planned for GPUs, and there is no GPU"):
        plan_serving(FULL, node, Wishes("sglang", "balanced"))


def test_a_file_of_other_programs_is_planned_with_all_of_its_parts(tmp_path):
    """llama.cpp's converter names no vocab_size, and its gguf-split leaves parts that are opened by the first."""
    names = [f"GLM-4.5-Air-Q4_K_M-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "glm4moe")
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        writer.add_embedding_length(64)
        writer.add_context_length(512)
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_head_count_kv(2)
        writer.add_key_length(16)
        writer.add_token_list([f"token{each}" for each in range(7)])
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        writer.add_tensor("a", np.zeros(1000 * (number + 1), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first, second = (tmp_path / name for name in names)
    model = model_of_gguf("air", first)
    assert (model.recipe.vocab_size, model.recipe.num_hidden_layers) == (7, 2)
    assert model.file_bytes == first.stat().st_size + second.stat().st_size > 12_000
    with pytest.raises(ValueError, match=r"is one of 2 parts: name the first, which ends in -00001-of-00002\.gguf"):
        model_of_gguf("air", second)
    second.unlink()
    with pytest.raises(ValueError, match="copy the others beside it"):
        model_of_gguf("air", first)


def test_vllm_is_planned_for_processors_in_float32_with_whole_pages_of_every_slot():
    recipe = load_scale("tiny").model.recipe
    model = PlannedModel("tiny", recipe, "bfloat16", is_chat_trained=True)
    node = Fleet(gpu="none", gpu_memory_gb=0, gpus_per_node=0, num_nodes=1, host_memory_gb=4)
    plan = plan_serving(model, node, Wishes("vllm", "balanced", context=1000))
    with torch.device("meta"):
        shapes = checkpoint_shapes(Glm4Moe(recipe.model_copy(update={"num_nextn_predict_layers": 0})))
    assert plan.needs.weights == pytest.approx(4e-9 * sum(shape.numel() for shape in shapes.values()), rel=2e-3)
    assert plan.cache_bytes == (4 * 8 + 1) * 128 * 2 * kv_cache_bytes_per_token(recipe), "8 pages hold 1,000 tokens"
    assert plan.dtype == "float32" and "GPU" not in plan.describe().split("by vllm")[1].replace("no GPU", "")
    with pytest.raises(
        ValueError, match=r"does not fit no GPU, 4\.0 GB of memory: .*; it fits with --slots (\d+)"
    ) as no:
        plan_serving(model, node, Wishes("vllm", "balanced", context=2048, slots=512))
    slots = int(re.search(r"--slots (\d+)", str(no.value))[1])
    assert plan_serving(model, node, Wishes("vllm", "balanced", context=2048, slots=slots)).needs.fits
    with pytest.raises(ValueError, match="plan it for GPUs with --hardware"):
        plan_serving(FULL, node, Wishes("vllm", "balanced"))
    with pytest.raises(ValueError, match="is stored in FP8_DYNAMIC, which vllm serves on GPUs"):
        plan_serving(replace(model, stored_format="FP8_DYNAMIC"), node, Wishes("vllm", "balanced"))
    with pytest.raises(ValueError, match="--drafts of vllm are planned for GPUs"):
        plan_serving(model, node, Wishes("vllm", "balanced", drafts=True))


def test_hardware_is_a_preset_a_file_or_this_machine(tmp_path):
    assert (find_fleet("4xA100-80").gpus_per_node, find_fleet("4xA100-80").gpu_memory_gb) == (4, 80)
    assert find_fleet("2x8xH200").num_gpus == 16 and find_fleet("8xH200 NVL").gpu_memory_gb == 141
    assert find_fleet("none").num_gpus == 0 and find_fleet("none").host_memory_gb > 0
    path = tmp_path / "fleet.yaml"
    lines = "gpu: L40S\ngpu_memory_gb: 48\ngpus_per_node: 4\nnum_nodes: 1\nhost_memory_gb: 512\n"
    path.write_text(lines)
    assert str(find_fleet(str(path))) == "4 x L40S (48 GB each)"
    path.write_text(lines + "gpus: 4\n")
    with pytest.raises(ValueError, match=r"fleet.yaml: gpus: unknown key"):
        find_fleet(str(path))
    for wrong in ("8xB999", "0xH100", "4xA100", "H100"):
        with pytest.raises(ValueError, match=f"no hardware '{wrong}': write 8xH100, .* the GPUs are H100, "):
            find_fleet(wrong)
    with pytest.raises(ValueError, match="name a fleet file that exists"):
        find_fleet(str(tmp_path / "absent.yaml"))


def test_this_machines_gpus_are_asked_of_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor i in 0 1; do echo "$i, NVIDIA H100, 550, 81559, 0, 0, 0x0"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fleet = find_fleet(None)
    assert (fleet.gpu, fleet.num_gpus, fleet.gpu_memory_gb) == ("NVIDIA H100", 2, pytest.approx(85.5, abs=0.1))
    program.unlink()
    assert find_fleet(None).num_gpus == 0
