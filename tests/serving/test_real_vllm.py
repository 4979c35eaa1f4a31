"""vLLM itself reads what we export: it scores our tokens as we do, serves by `glm46 serve`, and loads our adapters."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request

from model.formats.hf_checkpoint import load_model
from model.generation.generation import InProcessEngine, Sampling
from tasks.release.parity_engines import Row, transformers_scores, vllm_scores
from tasks.release.served_requests import check_key, check_oversized
from tests.conftest import ROOT
from tests.model.test_adapters import ADAPTERS, adapted_model, written
from tests.release.test_chosen_calls import learnt_model
from tests.serving.test_engine_command import NAMES
from tests.support.engines.real_vllm import PATH, PROGRAM, REAL_VLLM, SERVABLE, real_vllm, save_servable
from tests.support.model_recipes import random_model
from tests.support.pipeline import command, environment

pytestmark = REAL_VLLM
KEY = "key-of-the-clients"
MIN_MARGIN = 1e-3
"""Of the best two logits, below which rounding decides."""


def test_the_program_knows_every_argument_of_our_commands():
    shown = subprocess.run([str(PROGRAM), "serve", "--help=all"], capture_output=True, text=True, timeout=300).stdout
    used = [*NAMES["vllm"].split(), "--kv-cache-memory-bytes", "--enforce-eager", "--no-enable-prefix-caching"]
    used += ["--enable-scale-out", "--logprobs-mode", "--enable-lora", "--lora-modules"]
    assert not [name for name in used if not re.search(rf"{name}\b", shown)]


def test_vllm_scores_our_tokens_as_transformers_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", PATH)
    save_servable(random_model(SERVABLE, std=0.1), tmp_path / "hf")
    engine = InProcessEngine(load_model(tmp_path / "hf"), weights_version="v", batch_sequences=16)
    prompts = [[7 + number] * (1 + number % 5) for number in range(24)]
    rows = [
        Row(prompt, token_ids)
        for prompt, token_ids in zip(prompts, engine.generate(prompts, Sampling(16, 0.0), "v").token_ids, strict=True)
    ]
    began = time.monotonic()
    scores = vllm_scores(tmp_path / "hf", rows, tmp_path / "vllm.log")
    seconds = time.monotonic() - began
    wanted = transformers_scores(tmp_path / "hf", rows)
    pairs = [pair for ours, theirs in zip(scores, wanted, strict=True) for pair in zip(ours, theirs, strict=True)]
    largest = max(abs(ours.log_probability - theirs.log_probability) for ours, theirs in pairs)
    print(f"{len(pairs)} tokens, largest difference {largest:.2e}, {seconds:.0f} s")
    assert len(pairs) > 300 and largest < 1e-4
    assert [ours.is_greedy for ours, _ in pairs] == [theirs.is_greedy for _, theirs in pairs]


def test_glm46_serves_with_vllm_on_this_machines_processors(tmp_path):
    hf_dir = tmp_path / "learnt"
    save_servable(learnt_model(), hf_dir)
    options = ["--engine", "vllm", "--checkpoint", str(hf_dir), "--hardware", "none", "--port", "0", "--slots", "8"]
    began = time.monotonic()
    serving = subprocess.Popen(
        command("serve", *options, "--api-key-env", "MY_KEY"),
        cwd=ROOT,
        env=environment(tmp_path / "home", MY_KEY=KEY, PATH=PATH),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = serving.stdout.readline()
        print(f"ready after {time.monotonic() - began:.0f} s")
        assert line.startswith("learnt at http://127.0.0.1:"), line
        url = line.split(" at ")[1].split("/v1")[0]
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        reasons = [*check_key(url), *check_oversized(url, headers, 2000)]
        assert not reasons, reasons
    finally:
        serving.terminate()
        serving.wait(60)


def asked(url: str, path: str, **body):
    """(status, answer)"""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


LOADED = {name: ADAPTERS[name] for name in ("dense and attention", "shared only")}
"""Adapters of the routed experts need Triton, which the build for CPUs lacks."""


def test_vllm_loads_our_adapters_and_answers_as_the_merged_models(tmp_path):
    save_servable(random_model(SERVABLE, std=0.1), tmp_path / "hf")
    prompts = [[7 + number] * (1 + number % 5) for number in range(12)]
    merged = {}
    for name, adapter in {**LOADED, "dora": ADAPTERS["dora"]}.items():
        (tmp_path / name).mkdir()
        adapted = adapted_model(SERVABLE, adapter, std=0.1)
        written(adapted, adapter, tmp_path / name)
        engine = InProcessEngine(adapted, weights_version="v", batch_sequences=12)
        merged[name] = engine.generate(prompts, Sampling(16, 0.0), "v")
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    words = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *targets)
    words += ("--worker-extension-cls", "tests.support.engines.vllm_adapters.PlainExperts")
    words += ("--lora-modules", *(f"{name}={tmp_path / name / 'adapter'}" for name in LOADED))
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONPATH": str(ROOT)}
    settings = {"prompt": prompts, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    with real_vllm(tmp_path / "hf", tmp_path / "vllm.log", *words, **environment) as server:
        answers = {name: asked(server.url, "/v1/completions", model=name, **settings) for name in ("glm46", *LOADED)}
        dora = asked(server.url, "/v1/load_lora_adapter", lora_name="d", lora_path=str(tmp_path / "dora" / "adapter"))
    served = {name: [each["token_ids"] for each in json.loads(said)["choices"]] for name, (_, said) in answers.items()}
    for name in LOADED:
        num_clear = 0
        for ours, theirs, margins in zip(merged[name].token_ids, served[name], merged[name].top2_margins, strict=True):
            unclear = next((at for at, margin in enumerate(margins) if margin < MIN_MARGIN), len(margins))
            assert theirs[:unclear] == ours[:unclear], name
            num_clear += unclear
        print(f"{name}: {num_clear} tokens")
        assert num_clear > 150 and served[name] != served["glm46"], name
    assert dora[0] == 500 and "does not yet support DoRA" in dora[1]
