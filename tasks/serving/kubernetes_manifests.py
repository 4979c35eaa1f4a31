"""Kubernetes manifests of a planned server: a Service, and a Deployment, or a LeaderWorkerSet where one server needs
several nodes (its controller is installed apart: lws.sigs.k8s.io; this is API v1, as of version 0.10).

The key is a Secret that the manifests only name, the model a volume claim: of llama.cpp with the file model.gguf.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from tasks.serving.engine_command import KEY_VARIABLES, Place, deployed_command, image
from tasks.serving.planned_server import DIRECTORY_ENGINES, ServingPlan

SECRET, SECRET_KEY, SECRET_FILE = "glm46-serving", "api-key", "sglang.yaml"
"""kubectl create secret generic glm46-serving --from-literal=api-key=KEY, of SGLang --from-file=sglang.yaml."""
CLAIM = "glm46-model"
MODEL_MOUNT, KEY_MOUNT = "/model", "/secrets"
MODEL_FILE = f"{MODEL_MOUNT}/model.gguf"
"""Of llama.cpp."""
LLAMA_SERVER = "/app/llama-server"
"""Where llama.cpp's container has its program."""
MAX_NAME = 50
"""Characters of a name: 63 are allowed, and the pods' names add their own."""
MAX_START_SECONDS, PERIOD_SECONDS = 3600, 10
RANK, MASTER = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)"
"""Set by the controller in every pod of a group; Kubernetes puts them into the command."""


def kubernetes_manifests(plan: ServingPlan, port: int) -> list[dict]:
    """Documents in the order in which they are applied."""
    name = resource_name(plan.model.name)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "glm46"}
    first = {**labels, "role": "leader"} if plan.num_nodes > 1 else labels
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": first, "ports": [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}]},
    }
    leader = _pod(plan, port, first, is_worker=False)
    if plan.num_nodes == 1:
        spec = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": leader,
        }
        head = {"apiVersion": "apps/v1", "kind": "Deployment"}
    else:
        group = {
            "size": plan.num_nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": _pod(plan, port, {**labels, "role": "worker"}, is_worker=True),
        }
        spec = {"replicas": 1, "leaderWorkerTemplate": group}
        head = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
    return [service, {**head, "metadata": {"name": name, "labels": labels}, "spec": spec}]


def resource_name(model: str) -> str:
    """The name of a model as one of a Service: lower-case letters, digits and hyphens, a letter first."""
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return (words if words[:1].isalpha() else f"model-{words}")[:MAX_NAME].rstrip("-")


def contained_place(plan: ServingPlan, port: int, key_file: str) -> Place:
    """Where a server in a container finds its model and listens; `key_file` is of SGLang."""
    model_path = MODEL_MOUNT if plan.engine in DIRECTORY_ENGINES else MODEL_FILE
    key_file = key_file if plan.engine == "sglang" else ""
    return Place(model_path, "0.0.0.0", port, key_file=key_file, program=LLAMA_SERVER)


def _pod(plan: ServingPlan, port: int, labels: dict[str, str], *, is_worker: bool) -> dict:
    is_of_gpus = plan.is_on_gpus
    place = replace(
        contained_place(plan, port, f"{KEY_MOUNT}/{SECRET_FILE}"), rank=RANK, master=MASTER, is_worker=is_worker
    )
    environment: list[dict] = [{"name": "HF_HUB_OFFLINE", "value": "1"}] if is_of_gpus else []
    mounts: list[dict] = [{"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True}]
    volumes: list[dict] = [{"name": "model", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}]
    if is_of_gpus:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if plan.engine in KEY_VARIABLES:
        secret = {"secretKeyRef": {"name": SECRET, "key": SECRET_KEY}}
        environment.append({"name": KEY_VARIABLES[plan.engine], "valueFrom": secret})
    else:
        mounts.append({"name": "key", "mountPath": KEY_MOUNT, "readOnly": True})
        volumes.append({"name": "key", "secret": {"secretName": SECRET, "defaultMode": 0o400}})
    container: dict[str, object] = {
        "name": "server",
        "image": image(plan),
        "command": deployed_command(plan, place),
        "env": environment,
        "resources": _resources(plan),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if not is_worker:
        container["ports"] = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
        container |= _probes()
    spec = {"automountServiceAccountToken": False, "containers": [container], "volumes": volumes}
    return {"metadata": {"labels": labels}, "spec": spec}


def _resources(plan: ServingPlan) -> dict[str, dict[str, str]]:
    """GPUs, or of llama.cpp the memory of the plan, in whole 1e6 bytes."""
    if not plan.is_on_gpus:
        return {"requests": {"memory": f"{math.ceil(plan.needs.total * 1e3)}M"}}
    gpus = {"nvidia.com/gpu": str(plan.layout.num_gpus // plan.num_nodes)}
    return {"limits": gpus, "requests": gpus}


def _probes() -> dict[str, dict]:
    """Nobody asks before the weights are read; after that a server that does not answer is taken out, then replaced."""
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PERIOD_SECONDS, "timeoutSeconds": 5}
    return {
        "startupProbe": {**health, "failureThreshold": MAX_START_SECONDS // PERIOD_SECONDS},
        "readinessProbe": {**health, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": 12},
    }
