"""Committed stages as samples: seconds, rows, verdicts of gates, evaluations beside those of the run before."""

from __future__ import annotations

from infra.step import Manifest
from tasks.monitoring.metric_table import Figures
from tasks.monitoring.stage_runs import StageRun

ROWS = ("num_documents", "num_chats", "num_prompts", "num_pairs", "num_rows")
"""Names of counts in the records; the first that a record has is counted, with what the step dropped or
rejected."""
REPORT = "write_report"
"""Repeats the verdict of the gates."""
RUN_DIGITS = 12
"""Digits of a key in the label `run`, as the commands print them."""


def add_stage(figures: Figures, run: StageRun, manifest: Manifest) -> None:
    """Samples of a stage's committed work."""
    labels = (run.scale, run.stage, manifest.key[:RUN_DIGITS])
    figures.add("stage_seconds", manifest.seconds, *labels)
    figures.add("stage_read_bytes", manifest.read_bytes, *labels)
    figures.add("stage_written_bytes", manifest.written_bytes, *labels)
    num_rows = rows_of(manifest)
    if num_rows is not None:
        figures.add("stage_rows", num_rows, *labels)
        if manifest.seconds > 0:
            figures.add("stage_rows_per_second", num_rows / manifest.seconds, *labels)
    accepted = manifest.record.get("accepted")
    if isinstance(accepted, bool) and manifest.step != REPORT:
        figures.add("gate_accepted", accepted, *labels)


def rows_of(manifest: Manifest) -> int | None:
    """Rows that a step read: those of its record, and those that it dropped or rejected; None where its record counts
    none."""
    record = manifest.record
    counted = next((record[name] for name in ROWS if name in record), None)
    if counted is None:
        return None
    left_out = [record.get(name) or {} for name in ("dropped", "rejected")]
    return counted + sum(sum(reasons.values()) for reasons in left_out)


def add_evaluation(figures: Figures, run: StageRun, newest: Manifest, previous: Manifest | None) -> None:
    """Figures with an interval of a phase's newest evaluation, and intervals of the one before it on equal items."""
    phase = run.stage.removeprefix("evaluate-")
    for figure, (low, high) in newest.record["intervals"].items():
        labels = (run.scale, phase, figure)
        if isinstance(newest.record.get(figure), int | float):
            figures.add("evaluation_figure", newest.record[figure], *labels)
        figures.add("evaluation_low", low, *labels)
        figures.add("evaluation_high", high, *labels)
        if previous is not None and figure in previous.record["intervals"]:
            before = previous.record["intervals"][figure]
            figures.add("evaluation_previous_low", before[0], *labels)
            figures.add("evaluation_previous_high", before[1], *labels)


def is_comparable(newest: Manifest, other: Manifest) -> bool:
    """Whether two evaluations measured the same items, and are not the same work."""
    return other.record["suite_digest"] == newest.record["suite_digest"] and other.key != newest.key
