"""Writes what runs a planned server elsewhere: a launch script, a container with its monitoring, Kubernetes manifests.

The model's directory is mounted, no image holds it. The key of the clients comes from the environment, from a file of
Docker's, or from a Secret of Kubernetes; none of the files holds one.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from infra.monitoring.dashboards import DashboardRows, Panel, board_json
from infra.monitoring.grafana import provisioning
from tasks.serving.engine_command import KEY_VARIABLE, Place, engine_command, image, shell_lines
from tasks.serving.kubernetes_manifests import kubernetes_manifests
from tasks.serving.planned_server import GPU_ENGINES, ServingPlan

PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
MODEL_MOUNT, KEY_MOUNT = "/model", "/run/secrets/sglang.yaml"
START_SECONDS = 3600
"""Time to read the weights: until then a server that does not answer is not started anew."""
SECONDS_OF = "histogram_quantile(0.95, sum by (le) (rate({}_bucket[5m])))"
PANELS: dict[str, DashboardRows] = {
    "vllm": {
        "Requests": [
            Panel("Computed", "none", {"{{instance}}": "vllm:num_requests_running"}),
            Panel("Waiting", "none", {"{{instance}}": "vllm:num_requests_waiting"}),
            Panel("Cache used", "percentunit", {"{{instance}}": "vllm:kv_cache_usage_perc"}),
        ],
        "Speed": [
            Panel("First token, 95 %", "s", {"p95": SECONDS_OF.format("vllm:time_to_first_token_seconds")}),
            Panel("Between tokens, 95 %", "s", {"p95": SECONDS_OF.format("vllm:inter_token_latency_seconds")}),
            Panel("Tokens per second", "none", {"generated": "sum(rate(vllm:generation_tokens_total[5m]))"}),
        ],
    },
    "sglang": {
        "Requests": [
            Panel("Computed", "none", {"{{instance}}": "sglang:num_running_reqs"}),
            Panel("Waiting", "none", {"{{instance}}": "sglang:num_queue_reqs"}),
            Panel("Cache used", "percentunit", {"{{instance}}": "sglang:token_usage"}),
        ],
        "Speed": [
            Panel("First token, 95 %", "s", {"p95": SECONDS_OF.format("sglang:time_to_first_token_seconds")}),
            Panel("Between tokens, 95 %", "s", {"p95": SECONDS_OF.format("sglang:inter_token_latency_seconds")}),
            Panel("Tokens per second", "none", {"generated": "sum(rate(sglang:generation_tokens_total[5m]))"}),
        ],
    },
}
"""Of the engines' own metrics at /metrics, which they answer without a key."""


def write_deployment(plan: ServingPlan, port: int, directory: Path) -> list[str]:
    """Write the files into a new directory; their names. Raises ValueError for llama.cpp, for a directory that
    exists, and for port 0."""
    if plan.engine not in GPU_ENGINES:
        raise ValueError("--write is of vllm and sglang: llamacpp runs on this machine by `glm46 serve`")
    if not port:
        raise ValueError("--write needs a port that clients can know: name one with --port")
    if directory.exists() or not directory.absolute().parent.is_dir():
        raise ValueError(f"--write {directory} must be a new directory in one that exists")
    files = deployment_files(plan, port)
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (directory / "launch.sh").chmod(0o755)
    return sorted(files)


def deployment_files(plan: ServingPlan, port: int) -> dict[str, str]:
    """Text by name. One machine's container and compose file are left out where a plan needs several nodes."""
    files = {"launch.sh": launch_script(plan, port), "kubernetes.yaml": _documents(kubernetes_manifests(plan, port))}
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


def launch_script(plan: ServingPlan, port: int) -> str:
    """For a machine where the engine is installed: MODEL_DIR names the model, HOST the address, loopback by default."""
    needed = ["MODEL_DIR"] + (["NODE_RANK", "MASTER_ADDRESS"] if plan.num_nodes > 1 else [])
    key_file = "$KEY_FILE" if plan.engine == "sglang" else ""
    place = Place("$MODEL_DIR", "$HOST", port, key_file=key_file)
    lines = ["#!/usr/bin/env bash", *(f"# {line}" for line in plan.describe().splitlines()), "set -euo pipefail"]
    lines += [f': "${{{name}:?set {name}}}"' for name in needed]
    if plan.engine == "sglang":
        lines.append(': "${KEY_FILE:?name a private YAML file with the line  api-key: KEY}"')
    else:
        lines.append(f': "${{{KEY_VARIABLE}:?export the key of the clients}}"')
    lines.append("HOST=${HOST:-127.0.0.1}")
    if plan.num_nodes > 1 and plan.engine == "vllm":
        worker = Place("$MODEL_DIR", "$HOST", port, is_worker=True)
        lines += ['if [ "$NODE_RANK" -gt 0 ]; then', f"exec {shell_lines(engine_command(plan, worker))}", "fi"]
    return "\n".join([*lines, f"exec {shell_lines(engine_command(plan, place))}", ""])


def dockerfile(plan: ServingPlan, port: int) -> str:
    """The engine's own image with this command; the base can be replaced by one of your registry."""
    health = f"urllib.request.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    command = engine_command(plan, _contained(plan, port))
    return "\n".join(
        [
            *(f"# {line}" for line in plan.describe().splitlines()),
            f"ARG ENGINE_IMAGE={image(plan)}",
            "FROM ${ENGINE_IMAGE}",
            "ENV HF_HUB_OFFLINE=1",
            f"EXPOSE {port}",
            f"HEALTHCHECK --interval=30s --timeout=10s --start-period={START_SECONDS}s \\",
            f"    CMD {json.dumps(['python3', '-c', f'import urllib.request; {health}'])}",
            f"ENTRYPOINT {json.dumps(command[:2])}",
            f"CMD {json.dumps(command[2:])}",
            "",
        ]
    )


def compose(plan: ServingPlan, port: int) -> dict:
    """The server on the GPUs of this machine, Prometheus and Grafana; all listen on loopback of the host."""
    gpus = {"driver": "nvidia", "count": plan.layout.num_gpus, "capabilities": ["gpu"]}
    server: dict[str, object] = {
        "build": {"context": "."},
        "volumes": ["${MODEL_DIR:?the directory of the model}:" + f"{MODEL_MOUNT}:ro"],
        "ports": [f"127.0.0.1:{port}:{port}"],
        "ipc": "host",
        "restart": "unless-stopped",
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
    }
    tree: dict[str, object] = {"name": "glm46-serving", "services": {"server": server}}
    if plan.engine == "sglang":
        server["secrets"] = [{"source": "key", "target": KEY_MOUNT}]
        tree["secrets"] = {"key": {"file": "${KEY_FILE:?a private YAML file with the line api-key: KEY}"}}
    else:
        server["environment"] = {KEY_VARIABLE: f"${{{KEY_VARIABLE}:?the key of the clients}}"}
    services = tree["services"]
    assert isinstance(services, dict), services
    services["prometheus"] = {
        "image": PROMETHEUS_IMAGE,
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "prometheus:/prometheus"],
        "ports": ["127.0.0.1:9090:9090"],
        "restart": "unless-stopped",
    }
    services["grafana"] = {
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
    return {**tree, "volumes": {"prometheus": {}, "grafana": {}}}


def _contained(plan: ServingPlan, port: int) -> Place:
    return Place(MODEL_MOUNT, "0.0.0.0", port, key_file=KEY_MOUNT if plan.engine == "sglang" else "")


def _prometheus(plan: ServingPlan, port: int) -> dict:
    targets = [{"targets": [f"server:{port}"], "labels": {"model": plan.model.name}}]
    return {
        "global": {"scrape_interval": "15s"},
        "scrape_configs": [{"job_name": "serving", "static_configs": targets}],
    }


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice: anchors are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _document(tree: dict) -> str:
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False, width=120)


def _documents(trees: list[dict]) -> str:
    return yaml.dump_all(trees, Dumper=_Plain, sort_keys=False, width=120)
