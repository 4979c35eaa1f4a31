"""Describes the texts that a version's shards were cut from, in Croissant 1.1: files, columns, licences, sources.

Addresses of files are relative to the store: the description loads from the store's directory. Layout:
https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.lineage.trace_model import ModelLineage

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_INPUTS = {"shard_documents": ("documents", "repositories"), "shard_chats": ("chats",)}
"""The texts that each step cuts into shards, by the names of its inputs."""
DERIVED_FROM = "http://www.w3.org/ns/prov#wasDerivedFrom"
TEXT_DIRECTORIES = ("documents/", "chats/")
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    **{
        name: f"cr:{name}"
        for name in [
            "arrayShape",
            "citeAs",
            "column",
            "containedIn",
            "equivalentProperty",
            "extract",
            "field",
            "fileObject",
            "fileProperty",
            "fileSet",
            "format",
            "includes",
            "isArray",
            "isLiveDataset",
            "jsonPath",
            "key",
            "md5",
            "parentField",
            "path",
            "recordSet",
            "references",
            "regex",
            "repeated",
            "replace",
            "samplingRate",
            "separator",
            "source",
            "subField",
            "transform",
        ]
    },
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
}
UNSTATED = "NOASSERTION"
"""SPDX's word for a licence that nobody stated: the texts of such sources have none of the others."""


def dataset_description(graph: ManifestGraph, lineage: ModelLineage) -> dict[str, Any]:
    """The description as JSON-LD. Raises ValueError for a version that was trained on no shards of the store."""
    texts = _named_texts(graph, lineage)
    if not texts:
        raise ValueError(
            f"{lineage.model} version {lineage.version} was trained on no texts that store {graph.store.uri} holds: "
            "name the store of its run with --store"
        )
    licences = sorted({source.licence or UNSTATED for source in lineage.sources})
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": f"{lineage.model}-{lineage.version}-texts",
        "description": f"Texts that the shards of {lineage.model} version {lineage.version} were cut from: "
        f"{lineage.num_documents:,} documents of {len(lineage.sources):,} sources were trained on.",
        "license": licences,
        "rai:dataPreprocessingProtocol": [_step_line(step.step, step.dropped) for step in lineage.steps],
        DERIVED_FROM: [
            {"name": source.name, "license": source.licence, "sha256": source.sha256} for source in lineage.sources
        ],
        "distribution": [part for name, manifest in texts.items() for part in _distribution(name, manifest)],
        "recordSet": [_record_set(name, _schema(graph, manifest)) for name, manifest in texts.items()],
    }


def _named_texts(graph: ManifestGraph, lineage: ModelLineage) -> dict[str, Manifest]:
    """The texts by name; several inputs of one name, as collected and sampled conversations, have their digests in
    it."""
    found = list(shard_texts(graph, lineage))
    counts = Counter(name for name, _ in found)
    return {name if counts[name] == 1 else f"{name}-{made.digest[:12]}": made for name, made in found}


def shard_texts(graph: ManifestGraph, lineage: ModelLineage) -> Iterator[tuple[str, Manifest]]:
    """The artifacts whose texts a version's shards were cut from, by the names of the inputs."""
    keys = {step.key for step in lineage.steps if step.step in SHARD_INPUTS}
    for shards in graph.made_by(*SHARD_INPUTS):
        for name in SHARD_INPUTS[shards.step] if shards.key in keys else ():
            made = graph.input_of(shards, name)
            if made is not None and text_parts(made):
                yield name, made


def text_parts(manifest: Manifest) -> list[str]:
    """The files of an artifact that hold texts."""
    return sorted(name for name in manifest.content if name.startswith(TEXT_DIRECTORIES))


def _distribution(name: str, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Every part, and the set of them all."""
    parts = text_parts(manifest)
    for part in parts:
        entry = manifest.content[part]
        yield {
            "@type": "cr:FileObject",
            "@id": f"{name}-files/{part}",
            "name": part,
            "contentUrl": _address(manifest, part),
            "contentSize": f"{entry.size} B",
            "encodingFormat": "application/x-parquet",
            "sha256": entry.sha256,
        }
    yield {
        "@type": "cr:FileSet",
        "@id": f"{name}-files",
        "encodingFormat": "application/x-parquet",
        "includes": f"{_address(manifest, parts[0]).rpartition('/')[0]}/*.parquet",
    }


def _address(manifest: Manifest, part: str) -> str:
    return f"objects/{manifest.object_key}/{manifest.attempt}/{part}"


def _schema(graph: ManifestGraph, manifest: Manifest) -> pa.Schema:
    import pyarrow.parquet as pq

    return pq.read_schema(graph.open(manifest).path(text_parts(manifest)[0]))


def _record_set(name: str, schema: pa.Schema) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{name}/{column.name}",
                "name": column.name,
                "dataType": _data_type(column.type),
                "source": {"fileSet": {"@id": f"{name}-files"}, "extract": {"column": column.name}},
            }
            for column in schema
        ],
    }


def _data_type(arrow: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_integer(arrow):
        return "sc:Integer"
    if pa.types.is_floating(arrow):
        return "sc:Float"
    return "sc:Boolean" if pa.types.is_boolean(arrow) else "sc:Text"


def _step_line(step: str, dropped: dict[str, int]) -> str:
    left_out = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items() if count)
    return f"{step}: left out {left_out}" if left_out else step
