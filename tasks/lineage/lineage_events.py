"""States which step made which artifact from which, as OpenLineage's job events.

They are events on jobs, not on runs: the store knows what was made from what, and not at which hour. Layout:
https://openlineage.io/spec/2-0-2/OpenLineage.json
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.lineage.provenance import released_artifacts

NAMESPACE = "glm46"
PRODUCER = "glm46:command-line"
SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/JobEvent"
FACET_SCHEMAS = {
    name: f"https://openlineage.io/spec/facets/{version}/{kind}.json#/$defs/{kind}"
    for name, kind, version in (
        ("jobType", "JobTypeJobFacet", "2-0-4"),
        ("version", "DatasetVersionDatasetFacet", "1-0-1"),
        ("outputStatistics", "OutputStatisticsOutputDatasetFacet", "1-0-2"),
    )
}


def lineage_events(graph: ManifestGraph, version: NamedVersion, stated: datetime) -> Iterator[dict[str, Any]]:
    """One event per step that led to a released version's weights, producers first. A dataset is an artifact; its
    version is the digest. Raises ValueError for a version that is no release, or whose files the store lacks."""
    steps = graph.ancestors(*released_artifacts(graph, version).values())
    names = {made.digest: f"{made.step}.{made.digest[:12]}" for made in steps}
    for made in steps:
        yield {
            "eventTime": stated.isoformat(),
            "producer": PRODUCER,
            "schemaURL": SCHEMA,
            "job": {
                "namespace": NAMESPACE,
                "name": f"{made.step}.{made.key[:12]}",
                "facets": _facet("jobType", processingType="BATCH", integration="GLM46", jobType="STEP"),
            },
            "inputs": [
                _dataset(names.get(digest, f"{name}.{digest[:12]}"), digest)
                for name, digest in sorted(made.identity["inputs"].items())
                if digest is not None
            ],
            "outputs": [_dataset(names[made.digest], made.digest) | {"outputFacets": _statistics(made)}],
        }


def _dataset(name: str, digest: str) -> dict[str, Any]:
    return {"namespace": NAMESPACE, "name": name, "facets": _facet("version", datasetVersion=digest)}


def _statistics(made: Manifest) -> dict[str, Any]:
    sizes = [entry.size for entry in made.content.values()]
    return _facet("outputStatistics", size=sum(sizes), fileCount=len(sizes))


def _facet(name: str, **values: Any) -> dict[str, Any]:
    return {name: {"_producer": PRODUCER, "_schemaURL": FACET_SCHEMAS[name], **values}}
