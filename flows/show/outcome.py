"""The outcome of a pipeline run: the same for the command line, the deployment and `--json`."""

from __future__ import annotations

import shlex

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from flows.running.stage_log import StageResult

FILE_WIDTH = 180
"""Columns of the table where it goes to a file or a pipe."""


class RunOutcome(BaseModel):
    """The end of a run. `reasons` is empty unless a gate refused; `promoted` means that alias `champion` resolves to
    this run's digest."""

    promoted: bool
    model: str
    alias: str
    version: str
    seconds: float
    digest: str
    """Content digest of the newest language model's Hugging Face export; empty where the run made none."""
    report: str
    stages: list[StageResult]
    reasons: list[str]


def print_outcome(outcome: RunOutcome, scale: str, store: str | None) -> None:
    """The table of stages and the end in words, on standard error; scale and store as the run's user named them."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "seconds", "state", "digest", "key figures"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for stage in outcome.stages:
        state = "cached" if stage.cached else stage.reason
        table.add_row(stage.name, f"{stage.seconds:.1f}", state, stage.digest[:12], stage.figures)
    console.print()
    console.print(table)
    console.print(f"\n{outcome.seconds:.1f} s in all", markup=False)
    for reason in outcome.reasons:
        console.print(f"refused: {reason}", markup=False, soft_wrap=True)
    if outcome.promoted:
        console.print(
            f"promoted: {outcome.model} version {outcome.version} has the alias {outcome.alias}", markup=False
        )
        chat = shlex.join(["glm46", "chat", "--scale", scale, *([] if store is None else ["--store", store])])
        console.print(f"talk to it: {chat}", markup=False, soft_wrap=True)
    if outcome.report:
        console.print(f"report: {outcome.report}", markup=False, soft_wrap=True)
