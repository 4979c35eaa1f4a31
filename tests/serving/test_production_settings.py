"""S0's inference_production.yaml: settings in words of S0's own text; each key is kept, renamed or refused."""

from __future__ import annotations

import re

import pytest

from configs.load import load_scale
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import Wishes
from tasks.serving.production_settings import ARCHITECTURE, HARDWARE, OPTIONS, REFUSED, read_production_settings
from tasks.serving.served_model import model_of_scale
from tests.conftest import ROOT

FULL_PRECISION = """
# Full precision (8× H100 80GB)
bash scripts/deploy_vllm.sh \\
    --model_path /checkpoints/rlhf/final \\
    --tensor_parallel 2 \\
    --pipeline_parallel 4 \\
    --port 8000
"""
QUANTIZED = """
# Quantized (4× A100 48GB)
bash scripts/deploy_vllm.sh \\
    --model_path /checkpoints/rlhf/final \\
    --quantization awq \\
    --tensor_parallel 2 \\
    --pipeline_parallel 2 \\
    --port 8000
"""
HIGH_THROUGHPUT = """
# High-throughput serving (8× H200 NVL)
bash scripts/deploy_sglang.sh \\
    --model_path /checkpoints/rlhf/final \\
    --tp 2 \\
    --dp 2 \\
    --context_length 200000 \\
    --port 30000
"""
SECTIONS = """
model:
  num_layers: 92
  hidden_size: 5120
  num_experts: 160
  num_experts_per_tok: 8

distributed:
  tensor_parallel: 8
  pipeline_parallel: 16
  expert_parallel: 32

hardware:
  num_nodes: 1024
  gpus_per_node: 8
  gpu_type: "H800"
"""
"""All verbatim from S0: three commands, and the sections of training_8192_h800.yaml without `zero_stage`."""


def as_yaml(command: str) -> str:
    """The flags of a command as keys."""
    return "".join(f"{key}: {value}\n" for key, value in re.findall(r"--(\w+) (\S+)", command))


@pytest.fixture
def read(tmp_path):
    def reader(text: str):
        path = tmp_path / "inference_production.yaml"
        path.write_text(text)
        return read_production_settings(path)

    return reader


def test_s0s_commands_are_read(read):
    assert read(as_yaml(FULL_PRECISION)).options == {
        "checkpoint": "/checkpoints/rlhf/final",
        "tp": 2,
        "pp": 4,
        "port": 8000,
    }
    assert read(as_yaml(QUANTIZED)).options["quantization"] == "awq"
    throughput = read(as_yaml(HIGH_THROUGHPUT)).options
    assert (throughput["tp"], throughput["dp"], throughput["context"], throughput["port"]) == (2, 2, 200000, 30000)
    sections = read(SECTIONS)
    assert (sections.options["ep"], sections.fleet.num_gpus, sections.fleet.gpu_memory_gb) == (32, 8192, 80)
    sections.refuse_other_model("x", load_scale("full").model.recipe)
    with pytest.raises(ValueError, match="num_hidden_layers is 92, and the model has 46: correct the file"):
        sections.refuse_other_model("x", load_scale("air_lora").model.recipe)


@pytest.mark.parametrize(
    ("command", "engine", "gpu", "nodes", "told"),
    [
        (FULL_PRECISION, "vllm", "H100", 8, "does not fit 8 x H100"),
        (HIGH_THROUGHPUT + "--pp 1 ", "sglang", "H200 NVL", 8, "weights 18.* no --tp, --pp, --dp, --ep"),
        (QUANTIZED, "vllm", "A100-80", 4, "--quantization awq: engines round to fp8 while they load"),
    ],
)
def test_what_s0_claims_is_refused_with_the_sum(read, command, engine, gpu, nodes, told):
    """714 GB on 640 GB, and on four GPUs; AWQ is a checkpoint's, not an option's."""
    hardware = f"num_nodes: 1\ngpus_per_node: {nodes}\ngpu_type: {gpu}\n"
    settings = read(as_yaml(command) + hardware)
    options = {
        name: settings.options[name]
        for name in ("tp", "pp", "dp", "context", "quantization")
        if name in settings.options
    }
    with pytest.raises(ValueError, match=told):
        plan_serving(model_of_scale(load_scale("full")), settings.fleet, Wishes(engine, "balanced", **options))


def test_what_s0_leaves_open_is_chosen(read):
    """TP 2 and DP 2 are four GPUs of the eight that S0 names: with two stages the model fits."""
    settings = read(as_yaml(HIGH_THROUGHPUT) + "num_nodes: 1\ngpus_per_node: 8\ngpu_type: H200 NVL\n")
    wishes = Wishes("sglang", "high_throughput", tp=2, dp=2, context=200000)
    plan = plan_serving(model_of_scale(load_scale("full")), settings.fleet, wishes)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (2, 2, 2) and plan.needs.fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_type: A100 48GB\nnum_nodes: 1\ngpus_per_node: 4\n", "A100 has 40 or 80 GB, there is none of 48"),
        ("gpu_type: H100\n", "hardware lacks num_nodes, gpus_per_node"),
        ("tp: 2\ntensor_parallel: 2\n", "tensor_parallel repeats --tp: keep one"),
        ("distributed:\n  tp: 2\nmodel:\n  tp: 4\n", "tp is given in two sections"),
        ("distributed:\n  zero_stage: 3\n", "zero_stage: it is of training"),
        ("training:\n  learning_rate: 0.02\n", "training: it is of training"),
        ("api_key: s3cret\n", "api_key: a key in a file is read by others: name its environment variable"),
        ("tensor_paralel: 2\n", "tensor_paralel: unknown key; the keys are engine, scenario, model_path"),
        ("tp: two\n", "tp is 'two': write a number"),
        ("tp: true\n", "tp is True: write a number"),
        ("port: -1\n", "port is -1: write a number"),
        ("engine: tgi\n", "engine is 'tgi': write one of llamacpp, vllm, sglang"),
        ("scenario: fast\n", "scenario is 'fast': write one of high_throughput, balanced, low_latency"),
        ("- tp\n", "holds no settings"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


def test_s1s_words_for_scenarios_are_renamed(read):
    assert read("scenario: high-throughput\n").options["scenario"] == "high_throughput"


def test_the_page_has_a_line_for_each_key():
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    table = text.split("inference_production.yaml")[-1].split("\n## ")[0]
    named = {
        key for line in table.splitlines() if line.startswith("|") for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert named == {*OPTIONS, *HARDWARE, *ARCHITECTURE, *REFUSED}
