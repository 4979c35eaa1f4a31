"""Kubernetes manifests of a planned server: a Service, and a Deployment, or a LeaderWorkerSet where one server needs
several nodes (its controller is installed apart: lws.sigs.k8s.io; this is API v1, as of version 0.10).

The key is a Secret that the manifests only name, the model a volume claim.
"""

from __future__ import annotations

from tasks.serving.engine_command import KEY_VARIABLE, Place, engine_command, image
from tasks.serving.planned_server import ServingPlan

SECRET, SECRET_KEY, SECRET_FILE = "glm46-serving", "api-key", "sglang.yaml"
"""kubectl create secret generic glm46-serving --from-literal=api-key=KEY, of SGLang --from-file=sglang.yaml."""
CLAIM = "glm46-model"
MODEL_MOUNT, KEY_MOUNT = "/model", "/secrets"
MAX_START_SECONDS, PERIOD_SECONDS = 3600, 10
RANK, MASTER = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)"
"""Set by the controller in every pod of a group; Kubernetes puts them into the command."""


def kubernetes_manifests(plan: ServingPlan, port: int) -> list[dict]:
    """Documents in the order in which they are applied."""
    name = plan.model.name.lower().replace("_", "-").replace("/", "-")
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


def _pod(plan: ServingPlan, port: int, labels: dict[str, str], *, is_worker: bool) -> dict:
    is_vllm = plan.engine == "vllm"
    place = Place(
        MODEL_MOUNT,
        "0.0.0.0",
        port,
        key_file="" if is_vllm else f"{KEY_MOUNT}/{SECRET_FILE}",
        rank=RANK,
        master=MASTER,
        is_worker=is_worker,
    )
    gpus = str(plan.layout.num_gpus // plan.num_nodes)
    container: dict[str, object] = {
        "name": "server",
        "image": image(plan),
        "command": engine_command(plan, place),
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}, "requests": {"nvidia.com/gpu": gpus}},
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    volumes: list[dict] = [
        {"name": "model", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if is_vllm:
        secret = {"secretKeyRef": {"name": SECRET, "key": SECRET_KEY}}
        container["env"] = [{"name": "HF_HUB_OFFLINE", "value": "1"}, {"name": KEY_VARIABLE, "valueFrom": secret}]
    else:
        volumes.append({"name": "key", "secret": {"secretName": SECRET, "defaultMode": 0o400}})
        mounts = container["volumeMounts"]
        assert isinstance(mounts, list), mounts
        mounts.append({"name": "key", "mountPath": KEY_MOUNT, "readOnly": True})
    if not is_worker:
        container["ports"] = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
        container |= _probes()
    spec = {"automountServiceAccountToken": False, "containers": [container], "volumes": volumes}
    return {"metadata": {"labels": labels}, "spec": spec}


def _probes() -> dict[str, dict]:
    """Nobody asks before the weights are read; after that a server that does not answer is taken out, then replaced."""
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PERIOD_SECONDS, "timeoutSeconds": 5}
    return {
        "startupProbe": {**health, "failureThreshold": MAX_START_SECONDS // PERIOD_SECONDS},
        "readinessProbe": {**health, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": 12},
    }
