"""Figures that others state, from published_figures.yaml: shown beside measured ones, and never among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

from configs.schema import Frozen

PUBLISHED_PATH = Path(__file__).with_suffix(".yaml")


class PublishedFigure(Frozen):
    """A figure that others state."""

    figure: str
    value: str
    of: str
    source: str
    benchmark: str = ""
    """Our benchmark of the same questions, by its name in configs/suites; empty where there is none."""


@cache
def published_figures() -> tuple[PublishedFigure, ...]:
    """All of published_figures.yaml; S0 is explained in docs/source-documents.md."""
    entries = yaml.safe_load(PUBLISHED_PATH.read_text(encoding="utf-8"))
    return tuple(PublishedFigure.model_validate(entry) for entry in entries)


def quoted_of(benchmark: str) -> str:
    """What others state of a benchmark, with the model; empty where nothing is."""
    return "; ".join(
        f"{each.value} ({each.figure}, {each.of})" for each in published_figures() if each.benchmark == benchmark
    )


def quoted_table(benchmarks: Sequence[str]) -> str:
    """For a terminal, what others state of these benchmarks; empty where nothing is."""
    quoted = [each for name in benchmarks for each in published_figures() if each.benchmark == name]
    lines = [f"{each.benchmark:<18}{each.figure:<22}{each.value:>8}  {each.of}; {each.source}" for each in quoted]
    return "\n".join(["quoted, not measured here:", *lines]) if lines else ""
