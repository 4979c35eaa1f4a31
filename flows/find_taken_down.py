"""Finds what was taken down while a run goes on: it trains on what it had filtered before."""

from __future__ import annotations

from flows.running.run import Run
from infra.registry.promotion import FORGOTTEN_TAG
from infra.step import Artifact
from infra.storage.manifest_graph import read_manifest_graph
from tasks.data.filtering.blocked_documents import block_list_path, read_block_list
from tasks.lineage.stored_rows import find_rows
from tasks.lineage.trace_document import trace_document
from tasks.prepared_data import PreparedData
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

TEXT_FILES = ("documents/*",)


def change_of_block_list(run: Run, prepared: PreparedData) -> str:
    """Why the documents of this run are not those that the block list leaves by now; empty where they are."""
    if prepared.documents is None:
        return ""
    name = run.scale.data.recipe.filter.block_list
    listed, applied = read_block_list(run.home.root, name), prepared.documents.filtered.manifest.identity["inputs"]
    if applied["blocked"] == (listed and listed.digest):
        return ""
    return (
        f"the block list {block_list_path(run.home.root, name)} was changed after this run had filtered its documents: "
        f"run again, and what it lists is left out"
    )


def tag_of_taken_down(run: Run, prepared: PreparedData, checkpoint: Artifact[TrainedCheckpoint]) -> dict[str, str]:
    """The tag of a checkpoint that knows a text which was taken down since this run filtered its documents; empty where
    there is none. `glm46 forget` has tagged the versions that were registered by then."""
    name = run.scale.data.recipe.filter.block_list
    listed = read_block_list(run.home.root, name) if change_of_block_list(run, prepared) else None
    if listed is None or prepared.documents is None:
        return {}
    graph, filtered = read_manifest_graph(run.store), prepared.documents.filtered.manifest
    for column, blocked in listed.by_column.items():
        for row in find_rows(graph, filtered, TEXT_FILES, {column: blocked}, ("id",)) if blocked else ():
            models = trace_document(graph, [], row["id"]).models
            if checkpoint.digest in {model.digest for model in models}:
                path = block_list_path(run.home.root, name)
                return {FORGOTTEN_TAG: f"{row['id']}, listed in {path} while its run went on"}
    return {}
