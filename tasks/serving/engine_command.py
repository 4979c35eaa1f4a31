"""The complete command of a planned server, by the names that vLLM 0.33.0, SGLang 0.5.23 and the pinned llama.cpp give
their arguments.

The key of the clients is on no command line: vLLM and llama.cpp read it from a variable, SGLang a YAML file that
`--config` names.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from infra.code_digest import ROOT
from infra.serving import vllm_worker
from infra.serving.model_server import server_command
from tasks.serving.planned_server import ServingPlan

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23", "llamacpp": version("xllamacpp").split(".")[2]}
"""Whose arguments these are, read in the packages themselves. The version of xllamacpp ends in llama.cpp's build."""
IMAGES = {
    "vllm": "vllm/vllm-openai:v",
    "sglang": "lmsysorg/sglang:v",
    "llamacpp": "ghcr.io/ggml-org/llama.cpp:server-b",
}
"""Where the projects publish their containers; the version ends the tag."""
KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}
"""By which an engine gets the key of its clients; SGLang reads a file."""
ROLLOUT_WORDS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
ROLLOUT_WORDS += ["--worker-extension-cls", f"{vllm_worker.__name__}.{vllm_worker.WeightReader.__name__}"]
"""Token ids in and out, log-probabilities at the sampling's temperature, weights that are read in place."""
NAMED_EXPERTS = ["--enable-return-routed-experts"]
"""Of both engines; only vLLM's Model Runner V2 knows them, whose kernels on processors need Triton's for these."""
DRAFTS = {"--speculative-num-steps": "3", "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "4"}
ROLLOUT_DRAFTS = DRAFTS | {"--speculative-num-steps": "1", "--speculative-num-draft-tokens": "2"}
"""Of SGLang, while it serves and while it samples for a policy phase (S3)."""
ROLLOUT_GROUPS = {"--enable-dp-lm-head": "", "--moe-dense-tp-size": "1"}
"""Of SGLang's attention groups that sample for a policy phase (S3)."""
PARSER = "glm45"
"""Of reasoning and tool calls of GLM-4.5 and 4.6, in both engines."""
MASTER_PORT = 29500
RANK, MASTER = "$NODE_RANK", "$MASTER_ADDRESS"
"""Set on each node of several; node 0 answers the clients."""
VARIABLE = re.compile(r"\$\(?[A-Z_]+\)?(:\d+)?")


@dataclass(frozen=True)
class Place:
    """Where a server finds its model and listens."""

    model_path: str
    host: str
    port: int
    num_threads: int = 0
    """Of llama.cpp."""
    key_file: str = ""
    """Of SGLang, where it has a key."""
    program: str = "llama-server"
    """Of llama.cpp, where glm46 is not installed."""
    rank: str = RANK
    master: str = MASTER
    is_worker: bool = False
    """Whether this is another node than the first, in vLLM's words headless."""


def engine_command(plan: ServingPlan, place: Place) -> list[str]:
    """The words of the command. Arguments that are variables of the node are left as they are (`shell_lines`)."""
    return {"llamacpp": _llamacpp, "vllm": _vllm, "sglang": _sglang}[plan.engine](plan, place)


def deployed_command(plan: ServingPlan, place: Place) -> list[str]:
    """The same where glm46 is not installed: llama.cpp runs there as its own program, without our gateway."""
    return _llama_server(plan, place) if plan.engine == "llamacpp" else engine_command(plan, place)


def image(plan: ServingPlan) -> str:
    """The container of the engine's project."""
    return IMAGES[plan.engine] + VERSIONS[plan.engine]


def shell_lines(command: list[str]) -> str:
    """The command quoted for a shell, one argument a line."""
    lines: list[str] = []
    for number, word in enumerate(command):
        quoted = f'"{word}"' if VARIABLE.fullmatch(word) else shlex.quote(word)
        is_value = number and not word.startswith("--") and command[number - 1].startswith("--")
        if is_value or (lines and number < 3 and not word.startswith("--")):
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return " \\\n    ".join(lines)


def _vllm(plan: ServingPlan, place: Place) -> list[str]:
    layout = plan.layout
    words = ["vllm", "serve", place.model_path, "--served-model-name", plan.model.name]
    words += ["--host", place.host, "--port", str(place.port), "--dtype", plan.dtype]
    words += ["--max-model-len", str(plan.context), "--max-num-seqs", str(-(-plan.num_slots // layout.dp))]
    if plan.is_on_gpus:
        words += ["--tensor-parallel-size", str(layout.tp), "--pipeline-parallel-size", str(layout.pp)]
        words += ["--data-parallel-size", str(layout.dp), "--gpu-memory-utilization", f"{plan.memory_share:.2f}"]
    else:
        words += ["--kv-cache-memory-bytes", str(plan.cache_bytes), "--enforce-eager"]
    if layout.ep > 1:
        words.append("--enable-expert-parallel")
    if plan.quantization:
        words += ["--quantization", plan.quantization]
    if plan.is_drafting:
        words += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]
    if plan.model.is_chat_trained:
        words += ["--reasoning-parser", PARSER, "--enable-auto-tool-choice", "--tool-call-parser", PARSER]
    if plan.samples_rollouts:
        words += ROLLOUT_WORDS
    words += NAMED_EXPERTS if plan.names_experts else []
    if plan.num_nodes > 1:
        words += ["--nnodes", str(plan.num_nodes), "--node-rank", place.rank]
        words += ["--master-addr", place.master, "--master-port", str(MASTER_PORT)]
        words += ["--headless"] if place.is_worker else []
    return words


def _sglang(plan: ServingPlan, place: Place) -> list[str]:
    layout = plan.layout
    words = ["sglang", "serve", "--model-path", place.model_path, "--served-model-name", plan.model.name]
    words += ["--host", place.host, "--port", str(place.port), "--dtype", plan.dtype]
    words += ["--tp-size", str(layout.tp * layout.dp), "--pp-size", str(layout.pp)]
    words += ["--attn-dp-size", str(layout.dp), "--ep-size", str(layout.ep)]
    words += ["--context-length", str(plan.context), "--max-running-requests", str(plan.num_slots)]
    words += ["--mem-fraction-static", f"{plan.memory_share:.2f}", "--enable-metrics"]
    if plan.quantization:
        words += ["--quantization", plan.quantization]
    if plan.is_drafting:
        words += ["--speculative-algorithm", "EAGLE"]
        words += _words(ROLLOUT_DRAFTS if plan.samples_rollouts else DRAFTS)
        words += ["--enable-draft-weights-cpu-backup"] if plan.samples_rollouts else []
    if plan.samples_rollouts and layout.dp > 1:
        words += _words(ROLLOUT_GROUPS)
    words += NAMED_EXPERTS if plan.names_experts else []
    if plan.model.is_chat_trained:
        words += ["--reasoning-parser", PARSER, "--tool-call-parser", PARSER]
    if plan.num_nodes > 1:
        words += ["--nnodes", str(plan.num_nodes), "--node-rank", place.rank]
        words += ["--dist-init-addr", f"{place.master}:{MASTER_PORT}"]
    return [*words, "--config", place.key_file] if place.key_file else words


def _words(arguments: Mapping[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in (name, value) if word]


def _llamacpp(plan: ServingPlan, place: Place) -> list[str]:
    return server_command(
        place.model_path,
        place.host,
        place.port,
        plan.context,
        place.num_threads,
        plan.num_slots,
        plan.model.name,
        is_drafting=plan.is_drafting,
    )


def _llama_server(plan: ServingPlan, place: Place) -> list[str]:
    """What infra/serving/model_server.py sets, as arguments; threads are llama.cpp's own choice on that machine."""
    words = [place.program, "--model", place.model_path, "--alias", plan.model.name]
    words += ["--host", place.host, "--port", str(place.port)]
    words += ["--ctx-size", str(plan.context * plan.num_slots), "--parallel", str(plan.num_slots)]
    words += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--no-warmup", "--metrics"]
    if plan.is_drafting:
        words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", "1", "--spec-draft-p-min", "0"]
    return words


def rollout_environment(plan: ServingPlan, checkout: str = str(ROOT)) -> dict[str, str]:
    """Variables of a server that samples for a policy phase, none of any other: vLLM's open the paths by which weights
    are changed, and find the worker's extension in a checkout of this project."""
    if not plan.samples_rollouts or plan.engine != "vllm":
        return {}
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if plan.names_experts else {}
    return {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": checkout, **chosen}
