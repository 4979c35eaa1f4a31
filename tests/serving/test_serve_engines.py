"""`glm46 serve` with vLLM and SGLang: programs of the test's take their place on PATH, keep what they were given, and
answer /health."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import fields

import psutil
import pytest
import yaml

from flows.cli.serving.asked_server import Options, ask
from infra.home import Home
from infra.registry.model_registry import CHAT_TAG, KEY_TAG, RegisteredVersion
from infra.step import step
from infra.storage.open_store import open_store
from tasks.serving.engine_command import Place, engine_command
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tests.conftest import ROOT
from tests.support.evaluation_fakes import checkpoint, commit
from tests.support.pipeline import command, environment, glm46, here, refused
from tests.support.refused_releases import record_of

KEY = "key-of-the-clients"
GPU_BUILD, CPU_BUILD = "0.33.0", "0.32.0+cpu"
ENGINE = f"""#!{sys.executable}
import http.server, json, os, pathlib, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    print(os.environ["VLLM_SAYS"])
    sys.exit()
key_file = words[words.index("--config") + 1] if "--config" in words else ""
worker = subprocess.Popen(["sleep", "600"])
seen = {{"words": words, "mode_of_developers": os.environ.get("VLLM_SERVER_DEV_MODE"),
        "key": os.environ.get("VLLM_API_KEY"), "worker": worker.pid, "pid": os.getpid(),
        "file": pathlib.Path(key_file).read_text() if key_file else "",
        "mode": os.stat(key_file).st_mode if key_file else 0}}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(words[words.index("--port") + 1])
http.server.HTTPServer((words[words.index("--host") + 1], port), Health).serve_forever()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return checkpoint(open_store(None, Home(tmp_path_factory.mktemp("engines"))), "random").directory("hf")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A PATH with both engines, vLLM's built for GPUs."""
    monkeypatch.setenv("VLLM_SAYS", GPU_BUILD)
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "sglang"):
        (tmp_path / "bin" / name).write_text(ENGINE)
        (tmp_path / "bin" / name).chmod(0o755)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def is_gone(pid: int, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("engine", "end", "version", "more"),
    [
        ("vllm", signal.SIGTERM, GPU_BUILD, ["--hardware", "1xH100", "--api-key-env", "MY_KEY"]),
        ("sglang", signal.SIGINT, "", ["--hardware", "1xH100", "--api-key-env", "MY_KEY"]),
        ("vllm", signal.SIGKILL, CPU_BUILD, ["--hardware", "none", "--rollouts"]),
    ],
)
def test_an_engine_is_started_with_the_plan_and_ends_with_us(
    engine, end, version, more, directory, path, monkeypatch, tmp_path
):
    monkeypatch.setenv("VLLM_SAYS", version)
    monkeypatch.setenv("MY_KEY", KEY)
    options = ["--engine", engine, "--checkpoint", str(directory), "--port", "0", *more]
    is_for_rollouts = "--rollouts" in more
    printed = here("serve", *options, "--print", home=tmp_path / "home")
    assert printed.exit_code == 0, printed.stderr
    serving = subprocess.Popen(
        command("serve", *options),
        cwd=ROOT,
        env=environment(tmp_path / "home", PATH=path, SEEN=str(tmp_path / "seen")),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = serving.stdout.readline()
        assert line.startswith(f"{directory.name} at http://127.0.0.1:"), line
        with urllib.request.urlopen(line.split(" at ")[1].split()[0].replace("/v1", "/health"), timeout=30) as health:
            assert health.status == 200
        assert ("VLLM_SERVER_DEV_MODE=1 \\\n" in printed.stdout) == is_for_rollouts
        seen = json.loads((tmp_path / "seen").read_text())
        port = line.split(":")[2].split("/")[0]
        shown = subprocess.run(
            ["bash", "-c", f"{engine}() {{ printf '%s\\n' \"$@\"; }}\n{printed.stdout}"], capture_output=True, text=True
        ).stdout.splitlines()
        shown[shown.index("--port") + 1] = port
        assert seen["words"][: len(shown)] == shown, "what was printed is what runs"
        children = psutil.Process(serving.pid).children(recursive=True)
        assert {seen["pid"], seen["worker"]} <= {child.pid for child in children}
        assert not [child for child in children if KEY in " ".join(child.cmdline())]
        if engine == "vllm":
            assert (seen["key"], seen["words"][len(shown) :]) == ("" if is_for_rollouts else KEY, [])
            assert seen["mode_of_developers"] == ("1" if is_for_rollouts else None)
            assert ("--enable-scale-out" in shown) == is_for_rollouts
        else:
            assert yaml.safe_load(seen["file"]) == {"api-key": KEY} and seen["mode"] & 0o777 == 0o600
            assert seen["words"][len(shown)] == "--config" and seen["key"] == ""
    finally:
        serving.send_signal(end)
        serving.wait(60)
    assert is_gone(seen["pid"]) and is_gone(seen["worker"])
    if engine == "sglang":
        assert not list((tmp_path / "home" / "run").glob("*.yaml")), "the file with the key is removed"


def test_an_engine_that_stops_is_reported_with_the_end_of_its_log(directory, path, tmp_path):
    (tmp_path / "bin" / "vllm").write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo {GPU_BUILD} && exit 0\necho CUDA out of memory\nexit 3\n"
    )
    options = ["--engine", "vllm", "--checkpoint", str(directory), "--hardware", "1xH100", "--port", "0"]
    ended = glm46("serve", *options, home=tmp_path / "home", PATH=path)
    assert ended.exit_code == 1 and "stopped; the end of" in ended.stderr and "CUDA out of memory" in ended.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--hardware", "1xH100"],
            "vllm is not installed: run `pip install vllm==0.33.0` in an environment of its own",
        ),
        (["--hardware", "none"], "vllm is not installed: run `make env-vllm`, which makes .venv-vllm, and put its"),
        (["--hardware", "none", "--tp", "2"], "--tp divides GPUs, and vllm serves on processors here: leave it out"),
        (["--hardware", "none", "--write", "out"], "--write of vllm is made for GPUs: name --hardware, or write it"),
        (
            ["--hardware", "2x1xH100", "--pp", "2"],
            "this plan needs 2 nodes: write its script and manifests with --write",
        ),
        (["--rollouts", "--host", "0.0.0.0"], "--rollouts lets whoever reaches the server change its weights"),
        (["--rollouts", "--api-key-env", "HOME"], "--rollouts lets whoever reaches the server change its weights"),
        (["--rollouts", "--engine", "llamacpp"], "--rollouts is of vllm and sglang: leave it out with llamacpp"),
        (["--routes"], "--routes is of a server that samples for a policy phase: add --rollouts"),
        (["--scenario", "fast"], "--scenario fast: write one of high_throughput, balanced, low_latency"),
        (["--hardware", "1xH100", "--checkpoint", "absent"], "absent is no directory, and vllm serves one"),
    ],
)
def test_what_cannot_start_is_one_sentence(options, message, directory, tmp_path):
    checkpoint_option = [] if "--checkpoint" in options else ["--checkpoint", str(directory)]
    ended = refused("serve", "--engine", "vllm", *checkpoint_option, *options, home=tmp_path / "home", PATH=os.defpath)
    assert ended.exit_code == 2 and message in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize(
    ("version", "hardware", "message"),
    [
        (CPU_BUILD, "1xH100", "0.32.0+cpu, built for CPUs, and this plan is for 1 x H100 (80 GB each): name --hardw"),
        (GPU_BUILD, "none", "is 0.33.0, built for GPUs, and this plan is for no GPU"),
    ],
)
def test_a_build_for_other_machines_is_refused(version, hardware, message, directory, path, tmp_path):
    options = ["--engine", "vllm", "--checkpoint", str(directory), "--hardware", hardware]
    ended = refused("serve", *options, home=tmp_path / "home", PATH=path, VLLM_SAYS=version)
    assert ended.exit_code == 2 and message in ended.stderr, ended.stderr


def test_a_host_that_others_reach_needs_a_key(directory, path, tmp_path):
    options = ["--engine", "vllm", "--checkpoint", str(directory), "--hardware", "1xH100", "--host", "0.0.0.0"]
    ended = refused("serve", *options, home=tmp_path / "home", PATH=path)
    assert ended.exit_code == 1 and "so its clients need a key: name the environment variable" in ended.stderr


def test_s0s_file_is_an_input_and_gives_nothing_twice(directory, tmp_path):
    config = tmp_path / "inference_production.yaml"
    config.write_text(
        f"engine: sglang\nmodel_path: {directory}\nscenario: high-throughput\nport: 30000\n"
        "hardware:\n  num_nodes: 1\n  gpus_per_node: 2\n  gpu_type: H100\n"
    )
    printed = here("serve", "--config", str(config), "--print", home=tmp_path / "home")
    assert printed.exit_code == 0, printed.stderr
    assert f"sglang serve \\\n    --model-path {directory}" in printed.stdout and "--port 30000" in printed.stdout
    twice = refused("serve", "--config", str(config), "--port", "1", "--print", home=tmp_path / "home")
    assert twice.exit_code == 2 and "gives port too: leave --port out, or remove it there" in twice.stderr


def test_a_scale_is_planned_before_it_was_trained(tmp_path):
    options = ["--scale", "full", "--engine", "vllm", "--hardware", "8xH100"]
    printed = here("serve", *options, "--quantization", "fp8", "--print", home=tmp_path / "home")
    assert printed.exit_code == 0
    assert "no version champion is registered: its directory is written as MODEL_DIR" in printed.stdout
    written = refused("serve", *options, "--write", str(tmp_path / "out"), home=tmp_path / "home")
    assert written.exit_code == 2 and "does not fit 8 x H100 (80 GB each)" in written.stderr
    assert not (tmp_path / "out").exists()
    served = refused("serve", *options, "--quantization", "fp8", home=tmp_path / "home")
    assert served.exit_code == 2 and "holds no model registry yet" in served.stderr


@step(content=("hf/*",))
def trained_phase(*, weights, output) -> TrainedCheckpoint:
    """The toy's files under the record of a phase."""
    for path in weights.paths("hf/*"):
        output.path(f"hf/{path.name}").write_bytes(path.read_bytes())
    return record_of(1)


@pytest.mark.parametrize(("engine", "is_chat_trained"), [("vllm", True), ("sglang", False)])
def test_a_version_is_served_from_its_directory_with_parsers_if_it_knows_conversations(
    engine, is_chat_trained, tmp_path
):
    home = Home(tmp_path)
    store = open_store(None, home)
    phase = commit(store, trained_phase, weights=checkpoint(store, "random"))
    given = {"engine": engine, "hardware": "1xH100"}
    options = Options(**{field.name: given.get(field.name) for field in fields(Options)})
    asked = ask(options, None, home, "micro", "champion", "", None)
    tags = {KEY_TAG: phase.key, CHAT_TAG: "true" if is_chat_trained else "false"}
    placed = asked.of_version(RegisteredVersion("1", tags))
    assert placed.path == phase.directory("hf") and placed.plan.model.name == "glm46-micro"
    command_line = engine_command(placed.plan, Place(str(placed.path), "127.0.0.1", 8000))
    assert ("--tool-call-parser" in command_line) == is_chat_trained
