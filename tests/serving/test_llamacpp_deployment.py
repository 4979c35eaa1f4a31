"""llama.cpp's own server by the command of the written files: the pinned engine's parser reads it to the settings of
our server, and it answers as ours does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from infra.child_process import free_port
from infra.monitoring.dashboards import expressions_of
from infra.serving.model_server import Access, engine_settings, is_healthy, running_model_server
from model.text.chat_template import CHAT_TEMPLATE
from tasks.serving.deployment_files import write_deployment
from tasks.serving.engine_command import Place, deployed_command
from tasks.serving.fleet import Fleet
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import Wishes
from tasks.serving.served_model import model_of_gguf
from tasks.serving.serving_panels import PANELS
from tests.conftest import ROOT
from tests.release.test_release import SERVING, gguf, store  # noqa: F401
from tests.serving.llama_server import parsed

KEY = "key-of-the-clients"
NODE = Fleet(gpu="none", gpu_memory_gb=0, gpus_per_node=0, num_nodes=1, host_memory_gb=8)


@pytest.fixture(scope="module")
def path(gguf):  # noqa: F811
    return gguf.path("model-F32.gguf")


def planned(path, **wishes):
    return plan_serving(model_of_gguf("toy", path), NODE, Wishes("llamacpp", "balanced", context=256, **wishes))


def compared(settings) -> dict[str, str]:
    """What decides answers: of all settings those that are no address, key or number of threads. Ours always loads the
    MTP layer before drafts; the program does so by the kind of drafts. The program also gives templates a variable that
    ours does not read."""
    apart = {"hostnames", "port", "cpuparams", "cpuparams_batch", "endpoint_metrics", "load_mtp"}
    apart.add("default_template_kwargs")
    assert set(settings.default_template_kwargs) <= {"preserve_reasoning"} and "preserve_reasoning" not in CHAT_TEMPLATE
    names = [name for name in dir(settings) if not name.startswith("_") and name not in apart]
    records = {"model": ("path",), "speculative": ("types",)}
    values = {name: repr(getattr(settings, name)) for name in names if "object at" not in repr(getattr(settings, name))}
    for name, fields in records.items():
        values |= {f"{name}.{field}": repr(getattr(getattr(settings, name), field)) for field in fields}
    draft = settings.speculative.draft
    return values | {"draft": repr((draft.n_max, round(draft.p_min, 6)))}


@pytest.mark.parametrize("drafts", [False, True])
def test_the_pinned_engine_reads_the_command_as_our_servers_settings(path, drafts):
    plan = planned(path, slots=3, drafts=drafts)
    read = parsed(deployed_command(plan, Place(str(path), "0.0.0.0", 8123)))
    ours = engine_settings(path, 256, 3, "toy", drafts)
    differing = {name for name, value in compared(ours).items() if compared(read)[name] != value}
    assert differing <= {"speculative.types"} and len(compared(ours)) > 80, differing
    named = set(ours.speculative.types), set(read.speculative.types)
    assert not drafts or named[0] <= named[1]
    assert (read.hostnames, read.port, read.endpoint_metrics, read.n_ctx) == (["0.0.0.0"], 8123, True, 768)
    other = engine_settings(path, 256, 2, "toy", drafts)
    assert {name for name, value in compared(other).items() if compared(read)[name] != value} >= {"n_ctx", "n_parallel"}


def asked(url: str, path: str, key: str = "", body: dict | None = None) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def launched(path, tmp_path_factory):
    """The URL of the server that the written script started."""
    directory, port = tmp_path_factory.mktemp("launched"), free_port("127.0.0.1")
    write_deployment(planned(path, slots=2), "127.0.0.1", port, directory / "out")
    program = directory / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.serving.llama_server "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{directory}:/usr/bin:/bin", "MODEL_FILE": str(path), "LLAMA_API_KEY": KEY}
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen([directory / "out" / "launch.sh"], cwd=ROOT, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not is_healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()[-2000:]
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def test_the_script_starts_a_server_that_answers_as_ours_and_only_with_the_key(launched, path, tmp_path):
    prompt = {"prompt": "The first", "max_tokens": 20, "temperature": 0, "model": "toy"}
    assert [asked(launched, "/v1/completions", key, prompt)[0] for key in ("", "wrong")] == [401, 401]
    access = Access(KEY, num_slots=2)
    with running_model_server(path, SERVING, tmp_path / "log", "toy", access) as ours:
        answers = [json.loads(asked(url, "/v1/completions", KEY, prompt)[1]) for url in (launched, ours.url)]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1] != "" and [answer["model"] for answer in answers] == ["toy", "toy"]


def test_every_metric_of_the_dashboard_is_one_that_the_server_has(launched):
    assert asked(launched, "/metrics")[0] == 401, "Prometheus needs no key: leave it out"
    status, text = asked(launched, "/metrics", KEY)
    served = {line.split(" ")[0] for line in text.splitlines() if line.startswith("llamacpp:")}
    words = "".join(
        char if char.isalnum() or char in "_:" else " " for char in " ".join(expressions_of(PANELS["llamacpp"]))
    )
    shown = {word for word in words.split() if word.startswith("llamacpp:")}
    assert status == 200 and len(shown) == 7 and shown <= served
