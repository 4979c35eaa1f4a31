"""The commands `glm46 lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import usage_errors
from flows.cli.options import JSON, STORE

lineage_app = typer.Typer(
    no_args_is_help=True, help="Trace a model to its data, or a document to its models. Needs no server."
)


@lineage_app.command("model")
def lineage_model(
    name: Annotated[str, typer.Argument(metavar="ALIAS|VERSION", help="champion, sft, 3, ...")],
    scale: Annotated[str, typer.Option(help="the scale of the model")] = "tiny",
    store: STORE = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet", help="also write every trained document to this file")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Show phases, packed orders, shards, tokenizer, data steps with what they dropped, sources down to record
    offsets."""
    with usage_errors():
        from flows.cli.evidence.trace_lineage import lineage_of_model

        lineage = lineage_of_model(name, scale, store, records)
    print(lineage.model_dump_json() if as_json else lineage.describe())


@lineage_app.command("document")
def lineage_document(
    asked: Annotated[str, typer.Argument(metavar="ID|URL", help="16 hex digits, or the address of a page")],
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Show which steps dropped the document, which phases were trained on it, and which models came from those
    phases; of a URL each document that was cut from its page."""
    with usage_errors():
        from flows.cli.evidence.trace_lineage import lineage_of_document

        lineages = lineage_of_document(asked, store)
    print("\n".join(lineage.model_dump_json() if as_json else lineage.describe() for lineage in lineages))
