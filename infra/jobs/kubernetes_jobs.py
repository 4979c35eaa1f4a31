"""Jobs on Kubernetes: an Indexed Job with a pod per node, submitted and looked up by kubectl.

Pods mount the volume claim where GLM46_HOME is here, and find each other there: no service is needed. A pod is never
replaced: a lost job is submitted again and continues from its checkpoint. Files of a job in work/<key>/, beside those
of scheduled_jobs.py: job.yaml (the manifest), supervisor-N.log (what the supervisor of node N printed).
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from configs.files.atomic_files import replacing
from infra.code_digest import ROOT
from infra.jobs.launchers import Job
from infra.jobs.node_supervisor import LEADER, SAVE_AFTER_VARIABLE, START_VARIABLE
from infra.jobs.pod_template import read_cluster_template, with_cluster_template
from infra.jobs.scheduled_jobs import (
    NAME_DIGITS,
    SAVE_SECONDS,
    NoAnswerError,
    SchedulerRecord,
    ask,
    last_line,
    queue_of,
    refuse_no_answer,
    save_after_seconds,
)

MANIFEST = "job.yaml"
SECRET = "glm46"
"""Its entries, where it exists, are variables of the ranks: credentials of the store."""
GPU_RESOURCE = "nvidia.com/gpu"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOB_LABEL = "batch.kubernetes.io/job-name"
NOT_FOUND = "(NotFound)"
START_SECONDS = 1800
"""Between the first pod's start and the last one's: each node pulls the image."""
PULL_SECONDS = 600
"""For an image that a registry does not give: it may be away for a moment."""
SIGKILLED = 137
PULLING = {"ImagePullBackOff", "ErrImagePull", "RegistryUnavailable"}
NEVER = {
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
"""Reasons for which a container waits until somebody changes its manifest or the cluster."""
FORBIDDEN = re.compile(r"is forbidden: (?!exceeded quota)")
"""In the words on a pod that the cluster's rules do not let be made, however long it waits."""
TAKEN = {
    "PreemptionByScheduler": "a pod of higher priority took its node",
    "DeletionByTaintManager": "its node went down",
    "DeletionByPodGC": "its node is gone",
    "EvictionByEvictionAPI": "it was evicted from its node",
    "TerminationByKubelet": "its node ended it",
    "Evicted": "its node evicted it",
    "Preempting": "its node needed the place for another pod",
    "NodeLost": "its node went down",
    "NodeShutdown": "its node was shut down",
    "Terminated": "its node was shut down",
    "OOMKilled": "its memory ran out",
    "DeadlineExceeded": "its time limit came",
}
"""Ends of a pod that say nothing about the program."""


class Kubernetes:
    name = "kubernetes"
    look_seconds = 5.0

    def find(self, job: Job, work_dir: Path) -> str | None:
        """By the manifest, which is written before the Job is created."""
        path = work_dir / MANIFEST
        if not path.exists():
            return None
        metadata = yaml.safe_load(path.read_text())["metadata"]
        scheduler_job = f"{metadata.get('namespace', '')}/{metadata['name']}"
        record = self.look(scheduler_job, work_dir)
        return scheduler_job if record is not None and record.state in ("queued", "stuck", "running") else None

    def submit(self, job: Job, work_dir: Path) -> str:
        queue = queue_of(job)
        name = f"glm46-{job.key[:NAME_DIGITS]}-{secrets.token_hex(3)}"
        path = work_dir / MANIFEST
        described = with_cluster_template(
            manifest(job, work_dir, name), read_cluster_template(_options(queue.partition))
        )
        with replacing(path) as temporary:
            temporary.write_text(yaml.safe_dump(described, sort_keys=False, width=120))
        answer = ask("kubectl", "create", "--filename", str(path))
        if answer.returncode:
            refuse_no_answer("Kubernetes", answer.stderr)
            raise ValueError(
                f"Kubernetes refuses the job: {last_line(answer.stderr)}. Change queue or ranks_per_node of the "
                f"resources (see {path})"
            )
        return f"{queue.partition}/{name}"

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        namespace, name = _address(scheduler_job)
        job = ask("kubectl", "get", "job", name, *namespace, "--output=json")
        if NOT_FOUND in job.stderr:
            return SchedulerRecord("cancelled", "somebody deleted it")
        pods = ask("kubectl", "get", "pods", f"--selector={JOB_LABEL}={name}", *namespace, "--output=json")
        warnings = f"--field-selector=involvedObject.name={name},type=Warning"
        events = ask("kubectl", "get", "events", warnings, *namespace, "--output=json")
        for answer in (job, pods, events):
            if answer.returncode:
                raise NoAnswerError(f"Kubernetes does not answer: {last_line(answer.stderr)}")
        items, warned = (json.loads(answer.stdout)["items"] for answer in (pods, events))
        return parse_record(json.loads(job.stdout), items, warned, datetime.now(UTC))

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        namespace, name = _address(scheduler_job)
        ask("kubectl", "delete", "job", name, *namespace, "--wait=false", "--ignore-not-found")

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        return work_dir / f"supervisor-{LEADER}.log"


def manifest(job: Job, work_dir: Path, name: str) -> dict[str, Any]:
    """The Job, without what the cluster adds (pod_template.py)."""
    queue, home = queue_of(job), work_dir.parent.parent
    labels = {"app.kubernetes.io/name": "glm46"}
    together = {"labelSelector": {"matchLabels": {JOB_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    container = {
        "name": "ranks",
        "image": queue.image,
        "command": ["/bin/sh", "-c", _script(work_dir, name, queue.partition)],
        "env": [
            {"name": SAVE_AFTER_VARIABLE, "value": str(save_after_seconds(queue))},
            {"name": START_VARIABLE, "value": str(START_SECONDS)},
        ],
        "envFrom": [{"secretRef": {"name": SECRET, "optional": True}}],
        "resources": {
            "requests": {"cpu": str(job.ranks_per_node)},
            **({"limits": {GPU_RESOURCE: str(job.gpus_per_node)}} if job.gpus_per_node else {}),
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "home", "mountPath": str(home)}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        # Of the pod, for which it begins on its node: the Job's own would count the time in the queue too.
        "activeDeadlineSeconds": queue.time_limit_minutes * 60,
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [together]}},
        "containers": [container],
        # The usual taint of nodes with GPUs, which keeps others off them.
        **({"tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}]} if job.gpus_per_node else {}),
        "volumes": [
            {"name": "home", "persistentVolumeClaim": {"claimName": queue.volume_claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            **({"namespace": queue.partition} if queue.partition else {}),
            "labels": {**labels, **({QUEUE_LABEL: queue.account} if queue.account else {})},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_nodes,
            "parallelism": job.num_nodes,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _script(work_dir: Path, name: str, namespace: str) -> str:
    """Of a container. Where the work directory is not there, its words are in the pod's log."""
    quoted = shlex.quote(str(work_dir))
    supervisor = shlex.join([sys.executable, "-m", "infra.jobs.node_supervisor", str(work_dir), f"{namespace}/{name}"])
    return "\n".join(
        [
            f"cd {shlex.quote(str(ROOT))} || exit 1",
            f'[ -d {quoted} ] && exec >> {quoted}/supervisor-"$JOB_COMPLETION_INDEX".log 2>&1',
            f'exec {supervisor} "$JOB_COMPLETION_INDEX"',
            "",
        ]
    )


def _address(scheduler_job: str) -> tuple[list[str], str]:
    """Options of its namespace, and its name."""
    namespace, name = scheduler_job.split("/")
    return _options(namespace), name


def _options(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def parse_record(
    job: dict[str, Any], pods: list[dict[str, Any]], events: list[dict[str, Any]], now: datetime
) -> SchedulerRecord:
    """Of what kubectl says of the Job, its pods, and warnings about the Job."""
    conditions = {
        each["type"]: each for each in job.get("status", {}).get("conditions", []) if each["status"] == "True"
    }
    running = [pod for pod in pods if _state(pod, "running") is not None]
    failed = conditions.get("Failed") or conditions.get("FailureTarget")
    if failed is not None and not running:
        ends = [end for end in map(_end_of_pod, pods) if end is not None]
        taken = [end for end in ends if end.state == "taken"]
        own = SchedulerRecord("ended" if pods else "taken", failed.get("message", ""))  # pods go with their node
        return (taken or ends or [own])[0]
    if "Complete" in conditions:
        return SchedulerRecord("ended")
    refused = [event["message"] for event in events[-1:] if FORBIDDEN.search(event["message"])] if not pods else []
    if stuck := [why for why in (_stuck(pod, now) for pod in pods) if why] or refused:
        return SchedulerRecord("stuck", stuck[0])
    # Pods without the others wait for them: ranks meet before they train.
    if failed is not None or (running and not any(map(_has_no_node, pods))):
        return SchedulerRecord("running")
    if "Suspended" in conditions:
        return SchedulerRecord("queued", f"suspended: {conditions['Suspended'].get('message', '')}")
    waits = [why for why in map(_waits, pods) if why] or [event["message"] for event in events[-1:]]
    return SchedulerRecord("queued", waits[0] if waits else "its pods are being made")


def _state(pod: dict[str, Any], state: str) -> dict[str, Any] | None:
    """Of a pod's container."""
    for container in pod["status"].get("containerStatuses", []):
        if state in container["state"]:
            return container["state"][state] or {}
    return None


def _end_of_pod(pod: dict[str, Any]) -> SchedulerRecord | None:
    """Why a pod failed; None for one that did not."""
    status, ended = pod["status"], _state(pod, "terminated") or {}
    where = f"pod {pod['metadata']['name']} on {pod['spec'].get('nodeName', 'no node')}"
    disrupted = [
        each.get("reason", "")
        for each in status.get("conditions", [])
        if each["type"] == "DisruptionTarget" and each["status"] == "True"
    ]
    for reason in (*disrupted, status.get("reason", ""), ended.get("reason", "")):
        if reason in TAKEN:
            words = status.get("message") or ended.get("message") or ""
            return SchedulerRecord("taken", f"{TAKEN[reason]} ({where}{': ' if words else ''}{words})")
    if status.get("phase") == "Failed" and not ended:
        why = ": ".join(words for words in (status.get("reason"), status.get("message")) if words)
        return SchedulerRecord("taken", f"its node did not take it ({where}{': ' if why else ''}{why})")
    if not ended.get("exitCode"):
        return None
    if ended["exitCode"] == SIGKILLED:
        return SchedulerRecord("taken", f"it was killed ({where})")
    words = ended.get("message", "").strip()
    return SchedulerRecord("ended", f"{where} ended with exit code {ended['exitCode']}{': ' if words else ''}{words}")


def _stuck(pod: dict[str, Any], now: datetime) -> str:
    """Why a pod will never run."""
    waiting = _state(pod, "waiting") or {}
    reason, words = waiting.get("reason", ""), waiting.get("message", "")
    # Its node pulls the image from when it has the pod: the time in the queue does not count.
    began_at = pod["status"].get("startTime") or pod["metadata"]["creationTimestamp"]
    is_late = (now - datetime.fromisoformat(began_at)).total_seconds() > PULL_SECONDS
    return f"{reason}: {words}" if reason in NEVER or (reason in PULLING and is_late) else ""


def _has_no_node(pod: dict[str, Any]) -> str:
    """Why a pod that waits for a node got none yet."""
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("message", condition.get("reason", ""))
    return ""


def _waits(pod: dict[str, Any]) -> str:
    """Why a pod does not run yet."""
    if why := _has_no_node(pod):
        return why
    waiting = _state(pod, "waiting") or {}
    return ": ".join(words for words in (waiting.get("reason"), waiting.get("message")) if words)
