"""The report about what was measured during training: held-out text by domain, experts, spikes, contents of the
rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.report.report_charts import Line, Span, curves
from tasks.report.report_inputs import ReportedPhase, ReportedPhases
from tasks.report.report_page import Figure, heading, paragraph, table

Metrics = list[dict[str, float]]
VALIDATION = "validation_bits_per_byte"
COLOURS = ("accent", "second", "third", "fourth", "good", "bad", "soft")


def validation_curves(trained: Sequence[tuple[ReportedPhase, Span, Metrics]], spans: Sequence[Span]) -> str:
    """Bits per byte of held-out documents by domain, over the tokens of all phases; nothing where none was measured."""
    points: dict[str, list[tuple[float, float]]] = {}
    for _, span, metrics in trained:
        for line in metrics:
            for key, value in line.items():
                if key.startswith(f"{VALIDATION}_"):
                    points.setdefault(key.removeprefix(f"{VALIDATION}_"), []).append(
                        (span.start + line["tokens"], value)
                    )
    if not points:
        return ""
    lines = [
        Line(name, curve, COLOURS[number % len(COLOURS)]) for number, (name, curve) in enumerate(sorted(points.items()))
    ]
    note = (
        "Measured by the trainer on shards of held-out documents, in rows of the phase's length; gates read the "
        "evaluation."
    )
    return (
        heading("Held-out text while training")
        + curves("tokens", "bits per byte by domain", lines, spans)
        + paragraph(note, "soft")
    )


def experts_table(phases: ReportedPhases) -> str:
    """Per phase and layer how evenly validation text was spread, from the stored evaluations; nothing where none
    counted, as by a server."""
    columns = ("phase", "layer with experts", "busiest / mean", "coefficient of variation", "experts without a token")
    rows = [
        (phase.name, number, Figure(f"{load:.2f}"), Figure(f"{cv:.3f}"), dead)
        for phase in phases
        for number, (load, cv, dead) in enumerate(_layers(phase.evaluation.record), 1)
    ]
    note = (
        "Routed tokens of validation text; the gate holds the worst layer to its two bounds, where it has them (S0: "
        "within 5 % at full scale). Phases that a server evaluated are not here: it counts none."
    )
    return heading("Experts on validation text") + table(columns, rows) + paragraph(note, "soft") if rows else ""


def _layers(record: Any) -> list[tuple[float, float, int]]:
    return list(zip(record.expert_load, record.expert_cv, record.num_dead_experts, strict=True))


def spikes_section(trained: Sequence[tuple[ReportedPhase, Span, Metrics]]) -> str:
    """Phases that went back before a spike; nothing where none did."""
    rows = [
        (phase.name, phase.checkpoint.record.num_rollbacks, skipped_steps(metrics)) for phase, _, metrics in trained
    ]
    rows = [row for row in rows if row[1]]
    note = "A step that spiked was not taken: training went back to its last good checkpoint and left the rows out."
    return (
        heading("Spikes") + table(("phase", "rollbacks", "steps left out"), rows) + paragraph(note, "soft")
        if rows
        else ""
    )


def skipped_steps(metrics: Metrics) -> int:
    """Steps whose rows were left out: each line counts those since the line before it."""
    return int(sum(line.get("skipped_steps", 0) for line in metrics))


def packed_table(phases: ReportedPhases) -> str:
    """What each phase's rows were filled with."""
    rows = [
        (
            phase.name,
            record.packing,
            record.sequence_length,
            record.num_rows,
            Figure(f"{record.fill_share:.1%}"),
            _by_domain(record.tokens_by_domain, record.epochs_by_domain),
            _by_domain(record.course_tokens_by_domain, record.course_epochs_by_domain),
            ", ".join(record.absent_domains) or "none",
            record.num_too_long,
            record.num_rearranged,
        )
        for phase, record in ((phase, phase.packed.record) for phase in phases if phase.packed is not None)
    ]
    columns = (
        "phase",
        "packing",
        "row",
        "rows",
        "filled",
        "tokens by domain (passes)",
        "of the course so far (passes)",
        "asked for, without text",
        "conversations longer than a row",
        "pieces with FIM",
    )
    note = (
        "A domain without text leaves its share to the others, and a conversation that no row holds is left out. A "
        "phase continues in a domain's documents where the phases before it on its course stopped. FIM: rearranged to "
        "prefix, suffix, middle."
    )
    return heading("Packed rows") + table(columns, rows) + paragraph(note, "soft") if rows else ""


def _by_domain(tokens: dict[str, int], epochs: dict[str, float]) -> str:
    return ", ".join(f"{domain} {count:,} ({epochs[domain]:.2f})" for domain, count in tokens.items())
