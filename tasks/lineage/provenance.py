"""States what a registered version was made from, as an in-toto statement with SLSA's provenance predicate.

In: the store's manifests and the version's tags; no server. Out: the JSON of the statement
(infra/signature_bundle.py signs it, tasks/lineage/verify_release.py checks it). Layout:
https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from infra.registry.model_registry import GGUF_TAG, PROMOTION_DECISION_TAG, QUANTIZED_TAG
from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.lineage.trace_model import ModelLineage

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "glm46:pipeline/v1"
BUILDER = "glm46:command-line"
"""Identifies who vouches for the statement: whoever signed it, else nobody but the machine that wrote it."""
DECISION = "promotion decision"


def release_graph(graph: ManifestGraph, version: NamedVersion) -> ManifestGraph:
    """The part of a store that a release was made from: its weights, the decision on it and their ancestors. One
    manifest represents each digest, so what is computed from it does not depend on other runs in the store."""
    steps = graph.ancestors(*released_artifacts(graph, version).values(), _decision(graph, version))
    return ManifestGraph(graph.store, {made.digest: (made,) for made in steps})


def provenance_statement(
    graph: ManifestGraph, version: NamedVersion, lineage: ModelLineage, documents: Mapping[str, str]
) -> dict[str, Any]:
    """The statement on a released version. Subjects are its weights in every format; dependencies are the sources with
    trained documents and the packages that may change a result. `documents` are the sha256 of the other files of the
    evidence, by name. Raises ValueError for a version that is no release, or whose files the store lacks."""
    artifacts, decision = released_artifacts(graph, version), _decision(graph, version)
    steps = graph.ancestors(*artifacts.values(), decision)
    sources = [
        {"name": source.name, "digest": {"sha256": source.sha256}, "annotations": {"licence": source.licence}}
        for source in lineage.sources
        if source.sha256
    ]
    packages = [{"uri": f"pkg:pypi/{name}@{number}"} for name, number in packages_of(steps)]
    imported = [{"name": "imported weights", "digest": {"sha256": lineage.imported}}] if lineage.imported else []
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in subjects(artifacts)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "model": version.model,
                    "version": version.registered.version,
                    "recipes": [
                        {"step": made.step, "key": made.key, "recipe": made.identity["recipe"]}
                        for made in steps
                        if made.identity["recipe"] is not None
                    ],
                },
                "internalParameters": {
                    "formats": {name: made.key for name, made in artifacts.items()},
                    "decision": decision.key,
                    "steps": [
                        {
                            "step": made.step,
                            "key": made.key,
                            "digest": made.digest,
                            "code": made.identity["code"],
                            "inputs": made.identity["inputs"],
                            "distributions": made.identity["distributions"],
                            "attempt": made.attempt,
                            "manifest": graph.store.manifest_sha256(made),
                        }
                        for made in steps
                    ],
                },
                "resolvedDependencies": [*sources, *imported, *packages],
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {"invocationId": version.registered.key},
                "byproducts": [
                    {"name": name, "digest": {"sha256": sha256}}
                    for name, sha256 in {DECISION: decision.digest, **documents}.items()
                ],
            },
        },
    }


def subjects(artifacts: Mapping[str, Manifest]) -> list[tuple[str, str]]:
    """Name and sha256 of every file of a release's weights."""
    return [
        (f"{directory}/{name.removeprefix('hf/')}", entry.sha256)
        for directory, manifest in artifacts.items()
        for name, entry in manifest.content.items()
        if directory != "hf" or name.startswith("hf/")
    ]


def released_artifacts(graph: ManifestGraph, version: NamedVersion) -> Mapping[str, Manifest]:
    """The manifests of a release's weights by format: hf, gguf, and those of quantized checkpoints."""
    registered = version.registered
    if GGUF_TAG not in registered.tags:
        raise ValueError(
            f"{version.model} version {registered.version} was never judged for a release: name champion, candidate or "
            f"previous"
        )
    keys = {"hf": registered.key, "gguf": registered.tag(GGUF_TAG)} | {
        name.removeprefix(QUANTIZED_TAG): key
        for name, key in sorted(registered.tags.items())
        if name.startswith(QUANTIZED_TAG)
    }
    return {name: _committed(graph, version, f"{name} files", key) for name, key in keys.items()}


def _decision(graph: ManifestGraph, version: NamedVersion) -> Manifest:
    return _committed(graph, version, DECISION, version.registered.tag(PROMOTION_DECISION_TAG))


def _committed(graph: ManifestGraph, version: NamedVersion, what: str, key: str) -> Manifest:
    manifest = graph.store.read_manifest(key)
    if manifest is None:
        raise ValueError(
            f"store {graph.store.uri} does not hold the {what} of {version.model} version "
            f"{version.registered.version} (key {key[:12]}): name the store of its run with --store"
        )
    return manifest


def packages_of(steps: Iterable[Manifest]) -> list[tuple[str, str]]:
    """Names and versions of the Python packages in the steps' keys."""
    return sorted({package for made in steps for package in made.identity["distributions"].items()})
