"""Compares a release's statement with a second run of its scale, step by step: the same digests, or what differs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from infra.storage.manifest_graph import ManifestGraph
from infra.storage.rerun_reason import describe_differences
from tasks.lineage.verify_release import Statement


class StepComparison(BaseModel):
    """One step of the release, beside the same step of the other run."""

    step: str
    digest: str
    """That of the statement."""
    difference: str
    """Empty where the other run has this digest."""

    def describe(self) -> str:
        """A line for a terminal."""
        return f"{self.step:<28} {self.digest[:12]}  {self.difference or 'same digest'}"


def compare_builds(statement: Statement, rebuilt: ManifestGraph) -> list[StepComparison]:
    """The steps that led to the weights, producers first. The decision on them is left out: it compares them with the
    champion of its time."""
    return [
        StepComparison(step=made["step"], digest=made["digest"], difference=_difference(statement, made, rebuilt))
        for made in steps_of_weights(statement)
    ]


def steps_of_weights(statement: Statement) -> list[dict[str, Any]]:
    """The steps of a statement that its weights were made by."""
    needed = set(statement.formats.values())
    chosen = []
    for made in reversed(statement.steps):
        if made["key"] in needed or made["digest"] in needed:
            needed.update(digest for digest in made["inputs"].values() if digest is not None)
            chosen.append(made)
    return chosen[::-1]


def _difference(statement: Statement, made: dict[str, Any], rebuilt: ManifestGraph) -> str:
    if made["digest"] in rebuilt.with_digest:
        return ""
    others = [each for manifests in rebuilt.with_digest.values() for each in manifests if each.step == made["step"]]
    if not others:
        return "the other run did not come to this step"
    same_key = [each for each in others if each.key == made["key"]]
    if same_key:
        return f"digest {same_key[0].digest[:12]} from the same recipe, inputs, code and packages"
    identity = statement.identity(made)
    reasons = [describe_differences(identity, {"recipe": None, **each.identity}) for each in others]
    return min(reasons, key=len)
