"""The commands of glm46 that change or describe registered versions: rollback, evidence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import failures, usage_errors
from flows.cli.options import STORE


def rollback(
    reason: Annotated[str, typer.Option(help="why; kept on the version that goes, with time and user")],
    scale: Annotated[str, typer.Argument(metavar="SCALE|FILE.yaml", help="the scale of the model")] = "tiny",
    store: STORE = None,
) -> None:
    """Make the champion before this one champion again; a running `glm46 serve` follows."""
    with usage_errors():
        from configs.load import load_scale
        from flows.cli.serving.serve_model import find_version
        from infra.home import open_home
        from infra.registry.model_registry import CHAMPION, model_name, open_registry
        from infra.registry.promotion import roll_back
        from infra.storage.open_store import open_store

        home, configuration = open_home(), load_scale(scale)
        find_version(home, configuration, CHAMPION)
        opened = open_store(store, home)
    with failures(home):
        registry, model = open_registry(home), model_name(configuration.scale)
        done = roll_back(registry, opened, model, reason, lambda said: print(said, file=sys.stderr))
        print(done.describe())


def evidence(
    output: Annotated[Path, typer.Option(metavar="DIR", help="a new directory")],
    name: Annotated[str, typer.Argument(metavar="ALIAS|VERSION", help="champion, candidate, 3, ...")] = "champion",
    scale: Annotated[str, typer.Option(help="the scale of the model")] = "tiny",
    store: STORE = None,
) -> None:
    """Write what others' tools read: model card, provenance (SLSA), SBOM, OpenLineage, Croissant. No server."""
    with usage_errors():
        from flows.cli.write_evidence import write_evidence

        for path in write_evidence(name, scale, store, output):
            print(path)
