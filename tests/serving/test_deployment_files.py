"""What runs a planned server elsewhere, by the validators that there are: bash, Kubernetes' schemas, the keys of the
Compose specification, promtool; the launch script runs with an engine of the test's."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace

import jsonschema
import kubernetes_validate
import pytest
import yaml

from configs.load import load_scale
from infra.monitoring.dashboards import expressions_of
from tasks.serving.deployment_files import compose, deployment_files, write_deployment
from tasks.serving.engine_command import Place, deployed_command
from tasks.serving.fleet import Fleet, find_fleet
from tasks.serving.kubernetes_manifests import kubernetes_manifests
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import PlannedModel, Wishes
from tasks.serving.served_model import model_of_scale
from tasks.serving.serving_panels import PANELS

KEYS = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}
FULL = model_of_scale(load_scale("full"))
TINY = PlannedModel("tiny", load_scale("tiny").model.recipe, "GGUF", is_chat_trained=True, file_bytes=41_000_000)
NODE = Fleet(gpu="none", gpu_memory_gb=0, gpus_per_node=0, num_nodes=1, host_memory_gb=16)
ENGINES = ("vllm", "sglang", "llamacpp")
IMAGES = {
    "vllm": "vllm/vllm-openai:v0.33.0",
    "sglang": "lmsysorg/sglang:v0.5.23",
    "llamacpp": "ghcr.io/ggml-org/llama.cpp:server-b11549",
}
VERSIONS = ("1.25", "1.37")
TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}


def mapping(required: tuple[str, ...] = (), **properties):
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": list(required)}


DEVICE = mapping(("capabilities",), driver=TEXT, count={"type": ["integer", "string"]}, capabilities=TEXTS)
SERVICE = mapping(
    build=mapping(context=TEXT),
    image=TEXT,
    volumes=TEXTS,
    ports=TEXTS,
    ipc=TEXT,
    restart={"pattern": r"^(no|always|unless-stopped|on-failure(:\d+)?)$"},
    deploy=mapping(resources=mapping(reservations=mapping(devices={"type": "array", "items": DEVICE}))),
    secrets={"type": "array", "items": mapping(source=TEXT, target=TEXT)},
    environment={"type": "object", "additionalProperties": TEXT},
    depends_on=TEXTS,
)
COMPOSE = mapping(
    ("services",),
    name={"pattern": r"^[a-z0-9][a-z0-9_-]*$"},
    services={"type": "object", "additionalProperties": SERVICE},
    volumes={"type": "object", "additionalProperties": mapping()},
    secrets={"type": "object", "additionalProperties": {**mapping(file=TEXT, environment=TEXT), "minProperties": 1}},
)
"""The part of the Compose specification's schema that is used here; the whole schema accepts the same file."""


def planned(engine: str, hardware: str = "8xH200", **more):
    if engine == "llamacpp":
        return plan_serving(TINY, NODE, Wishes(engine, "balanced", context=1024))
    return plan_serving(FULL, find_fleet(hardware), Wishes(engine, "balanced", **more))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_manifests_of_one_node_are_valid(engine, version):
    plan = planned(engine)
    documents = list(yaml.safe_load_all(deployment_files(plan, "127.0.0.1", 8123)["kubernetes.yaml"]))
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    service, deployment = documents
    spec = deployment["spec"]["template"]["spec"]
    container = spec["containers"][0]
    if engine == "llamacpp":
        assert container["resources"] == {"requests": {"memory": f"{math.ceil(plan.needs.total * 1e3)}M"}}
    else:
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["image"] == IMAGES[engine]
    assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8123
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert [word.split("/model.gguf")[0] for word in container["command"][2:4]].count(mounts["model"]) == 1
    if engine in KEYS:
        (key,) = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == KEYS[engine]]
        assert key == {"name": "glm46-serving", "key": "api-key"}
    else:
        assert container["command"][-1] == f"{mounts['key']}/sglang.yaml"
    with pytest.raises(kubernetes_validate.ValidationError):
        container["command "] = container.pop("command")
        kubernetes_validate.validate(deployment, version, strict=True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("GLM-4.5-Air", "glm-4-5-air"),
        ("4bit_model.Q8_0", "model-4bit-model-q8-0"),
        ("Österreich", "sterreich"),
        ("_", "model"),
        ("a" * 49 + ".gguf", "a" * 49),
    ],
)
def test_what_kubernetes_is_given_has_names_that_it_takes(model, name):
    """Its schemas say nothing of names; a Service has one of RFC 1035."""
    for document in kubernetes_manifests(replace(planned("llamacpp"), model=replace(TINY, name=model)), 8000):
        assert document["metadata"]["name"] == document["metadata"]["labels"]["app.kubernetes.io/name"] == name
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_several_nodes_are_a_group_whose_pods_are_valid(engine, version):
    """Kubernetes' schemas have no LeaderWorkerSet: its two pods are tried in a Deployment."""
    service, group = kubernetes_manifests(planned(engine, "2x8xH100"), 8000)
    kubernetes_validate.validate(service, version, strict=True)
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    spec = group["spec"]["leaderWorkerTemplate"]
    assert set(spec) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"} and spec["size"] == 2
    for name in ("leaderTemplate", "workerTemplate"):
        template = spec[name]
        pods = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": pods}
        kubernetes_validate.validate(deployment, version, strict=True)
        command = template["spec"]["containers"][0]["command"]
        assert "$(LWS_WORKER_INDEX)" in command and [word for word in command if "$(LWS_LEADER_ADDRESS)" in word]
        assert template["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert ("--headless" in command) == (engine == "vllm" and name == "workerTemplate")
    labels = [spec[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate")]
    assert [service["spec"]["selector"].items() <= each.items() for each in labels] == [True, False]


@pytest.mark.parametrize("engine", ENGINES)
def test_compose_has_only_keys_of_the_specification(engine):
    tree = yaml.safe_load(deployment_files(planned(engine), "127.0.0.1", 8123)["compose.yaml"])
    jsonschema.validate(tree, COMPOSE)
    assert set(tree["services"]) == {"server", "prometheus", "grafana"}
    server = tree["services"]["server"]
    if engine != "llamacpp":
        assert server["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
    assert all(port.startswith("127.0.0.1:") for each in tree["services"].values() for port in each["ports"])
    named = {volume.split(":")[0] for each in tree["services"].values() for volume in each["volumes"]}
    assert {name for name in named if not name.startswith((".", "$"))} == set(tree["volumes"])
    assert set(server.get("environment", {})) == {KEYS[engine]} if engine in KEYS else bool(server["secrets"])
    used = {each["source"] for service in tree["services"].values() for each in service.get("secrets", [])}
    assert used == set(tree.get("secrets", {})) and bool(used) == (engine != "vllm")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**tree, "services": {"server": {**server, "volume": []}}}, COMPOSE)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_container_runs_the_command_and_what_compose_mounts_is_written(engine, tmp_path):
    plan = planned(engine)
    names = write_deployment(plan, "127.0.0.1", 8123, tmp_path / "out")
    text = (tmp_path / "out" / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    instructions = dict(line.split(" ", 1) for line in lines)
    names_of_gpu_engines = ["ARG", "FROM", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"]
    assert list(instructions) == [name for name in names_of_gpu_engines if name != "ENV" or engine != "llamacpp"]
    key_file = "/run/secrets/sglang.yaml" if engine == "sglang" else ""
    model_path = "/model/model.gguf" if engine == "llamacpp" else "/model"
    place = Place(model_path, "0.0.0.0", 8123, key_file=key_file, program="/app/llama-server")
    expected = deployed_command(plan, place)
    assert json.loads(instructions["ENTRYPOINT"]) + json.loads(instructions["CMD"]) == expected
    check = json.loads(instructions["HEALTHCHECK"].split(" CMD ")[1])
    if engine == "llamacpp":
        assert check[0] == "curl" and check[-1] == "http://127.0.0.1:8123/health"
    else:
        compile(check[2], "health", "exec")
    assert f"ENGINE_IMAGE={IMAGES[engine]}" in text
    services = compose(plan, 8123)["services"]
    mounted = [volume.split(":")[0] for each in services.values() for volume in each["volumes"] if volume[0] == "."]
    assert mounted and all((tmp_path / "out" / path).exists() for path in mounted)
    board = json.loads((tmp_path / "out" / "grafana" / "dashboards" / "serving.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert sorted(shown) == sorted(expressions_of(PANELS[engine])) and all(engine in each for each in shown)
    assert len(names) == 8
    with pytest.raises(ValueError, match="must be a new directory"):
        write_deployment(plan, "127.0.0.1", 8123, tmp_path / "out")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)")
@pytest.mark.parametrize("engine", ENGINES)
def test_prometheus_accepts_its_configuration(engine, tmp_path):
    path, text = tmp_path / "prometheus.yml", deployment_files(planned(engine), "127.0.0.1", 8123)["prometheus.yml"]
    (tmp_path / "key").write_text("k")
    services = compose(planned(engine), 8123)["services"]
    targets = [each["target"] for each in services["prometheus"].get("secrets", [])]
    assert ("/run/secrets/key" in text) == (targets == ["/run/secrets/key"]) == (engine == "llamacpp")
    path.write_text(text.replace("/run/secrets/key", str(tmp_path / "key")))
    subprocess.run(["promtool", "check", "config", "--lint=none", str(path)], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("engine", "hardware"), [("vllm", "8xH200"), ("sglang", "8xH200"), ("vllm", "2x8xH100"), ("llamacpp", "none")]
)
def test_the_script_runs_the_planned_command_and_says_what_is_not_set(engine, hardware, tmp_path):
    plan = planned(engine, hardware)
    write_deployment(plan, "127.0.0.1", 8123, tmp_path / "out")
    script = tmp_path / "out" / "launch.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    program, model = ("llama-server", "MODEL_FILE") if engine == "llamacpp" else (engine, "MODEL_DIR")
    (tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
    (tmp_path / program).chmod(0o755)
    key = KEYS.get(engine, "KEY_FILE")
    given = {model: "/a b", key: "/k.yaml", "NODE_RANK": "1", "MASTER_ADDRESS": "n0"}
    path = {"PATH": f"{tmp_path}:{os.defpath}"}
    done = subprocess.run([script], env={**given, **path}, capture_output=True, text=True, check=True)
    key_file = "/k.yaml" if engine == "sglang" else ""
    place = Place("/a b", "127.0.0.1", 8123, key_file=key_file, rank="1", master="n0", is_worker=plan.num_nodes > 1)
    assert [program, *done.stdout.splitlines()[1:]] == deployed_command(plan, place)
    needed = re.findall(r"\$\{(\w+):\?", script.read_text())
    assert {model, key} <= set(needed) <= set(given)
    for name in needed:
        without = {key: value for key, value in given.items() if key != name}
        refused = subprocess.run([script], env={**without, **path}, capture_output=True, text=True, check=False)
        assert refused.returncode and name in refused.stderr and not refused.stdout


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_samples_for_a_phase_has_a_script_without_a_key(engine, tmp_path):
    """A phase asks without one, and the server listens on loopback."""
    plan = planned(engine, context=4096, rollouts=True, routes=True)
    assert write_deployment(plan, "127.0.0.1", 8123, tmp_path / "out") == ["launch.sh"]
    (tmp_path / engine).write_text('#!/bin/sh\nenv | grep -E "VLLM|PYTHONPATH" | sort\nprintf "%s\\n" "$@"\n')
    (tmp_path / engine).chmod(0o755)
    given = {"MODEL_DIR": "/m", "GLM46_DIR": "/a b", "PATH": f"{tmp_path}:{os.defpath}"}
    done = subprocess.run([tmp_path / "out" / "launch.sh"], env=given, capture_output=True, text=True, check=True)
    variables = ["PYTHONPATH=/a b", "VLLM_SERVER_DEV_MODE=1", "VLLM_USE_V2_MODEL_RUNNER=1"] if engine == "vllm" else []
    _, *words = deployed_command(plan, Place("/m", "127.0.0.1", 8123))
    assert done.stdout.splitlines() == [*variables, *words] and "--config" not in words


def test_several_nodes_have_no_container_of_one_machine(tmp_path):
    files = deployment_files(planned("vllm", "2x8xH100"), "0.0.0.0", 8000)
    assert set(files) == {"launch.sh", "kubernetes.yaml"} and "HOST=${HOST:-0.0.0.0}" in files["launch.sh"]
    with pytest.raises(ValueError, match="needs a port that clients can know"):
        write_deployment(planned("vllm"), "127.0.0.1", 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()
