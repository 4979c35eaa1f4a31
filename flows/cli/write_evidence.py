"""`glm46 evidence`: what others' tools take, computed from the store's manifests and the registry's database.

No server is needed.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

from configs.load import load_scale
from infra.home import open_home
from infra.registry.model_registry import model_name, open_registry
from infra.registry.registered_versions import named_version
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.lineage.bill_of_materials import bill_of_materials
from tasks.lineage.dataset_description import dataset_description
from tasks.lineage.lineage_events import lineage_events
from tasks.lineage.provenance import provenance_statement
from tasks.lineage.published_card import published_card
from tasks.lineage.trace_model import trace_model

CARD_FILE, PROVENANCE_FILE, MATERIALS_FILE = "README.md", "provenance.intoto.json", "sbom.cdx.json"
EVENTS_FILE, DATASET_FILE = "lineage.openlineage.jsonl", "croissant.json"


def write_evidence(name: str, scale: str, store: str | None, target: Path) -> list[Path]:
    """Write the evidence of the version that an alias or a number names; all files or none. Raises ValueError for an
    unknown name, a directory that exists or a store without the version's parts."""
    if target.exists():
        raise ValueError(f"{target} exists: name a new directory")
    home = open_home()
    version = named_version(open_registry(home), model_name(load_scale(scale).scale), name)
    graph = read_manifest_graph(open_store(store, home))
    lineage = trace_model(graph, version, None)
    statement, materials = provenance_statement(graph, version, lineage), bill_of_materials(graph, version, lineage)
    texts = {
        CARD_FILE: published_card(graph, version),
        PROVENANCE_FILE: json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        MATERIALS_FILE: json.dumps(materials, indent=1, ensure_ascii=False) + "\n",
        EVENTS_FILE: "".join(f"{json.dumps(event)}\n" for event in lineage_events(graph, version, datetime.now(UTC))),
        DATASET_FILE: json.dumps(dataset_description(graph, lineage), indent=1, ensure_ascii=False) + "\n",
    }
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file, text in texts.items():
            (temporary / file).write_text(text, encoding="utf-8")
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [target / file for file in texts]
