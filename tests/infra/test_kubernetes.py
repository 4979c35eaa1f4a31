"""The Kubernetes launcher without a cluster: its manifest against Kubernetes' schemas, its container's command as a
process of this machine, records as kubectl prints them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

import kubernetes_validate
import pytest
import yaml

from configs.schema import QueueResources
from infra.jobs.kubernetes_jobs import Kubernetes, manifest, parse_record
from infra.jobs.launchers import SUBMISSION_FILE, Job
from infra.jobs.pod_template import with_cluster_template
from infra.jobs.scheduled_jobs import NoAnswerError, ScheduledLauncher, SchedulerRecord
from infra.jobs.supervisor import read_job_file
from tests.infra.test_launcher import starts, wait_for
from tests.support.cluster.default_queue import DEFAULT_QUEUE

KEY = "0123abcd"
QUEUE = DEFAULT_QUEUE.model_copy(
    update={"partition": "team", "account": "night", "image": "registry/glm46:1", "volume_claim": "glm46-home"}
)
NOW = datetime(2026, 11, 23, 9, 0, tzinfo=UTC)
EARLIER, JUST_NOW = "2026-11-23T08:00:00Z", "2026-11-23T08:59:00Z"


def job(tmp_path, queue: QueueResources = QUEUE) -> Job:
    return Job(KEY, "tests.support.toy_job", (str(tmp_path / KEY), "succeed"), 4, {"TOY": "1"}, 2, queue)


@pytest.mark.parametrize("queue", [QUEUE, DEFAULT_QUEUE.model_copy(update={"image": "i", "volume_claim": "c"})])
@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_the_manifest_is_valid_and_has_a_pod_per_node(queue, version, tmp_path):
    text = yaml.safe_dump(manifest(job(tmp_path, queue), tmp_path / "home" / "work" / KEY, "glm46-0123abcd-1"))
    described = yaml.safe_load(text)
    kubernetes_validate.validate(described, version, strict=True)
    spec = described["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 2, 0)
    container = spec["template"]["spec"]["containers"][0]
    assert container["volumeMounts"][0]["mountPath"] == str(tmp_path / "home")
    assert {"name": "GLM46_SAVE_AFTER_SECONDS", "value": "480"} in container["env"]
    assert "limits" not in container["resources"]
    with_gpus = manifest(replace(job(tmp_path, queue), device="cuda"), tmp_path / "home" / "work" / KEY, "glm46-1")
    kubernetes_validate.validate(with_gpus, version, strict=True)
    limits = with_gpus["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "2"}
    assert with_gpus["spec"]["template"]["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(described | {"spec": spec | {"paralelism": 2}}, version, strict=True)


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A stand-in that keeps its arguments, takes what is created, and prints what the test wrote."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kubectl"
    program.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n'
        f'case "$1 $2" in "create --filename") echo created;; get*) cat {tmp_path}/"$2";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "events").write_text('{"items": []}')
    (tmp_path / "podtemplate").write_text("")  # as with --ignore-not-found
    return program


def test_pods_that_run_the_container_do_the_job_and_the_launcher_follows(kubectl, tmp_path):
    launcher = ScheduledLauncher(tmp_path / "work", Kubernetes())
    handle = launcher.submit(job(tmp_path / "work"))
    described = yaml.safe_load((tmp_path / "work" / KEY / "job.yaml").read_text())
    command = described["spec"]["template"]["spec"]["containers"][0]["command"]
    pods = [subprocess.Popen(command, env={"JOB_COMPLETION_INDEX": index, "PATH": os.defpath}) for index in ("1", "0")]
    (tmp_path / "job").write_text(json.dumps({"status": {}}))
    (tmp_path / "pods").write_text(json.dumps({"items": [pod(running={"startedAt": EARLIER})]}))
    assert launcher.poll(handle).state == "running"
    assert [each.wait(60) for each in pods] == [0, 0]
    assert wait_for(lambda: read_job_file(tmp_path / "work" / KEY)).exit_code == 0
    (tmp_path / "job").write_text(json.dumps({"status": {"conditions": [condition("Complete")]}}))
    assert ScheduledLauncher(tmp_path / "work", Kubernetes()).poll(handle).state == "succeeded"
    assert [starts(tmp_path / "work", rank)[0][1:3] for rank in range(4)] == [["1", "4"]] * 4
    name = described["metadata"]["name"]
    assert f"get job {name} --namespace=team --output=json" in (tmp_path / "asked").read_text().splitlines()


def test_a_pod_has_what_the_clusters_template_adds_and_keeps_its_own(kubectl, tmp_path):
    container = {
        "name": "ranks",
        "image": "any",
        "command": ["sleep"],
        "env": [{"name": "NCCL_IB_GID_INDEX", "value": "3"}, {"name": "GLM46_SAVE_AFTER_SECONDS", "value": "1"}],
        "resources": {"limits": {"rdma/hca": "8"}, "requests": {"memory": "64Gi", "cpu": "99"}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    template = {
        "metadata": {"labels": {"team": "night"}, "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
        "spec": {
            "restartPolicy": "Always",
            "nodeSelector": {"pool": "h200"},
            "imagePullSecrets": [{"name": "registry"}],
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "containers": [container],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }
    (tmp_path / "podtemplate").write_text(json.dumps({"kind": "PodTemplate", "template": template}))
    asked = replace(job(tmp_path / "work"), device="cuda")
    ScheduledLauncher(tmp_path / "work", Kubernetes()).submit(asked)
    described = yaml.safe_load((tmp_path / "work" / KEY / "job.yaml").read_text())
    kubernetes_validate.validate(described, "1.37", strict=True)
    plain = manifest(asked, tmp_path / "work" / KEY, described["metadata"]["name"])
    assert with_cluster_template(plain, {}) == plain
    labelled, pod = described["spec"]["template"]["metadata"], described["spec"]["template"]["spec"]
    assert labelled["labels"] == {"team": "night", "app.kubernetes.io/name": "glm46"}
    assert pod["nodeSelector"] == {"pool": "h200"} and pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["restartPolicy"] == "Never" and [each["key"] for each in pod["tolerations"]] == [
        "nvidia.com/gpu",
        "team",
    ]
    [ranks], own = pod["containers"], plain["spec"]["template"]["spec"]["containers"][0]
    assert (ranks["image"], ranks["command"]) == (own["image"], own["command"])
    assert ranks["resources"]["limits"] == {"nvidia.com/gpu": "2", "rdma/hca": "8"}
    assert ranks["resources"]["requests"] == {"memory": "64Gi", "cpu": "2"}
    assert [each["name"] for each in ranks["volumeMounts"]] == ["home", "shared-memory", "scratch"]
    assert ranks["env"] == [*own["env"], {"name": "NCCL_IB_GID_INDEX", "value": "3"}]
    kubectl.write_text("#!/bin/bash\necho 'Error from server (Forbidden): podtemplates is forbidden' >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"PodTemplate glm46: .*forbidden\. Give the role .* `get` on podtemplates"):
        Kubernetes().submit(asked, tmp_path / "work" / KEY)


def test_a_pod_without_the_volume_and_a_refusal_say_so(kubectl, tmp_path):
    launcher = ScheduledLauncher(tmp_path / "work", Kubernetes())
    described = manifest(job(tmp_path), tmp_path / "elsewhere" / "work" / KEY, "glm46-1")
    command = described["spec"]["template"]["spec"]["containers"][0]["command"]
    ended = subprocess.run(command, env={"JOB_COMPLETION_INDEX": "0"}, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "put GLM46_HOME on a directory that all nodes mount" in ended.stderr
    quota = "echo 'Error from server (Forbidden): exceeded quota: team' >&2; exit 1"
    kubectl.write_text(f'#!/bin/bash\n[ "$1" = get ] || {{ {quota}; }}\n')
    with pytest.raises(ValueError, match=r"Kubernetes refuses the job: .*exceeded quota: team\. Change queue"):
        launcher.submit(job(tmp_path))
    kubectl.write_text("#!/bin/bash\necho 'Unable to connect to the server: TLS handshake timeout' >&2\nexit 1\n")
    with pytest.raises(NoAnswerError, match="Kubernetes does not answer: Unable to connect"):
        launcher.submit(job(tmp_path / "another"))
    assert launcher.find(KEY) is None


def test_a_job_whose_submitter_was_killed_before_it_wrote_the_name_is_found_and_not_submitted_twice(kubectl, tmp_path):
    launcher, work = ScheduledLauncher(tmp_path / "work", Kubernetes()), tmp_path / "work" / KEY
    (tmp_path / "pods").write_text('{"items": []}')
    names = []
    for conditions in ([], [], FAILED):
        (tmp_path / "job").write_text(json.dumps({"status": {"conditions": conditions}}))
        launcher.submit(job(tmp_path))
        names.append(launcher._name(KEY))
        (work / SUBMISSION_FILE).unlink()
    assert names[0] == names[1] != names[2], "one that has ended is no longer followed"
    assert (tmp_path / "asked").read_text().count("create --filename") == 2


def condition(kind: str, status: str = "True", **values: str) -> dict:
    return {"type": kind, "status": status, **values}


def pod(*conditions: dict, created: str = EARLIER, status: dict | None = None, **state: dict) -> dict:
    """As in `kubectl get pods --output=json`, with its container in a state."""
    containers = [{"name": "ranks", "state": state}] if state else []
    return {
        "metadata": {"name": "glm46-1-0-x", "creationTimestamp": created},
        "spec": {"nodeName": "node1"},
        "status": {"conditions": list(conditions), "containerStatuses": containers, **(status or {})},
    }


FAILED = [condition("Failed", reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")]
DISRUPTED = condition("DisruptionTarget", reason="PreemptionByScheduler")
UNSCHEDULABLE = condition("PodScheduled", "False", reason="Unschedulable", message="0/4 nodes are available")
PULLING = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry/glm46:1"'}
SIGKILLED = {"exitCode": 137, "reason": "Error"}
WHERE = "pod glm46-1-0-x on node1"


@pytest.mark.parametrize(
    ("conditions", "pods", "events", "record"),
    [
        ([], [], [], SchedulerRecord("queued", "its pods are being made")),
        ([], [], [{"message": "exceeded quota: team"}], SchedulerRecord("queued", "exceeded quota: team")),
        (
            [condition("Suspended", message="Job suspended")],
            [],
            [],
            SchedulerRecord("queued", "suspended: Job suspended"),
        ),
        ([], [pod(UNSCHEDULABLE)], [], SchedulerRecord("queued", "0/4 nodes are available")),
        ([], [pod(running={}), pod(UNSCHEDULABLE)], [], SchedulerRecord("queued", "0/4 nodes are available")),
        ([], [pod(waiting={"reason": "ContainerCreating"})], [], SchedulerRecord("queued", "ContainerCreating")),
        (
            [],
            [pod(waiting=PULLING, created=JUST_NOW)],
            [],
            SchedulerRecord("queued", f"ImagePullBackOff: {PULLING['message']}"),
        ),
        ([], [pod(waiting=PULLING)], [], SchedulerRecord("stuck", f"ImagePullBackOff: {PULLING['message']}")),
        (  # it waited for its node, and pulls since a moment
            [],
            [pod(waiting=PULLING, status={"startTime": JUST_NOW})],
            [],
            SchedulerRecord("queued", f"ImagePullBackOff: {PULLING['message']}"),
        ),
        (
            [],
            [pod(running={}), pod(waiting={"reason": "InvalidImageName", "message": "no name"}, created=JUST_NOW)],
            [],
            SchedulerRecord("stuck", "InvalidImageName: no name"),
        ),
        ([], [pod(running={"startedAt": EARLIER})], [], SchedulerRecord("running")),
        (FAILED, [pod(running={}), pod(terminated=SIGKILLED)], [], SchedulerRecord("running")),
        ([condition("Complete")], [pod(terminated={"exitCode": 0})], [], SchedulerRecord("ended")),
        (
            FAILED,
            [pod(status={"reason": "DeadlineExceeded"}, terminated=SIGKILLED)],
            [],
            SchedulerRecord("taken", f"its time limit came ({WHERE})"),
        ),
        (
            FAILED,
            [pod(terminated={"exitCode": 1, "message": "no volume\n"})],
            [],
            SchedulerRecord("ended", f"{WHERE} ended with exit code 1: no volume"),
        ),
        (
            FAILED,
            [pod(terminated={"exitCode": 137, "reason": "OOMKilled"})],
            [],
            SchedulerRecord("taken", f"its memory ran out ({WHERE})"),
        ),
        (
            FAILED,
            [pod(terminated={"exitCode": 1}), pod(DISRUPTED, terminated=SIGKILLED)],
            [],
            SchedulerRecord("taken", f"a pod of higher priority took its node ({WHERE})"),
        ),
        (
            FAILED,
            [pod(status={"reason": "Evicted", "message": "The node was low on resource: memory."})],
            [],
            SchedulerRecord("taken", f"its node evicted it ({WHERE}: The node was low on resource: memory.)"),
        ),
        (FAILED, [pod(terminated=SIGKILLED)], [], SchedulerRecord("taken", f"it was killed ({WHERE})")),
        (FAILED, [], [], SchedulerRecord("taken", "Job has reached the specified backoff limit")),
        (
            FAILED,
            [pod(status={"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Available: 7"})],
            [],
            SchedulerRecord("taken", f"its node did not take it ({WHERE}: UnexpectedAdmissionError: Available: 7)"),
        ),
        (
            [],
            [],
            [{"message": 'pods "glm46-1-0-" is forbidden: violates PodSecurity "restricted"'}],
            SchedulerRecord("stuck", 'pods "glm46-1-0-" is forbidden: violates PodSecurity "restricted"'),
        ),
        (
            [],
            [],
            [{"message": 'pods "glm46-1-0-" is forbidden: exceeded quota: team'}],
            SchedulerRecord("queued", 'pods "glm46-1-0-" is forbidden: exceeded quota: team'),
        ),
    ],
)
def test_records_are_read(conditions, pods, events, record):
    assert parse_record({"status": {"conditions": conditions}}, pods, events, NOW) == record
