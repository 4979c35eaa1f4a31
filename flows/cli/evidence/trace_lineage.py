"""`glm46 lineage model` and `glm46 lineage document`: they read the store's manifests and the registry's database.

No server is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.load import load_scale
from infra.home import Home, known_home
from infra.registry.model_registry import find_registry, model_name, open_registry
from infra.registry.registered_versions import NamedVersion, all_versions, named_version
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_known_store

if TYPE_CHECKING:
    from tasks.lineage.trace_document import DocumentLineage
    from tasks.lineage.trace_model import ModelLineage


def lineage_of_model(name: str, scale: str, store: str | None, records_path: Path | None) -> ModelLineage:
    """The lineage of the version that an alias or a number names. Raises ValueError for an unknown name or a store
    without its parts."""
    from tasks.lineage.trace_model import trace_model

    if records_path is not None and not records_path.absolute().parent.is_dir():
        raise ValueError(f"--records {records_path}: {records_path.absolute().parent} is no directory: name one")
    if records_path is not None and records_path.is_dir():
        raise ValueError(f"--records {records_path} is a directory: name a file")
    home = known_home()
    version = named_version(open_registry(home), model_name(load_scale(scale).scale), name)
    return trace_model(read_manifest_graph(open_known_store(store, home)), version, records_path)


def lineage_of_document(asked: str, store: str | None) -> list[DocumentLineage]:
    """The lineage of a document id, or of every document of a URL. Raises ValueError for one that the store does not
    know."""
    from tasks.lineage.trace_document import trace_document

    home = known_home()
    graph, identities = read_manifest_graph(open_known_store(store, home)), (asked,)
    if "://" in asked:
        from tasks.lineage.plan_takedown import documents_at

        identities = documents_at(graph, asked)
    if not identities:
        raise ValueError(f"store {graph.store.uri} holds no document from {asked}: give the URL as the source has it")
    versions = registered_versions(home)
    return [trace_document(graph, versions, identity) for identity in identities]


def registered_versions(home: Home) -> list[NamedVersion]:
    """All registered versions; none where nothing was registered in this home yet."""
    registry = find_registry(home)
    return [] if registry is None else all_versions(registry)
