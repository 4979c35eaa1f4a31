"""Writes what runs a planned server elsewhere: a launch script, a container with its monitoring, Kubernetes manifests.

The model is mounted, no image holds it. The key of the clients comes from the environment, from a file of Docker's, or
from a Secret of Kubernetes; none of the files holds one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml

from infra.monitoring.dashboards import board_json
from infra.monitoring.grafana import provisioning
from tasks.serving.engine_command import KEY_VARIABLES, Place, deployed_command, image, rollout_environment, shell_lines
from tasks.serving.kubernetes_manifests import contained_place, kubernetes_manifests
from tasks.serving.planned_server import DIRECTORY_ENGINES, ServingPlan
from tasks.serving.serving_panels import PANELS

PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
KEY_MOUNT, SCRAPE_KEY = "/run/secrets/sglang.yaml", "/run/secrets/key"
"""The key of SGLang's clients; that by which Prometheus asks llama.cpp."""
START_SECONDS = 3600
"""Time to read the weights: until then a server that does not answer is not started anew."""


def write_deployment(plan: ServingPlan, host: str, port: int, directory: Path) -> list[str]:
    """Write the files into a new directory; their names. Raises ValueError for a directory that exists, for port 0,
    and for vLLM on processors, which no container of these is made for."""
    if plan.engine in DIRECTORY_ENGINES and not plan.is_on_gpus:
        raise ValueError(f"--write of {plan.engine} is made for GPUs: name --hardware, or write it with llamacpp")
    if not port:
        raise ValueError("--write needs a port that clients can know: name one with --port")
    if directory.exists() or not directory.absolute().parent.is_dir():
        raise ValueError(f"--write {directory} must be a new directory in one that exists")
    files = deployment_files(plan, host, port)
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (directory / "launch.sh").chmod(0o755)
    return sorted(files)


def deployment_files(plan: ServingPlan, host: str, port: int) -> dict[str, str]:
    """Text by name. One machine's container and compose file are left out where a plan needs several nodes. A server
    that samples for a policy phase has no clients and no key: its script is all."""
    files = {"launch.sh": launch_script(plan, host, port)}
    if plan.samples_rollouts:
        return files
    files["kubernetes.yaml"] = _documents(kubernetes_manifests(plan, port))
    if plan.num_nodes > 1:
        return files
    files["Dockerfile"] = dockerfile(plan, port)
    files["compose.yaml"] = _document(compose(plan, port))
    files["prometheus.yml"] = _document(_prometheus(plan, port))
    sources, providers = provisioning("http://prometheus:9090", "/var/lib/grafana/dashboards")
    files["grafana/provisioning/datasources/prometheus.yaml"] = _document(sources)
    files["grafana/provisioning/dashboards/glm46.yaml"] = _document(providers)
    files["grafana/dashboards/serving.json"] = board_json("serving", PANELS[plan.engine])
    return files


def launch_script(plan: ServingPlan, host: str, port: int) -> str:
    """For a machine where the engine is installed: MODEL_DIR (of llama.cpp MODEL_FILE) names the model, HOST the
    address, by default `host`."""
    model = _model_variable(plan)
    needed = [model] + (["NODE_RANK", "MASTER_ADDRESS"] if plan.num_nodes > 1 else [])
    key_file = "$KEY_FILE" if plan.engine == "sglang" and not plan.samples_rollouts else ""
    place = Place(f"${model}", "$HOST", port, key_file=key_file)
    lines = ["#!/usr/bin/env bash", *(f"# {line}" for line in plan.describe().splitlines()), "set -euo pipefail"]
    lines += [f': "${{{name}:?set {name}}}"' for name in needed]
    if plan.samples_rollouts:
        given = rollout_environment(plan, "$GLM46_DIR")
        lines += [': "${GLM46_DIR:?name a checkout of glm46}"'] if "PYTHONPATH" in given else []
        lines += [f'export {name}="{value}"' for name, value in given.items()]
    elif plan.engine == "sglang":
        lines.append(': "${KEY_FILE:?name a private YAML file with the line  api-key: KEY}"')
    else:
        lines.append(f': "${{{KEY_VARIABLES[plan.engine]}:?export the key of the clients}}"')
    lines.append(f"HOST=${{HOST:-{host}}}")
    if plan.num_nodes > 1 and plan.engine == "vllm":
        worker = replace(place, is_worker=True)
        lines += ['if [ "$NODE_RANK" -gt 0 ]; then', f"exec {shell_lines(deployed_command(plan, worker))}", "fi"]
    return "\n".join([*lines, f"exec {shell_lines(deployed_command(plan, place))}", ""])


def dockerfile(plan: ServingPlan, port: int) -> str:
    """The engine's own image with this command; the base can be replaced by one of your registry."""
    is_of_gpus, url = plan.is_on_gpus, f"http://127.0.0.1:{port}/health"
    request = f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"
    health = ["python3", "-c", request] if is_of_gpus else ["curl", "--fail", "--silent", "--max-time", "5", url]
    command = deployed_command(plan, contained_place(plan, port, KEY_MOUNT))
    num_words = 2 if is_of_gpus else 1
    return "\n".join(
        [
            *(f"# {line}" for line in plan.describe().splitlines()),
            f"ARG ENGINE_IMAGE={image(plan)}",
            "FROM ${ENGINE_IMAGE}",
            *(["ENV HF_HUB_OFFLINE=1"] if is_of_gpus else []),
            f"EXPOSE {port}",
            f"HEALTHCHECK --interval=30s --timeout=10s --start-period={START_SECONDS}s \\",
            f"    CMD {json.dumps(health)}",
            f"ENTRYPOINT {json.dumps(command[:num_words])}",
            f"CMD {json.dumps(command[num_words:])}",
            "",
        ]
    )


def compose(plan: ServingPlan, port: int) -> dict:
    """The server, Prometheus and Grafana; all listen on loopback of the host."""
    variable, mount = _model_variable(plan), contained_place(plan, port, KEY_MOUNT).model_path
    server: dict[str, object] = {
        "build": {"context": "."},
        "volumes": [f"${{{variable}:?the absolute path of the model}}:{mount}:ro"],
        "ports": [f"127.0.0.1:{port}:{port}"],
        "restart": "unless-stopped",
    }
    if plan.is_on_gpus:
        gpus = {"driver": "nvidia", "count": plan.layout.num_gpus, "capabilities": ["gpu"]}
        server |= {"ipc": "host", "deploy": {"resources": {"reservations": {"devices": [gpus]}}}}
    prometheus: dict[str, object] = {
        "image": PROMETHEUS_IMAGE,
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "prometheus:/prometheus"],
        "ports": ["127.0.0.1:9090:9090"],
        "restart": "unless-stopped",
    }
    secrets: dict[str, object] = {}
    if plan.engine == "sglang":
        server["secrets"] = [{"source": "key", "target": KEY_MOUNT}]
        secrets["key"] = {"file": "${KEY_FILE:?a private YAML file with the line api-key: KEY}"}
    else:
        key = KEY_VARIABLES[plan.engine]
        server["environment"] = {key: f"${{{key}:?the key of the clients}}"}
    if plan.engine == "llamacpp":
        prometheus["secrets"] = [{"source": "key", "target": SCRAPE_KEY}]
        secrets["key"] = {"environment": KEY_VARIABLES[plan.engine]}
    services = {"server": server, "prometheus": prometheus, "grafana": _grafana()}
    tree: dict[str, object] = {"name": "glm46-serving", "services": services}
    return {**tree, **({"secrets": secrets} if secrets else {}), "volumes": {"prometheus": {}, "grafana": {}}}


def _grafana() -> dict:
    return {
        "image": GRAFANA_IMAGE,
        "environment": {"GF_SECURITY_ADMIN_PASSWORD": "${GRAFANA_PASSWORD:?the password of admin}"},
        "volumes": [
            "./grafana/provisioning:/etc/grafana/provisioning:ro",
            "./grafana/dashboards:/var/lib/grafana/dashboards:ro",
            "grafana:/var/lib/grafana",
        ],
        "ports": ["127.0.0.1:3000:3000"],
        "depends_on": ["prometheus"],
        "restart": "unless-stopped",
    }


def _model_variable(plan: ServingPlan) -> str:
    """By which the files ask where the model is on the host."""
    return "MODEL_DIR" if plan.engine in DIRECTORY_ENGINES else "MODEL_FILE"


def _prometheus(plan: ServingPlan, port: int) -> dict:
    scraped: dict[str, object] = {
        "job_name": "serving",
        "static_configs": [{"targets": [f"server:{port}"], "labels": {"model": plan.model.name}}],
    }
    if plan.engine == "llamacpp":
        scraped["authorization"] = {"credentials_file": SCRAPE_KEY}
    return {"global": {"scrape_interval": "15s"}, "scrape_configs": [scraped]}


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice: anchors are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _document(tree: dict) -> str:
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False, width=120)


def _documents(trees: list[dict]) -> str:
    return yaml.dump_all(trees, Dumper=_Plain, sort_keys=False, width=120)
