"""The bill of materials of a release in CycloneDX 1.6: its weights, the Python packages and its sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.lineage.provenance import packages_of, released_artifacts, subjects

if TYPE_CHECKING:
    from infra.registry.registered_versions import NamedVersion
    from infra.storage.manifest_graph import ManifestGraph
    from tasks.lineage.trace_model import ModelLineage


def bill_of_materials(graph: ManifestGraph, version: NamedVersion, lineage: ModelLineage) -> dict[str, Any]:
    """The document. Packages are those that may change a result, by the keys of the steps; sources those of which
    documents were trained. Raises ValueError for a version that is no release, or whose files the store lacks."""
    artifacts = released_artifacts(graph, version)
    model = f"model:{version.model}@{version.registered.version}"
    files = [
        {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [{"alg": "SHA-256", "content": sha256}]}
        for name, sha256 in subjects(artifacts)
    ]
    packages = [
        {"type": "library", "bom-ref": f"pkg:pypi/{name}@{number}", "name": name, "version": number}
        | {"purl": f"pkg:pypi/{name}@{number}"}
        for name, number in packages_of(graph.ancestors(*artifacts.values()))
    ]
    sources = [
        {"type": "data", "bom-ref": f"source:{number}", "name": source.name}
        | ({"hashes": [{"alg": "SHA-256", "content": source.sha256}]} if source.sha256 else {})
        | ({"licenses": [{"license": {"name": source.licence}}]} if source.licence else {})
        for number, source in enumerate(lineage.sources)
    ]
    components = [*files, *packages, *sources]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "machine-learning-model",
                "bom-ref": model,
                "name": version.model,
                "version": version.registered.version,
            }
        },
        "components": components,
        "dependencies": [
            {"ref": model, "dependsOn": [component["bom-ref"] for component in components]},
            *({"ref": component["bom-ref"]} for component in components),
        ],
    }
