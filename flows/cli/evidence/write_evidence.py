"""`glm46 evidence`: what others' tools take, computed from the store's manifests and the registry's database.

No server is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from configs.load import load_scale
from infra.home import known_home
from infra.registry.model_registry import model_name, open_registry
from infra.registry.registered_versions import NamedVersion, named_version
from infra.signature_bundle import read_private_key, sign
from infra.storage.manifest_graph import ManifestGraph, read_manifest_graph
from infra.storage.open_store import open_known_store
from tasks.lineage.bill_of_materials import bill_of_materials
from tasks.lineage.dataset_description import dataset_description
from tasks.lineage.lineage_events import lineage_events
from tasks.lineage.provenance import provenance_statement, release_graph
from tasks.lineage.published_card import published_card
from tasks.lineage.trace_model import trace_model
from tasks.lineage.training_summary import training_summary
from tasks.lineage.verify_release import PROVENANCE_FILE, signed_payloads

CARD_FILE, MATERIALS_FILE = "README.md", "sbom.cdx.json"
EVENTS_FILE, DATASET_FILE = "lineage.openlineage.jsonl", "croissant.json"
SUMMARY_FILE = "training-content-summary.md"


def write_evidence(
    name: str, scale: str, store: str | None, target: Path, sign_key_path: Path | None = None
) -> list[Path]:
    """Write the evidence of the version that an alias or a number names; all files or none. Raises ValueError for an
    unknown name, a directory that exists, a store without the version's parts or a key that cannot sign."""
    if target.exists():
        raise ValueError(f"{target} exists: name a new directory")
    above = next(parent for parent in target.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{target} cannot be made in {above}: name a new directory in one that you can write")
    key = None if sign_key_path is None else read_private_key(sign_key_path)
    home = known_home()
    version = named_version(open_registry(home), model_name(load_scale(scale).scale), name)
    files = evidence_files(read_manifest_graph(open_known_store(store, home)), version)
    if key is not None:
        files |= signatures(files[PROVENANCE_FILE], key)
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file, content in files.items():
            (temporary / file).write_bytes(content)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [target / file for file in files]


def signatures(statement: bytes, key: EllipticCurvePrivateKey) -> dict[str, bytes]:
    """The bundles by file: of the statement, and of the weights in each format."""
    return {file: sign(payload, key) for file, payload in signed_payloads(statement).items()}


def evidence_files(store_graph: ManifestGraph, version: NamedVersion) -> dict[str, bytes]:
    """The files by name, the statement last: it names the others by sha256. Raises ValueError for a version that is no
    release, or whose parts the store lacks."""
    graph = release_graph(store_graph, version)
    lineage = trace_model(graph, version, None)
    materials, description = bill_of_materials(graph, version, lineage), dataset_description(graph, lineage)
    events = lineage_events(graph, version, datetime.now(UTC))
    texts = {
        CARD_FILE: published_card(store_graph, version),
        MATERIALS_FILE: json.dumps(materials, indent=1, ensure_ascii=False) + "\n",
        EVENTS_FILE: "".join(f"{json.dumps(event)}\n" for event in events),
        SUMMARY_FILE: training_summary(graph, lineage),
        DATASET_FILE: json.dumps(description, indent=1, ensure_ascii=False) + "\n",
    }
    files = {file: text.encode() for file, text in texts.items()}
    documents = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    statement = provenance_statement(graph, version, lineage, documents)
    files[PROVENANCE_FILE] = (json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return files
