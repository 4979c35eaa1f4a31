"""`glm46 verify --rebuild`: runs a scale in a fresh home and compares its digests with those of a statement.

The run is a process of its own, with a home and a store that nothing else uses; both are removed at the end.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from configs.load import load_scale
from flows.cli.evidence.whole_run import whole_run
from infra.home import Home
from infra.registry.model_registry import model_name
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.lineage.compare_builds import StepComparison, compare_builds
from tasks.lineage.verify_release import read_statement


def rebuild_release(directory: Path, scale: str, data: str | None) -> list[StepComparison]:
    """Run the scale from its sources again. Raises ValueError for the scale of another model, RuntimeError where the
    run fails."""
    statement = read_statement(directory)
    model = model_name(load_scale(scale).scale)
    if model != statement.model:
        raise ValueError(f"--rebuild {scale} makes {model}, and {directory} is about {statement.model}")
    with tempfile.TemporaryDirectory(prefix="glm46-rebuild-") as root:
        whole_run(Path(root), scale, *([] if data is None else ["--data", data]))
        return compare_builds(statement, read_manifest_graph(open_store(None, Home(Path(root)))))
