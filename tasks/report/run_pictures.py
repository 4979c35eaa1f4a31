"""Draws what a run reached as self-contained pictures: the documents after each stage, the load of the experts."""

from __future__ import annotations

from tasks.prepared_data import PreparedData, PreparedDocuments
from tasks.report.phase_chart import standalone
from tasks.report.report_charts import bars
from tasks.report.report_data import funnel_bars
from tasks.report.report_inputs import ReportedPhases
from tasks.report.report_training import load_strips


def funnel_chart(data: PreparedData, documents: PreparedDocuments) -> bytes:
    """An SVG file: documents after each stage that drops some."""
    return standalone(bars("Documents after each stage", funnel_bars(data, documents)))


def load_chart(phases: ReportedPhases) -> bytes | None:
    """An SVG file: the busiest expert of each layer over the tokens of all phases; None where no layer of theirs has
    experts, or all weights were imported."""
    drawn = load_strips(phases)
    return None if drawn is None else standalone(drawn)
