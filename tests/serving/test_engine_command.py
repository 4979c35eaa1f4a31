"""The commands of vLLM and SGLang: every name is one that the pinned version has, every value is the plan's."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from configs.load import load_scale
from tasks.serving.engine_command import Place, engine_command, rollout_environment, shell_lines
from tasks.serving.fleet import find_fleet
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import SCENARIOS, Wishes
from tasks.serving.served_model import model_of_scale
from tests.conftest import ROOT

FULL = model_of_scale(load_scale("full"))
SHARED = """--host --port --dtype --served-model-name --quantization --reasoning-parser --tool-call-parser --nnodes
--node-rank"""
NAMES = {
    "vllm": f"""{SHARED} --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --enable-expert-parallel
    --max-model-len --max-num-seqs --gpu-memory-utilization --speculative-config --enable-auto-tool-choice
    --master-addr --master-port --headless""",
    "sglang": f"""{SHARED} --model-path --tp-size --pp-size --attn-dp-size --ep-size --context-length
    --max-running-requests --mem-fraction-static --enable-metrics --speculative-algorithm --speculative-num-steps
    --speculative-eagle-topk --speculative-num-draft-tokens --dist-init-addr --config""",
    "sglang rollouts": """--enable-draft-weights-cpu-backup --enable-dp-lm-head --moe-dense-tp-size""",
}
"""Read in vLLM 0.33.0 (engine/arg_utils.py, entrypoints/common/cli_args.py) and SGLang 0.5.23 (srt/arg_groups/fields,
srt/server_args.py). Another name must be looked up there first."""

ENGINES = ("vllm", "sglang")
PAGE = ROOT.parent / "shared" / "source-documents" / "S3-rl-recipe-glm45.md"
RENAMED = {"--rollout-num-gpus-per-engine": "--tp-size", "--dp-size": "--attn-dp-size", "--enable-dp-attention": ""}
"""S3's arguments by the names of SGLang 0.5.23, whose attention groups are on where there are several."""


def values(command: list[str]) -> dict[str, str]:
    return {word: after for word, after in zip(command, [*command[1:], ""], strict=True) if word.startswith("--")}


def planned(engine: str, hardware: str, scenario: str = "balanced", **more):
    return plan_serving(FULL, find_fleet(hardware), Wishes(engine, scenario, **more))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_argument_is_one_of_the_pinned_version(engine):
    used = set()
    for hardware in ("8xH200", "2x8xH100"):
        for scenario in SCENARIOS:
            for quantization in (None, "fp8"):
                plan = planned(engine, hardware, scenario, quantization=quantization)
                for is_worker in (False, True):
                    key_file = "key.yaml" if engine == "sglang" else ""
                    used |= set(
                        values(engine_command(plan, Place("m", "h", 1, key_file=key_file, is_worker=is_worker)))
                    )
    assert used == set(NAMES[engine].split())


def test_vllm_gets_the_plan():
    plan = planned("vllm", "8xH200", "high_throughput", quantization="fp8", slots=100)
    given = values(engine_command(plan, Place("/models/full", "127.0.0.1", 8123)))
    sizes = [given[f"--{axis}-parallel-size"] for axis in ("tensor", "pipeline", "data")]
    assert sizes == [str(plan.layout.tp), "1", str(plan.layout.dp)] and "--enable-expert-parallel" in given
    assert int(given["--max-num-seqs"]) * plan.layout.dp == 100, "vLLM counts the requests of one group"
    assert given["--max-model-len"] == "202752" and given["--quantization"] == "fp8" and given["--port"] == "8123"
    assert "--speculative-config" not in given
    drafting = values(engine_command(planned("vllm", "8xH200"), Place("m", "h", 1)))
    assert json.loads(drafting["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert drafting["--tool-call-parser"] == drafting["--reasoning-parser"] == "glm45"


def test_sglang_gets_the_plan():
    plan = planned("sglang", "8xH200", "high_throughput", quantization="fp8", slots=100)
    given = values(engine_command(plan, Place("/models/full", "127.0.0.1", 8123, key_file="/private/key.yaml")))
    assert given["--tp-size"] == "8" and given["--attn-dp-size"] == str(plan.layout.dp) and given["--ep-size"] == "8"
    assert given["--max-running-requests"] == "100" and given["--config"] == "/private/key.yaml"
    static = float(given["--mem-fraction-static"]) * plan.fleet.gpu_memory_gb
    assert plan.needs.weights + plan.needs.kv <= static <= plan.needs.usable - plan.needs.overhead


@pytest.mark.skipif(not PAGE.is_file(), reason="needs ../shared/source-documents")
def test_sglang_samples_rollouts_with_the_arguments_of_s3():
    page = PAGE.read_text(encoding="utf-8").split("SGLANG_ARGS=(")[1].split(")")[0]
    words = [word for line in page.splitlines() if not line.strip().startswith("#") for word in line.split()]
    named = {word.replace("--sglang-", "--"): value for word, value in values(words).items()}
    wanted = {RENAMED.get(name, name): "" if value.startswith("--") else value for name, value in named.items()}
    model = model_of_scale(load_scale("recipes/glm45_355b_gspo"))
    wishes = Wishes("sglang", "balanced", tp=8, dp=4, ep=32, context=10_240, rollouts=True)
    plan = plan_serving(model, find_fleet("4x8xH100"), wishes)
    given = values(engine_command(plan, Place("m", "127.0.0.1", 1)))
    assert len(wanted) == 12 and wanted.pop("") == ""
    assert wanted.pop("--speculative-algorithm") == given["--speculative-algorithm"] == "EAGLE"
    for name, value in wanted.items():
        assert name in given and (not value or float(given[name]) == float(value)), name
    assert {*given} <= {*NAMES["sglang"].split(), *NAMES["sglang rollouts"].split()} and given["--nnodes"] == "4"
    static = float(given["--mem-fraction-static"]) * plan.fleet.gpu_memory_gb
    assert plan.needs.weights + plan.needs.kv <= static == pytest.approx(0.7 * 80)
    serving = values(engine_command(planned("sglang", "8xH200"), Place("m", "h", 1)))
    assert not {*NAMES["sglang rollouts"].split()} & {*serving} and serving["--speculative-num-steps"] == "3"
    with pytest.raises(ValueError, match="groups on several nodes, planned for rollouts of sglang only"):
        plan_serving(model, find_fleet("4x8xH100"), replace(wishes, rollouts=False))


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_name_experts_where_they_are_asked_to(engine):
    plans = [planned(engine, "8xH200", context=4096, rollouts=True, routes=routes) for routes in (False, True)]
    words = [engine_command(plan, Place("m", "127.0.0.1", 1)) for plan in plans]
    assert [word for word in words[1] if word not in words[0]] == ["--enable-return-routed-experts"]
    assert len(words[1]) == len(words[0]) + 1
    given = [rollout_environment(plan).get("VLLM_USE_V2_MODEL_RUNNER") for plan in plans]
    assert given == ([None, "1"] if engine == "vllm" else [None, None])
    assert rollout_environment(planned(engine, "8xH200")) == {}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_never_saw_conversations_gets_no_parsers(engine):
    plan = plan_serving(replace(FULL, is_chat_trained=False), find_fleet("8xH200"), Wishes(engine, "balanced"))
    assert not [word for word in engine_command(plan, Place("m", "h", 1)) if "parser" in word or "tool" in word]


def test_the_lines_are_what_a_shell_runs():
    command = engine_command(planned("vllm", "2x8xH100", drafts=False), Place("/a model's", "127.0.0.1", 1))
    script = f"NODE_RANK=1 MASTER_ADDRESS=node0; printf '%s\\n' {shell_lines(command)}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [{"$NODE_RANK": "1", "$MASTER_ADDRESS": "node0"}.get(word, word) for word in command]
    assert shown == expected
    assert all(line.count(" --") == 1 and line.startswith("    --") for line in shell_lines(command).splitlines()[1:])
