"""What a cluster adds to each pod of a job: node selectors, network devices, secrets for pulling the image.

It is said once, in the cluster: a PodTemplate by the name glm46 in the jobs' namespace, as the secret glm46 holds
their credentials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from infra.jobs.scheduled_jobs import ask, last_line, refuse_no_answer

TEMPLATE = "glm46"


def with_cluster_template(manifest: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The Job with what the PodTemplate's `template` has beyond its own."""
    spec = manifest["spec"]
    return {**manifest, "spec": {**spec, "template": _joined(spec["template"], template)}}


def read_cluster_template(namespace: list[str]) -> dict[str, Any]:
    """The `template` of the namespace's PodTemplate; empty where there is none. `namespace`: options of kubectl.

    Raises ValueError where it may not be read, NoAnswerError where Kubernetes is silent.
    """
    answer = ask("kubectl", "get", "podtemplate", TEMPLATE, *namespace, "--ignore-not-found", "--output=json")
    if answer.returncode:
        refuse_no_answer("Kubernetes", answer.stderr)
        raise ValueError(
            f"Kubernetes does not show the PodTemplate {TEMPLATE}: {last_line(answer.stderr)}. Give the role of this "
            f"machine `get` on podtemplates"
        )
    return json.loads(answer.stdout)["template"] if answer.stdout.strip() else {}


def _joined(own: Any, added: Any) -> Any:
    """Mappings key by key; lists of mappings one after the other, those of the same name joined; `own` wins else."""
    if isinstance(own, Mapping) and isinstance(added, Mapping):
        return {**added, **{key: _joined(value, added.get(key)) for key, value in own.items()}}
    if not (isinstance(own, list) and isinstance(added, list) and all(isinstance(each, Mapping) for each in own)):
        return own
    by_name = {each["name"]: each for each in added if "name" in each}
    names = {each["name"] for each in own if "name" in each}
    return [_joined(each, by_name.get(each.get("name"))) for each in own] + [
        each for each in added if each.get("name") not in names
    ]
