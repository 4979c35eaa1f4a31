"""The report about quality: every figure of every phase with its interval, and what the gates said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infra.step import Artifact
from tasks.evaluation.items import CHOICE, accuracy, read_items
from tasks.release.report_charts import intervals
from tasks.release.report_inputs import DIGITS, ReportedPhases
from tasks.release.report_page import Cell, Html, boxed, folded, paragraph, table, with_note

if TYPE_CHECKING:
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.release.evaluate_gguf import GgufEvaluation

QUANTIZED, CHAMPION = "Quantized files", "Against the champion"
NO_CHAMPION = "No champion reigned: there was nothing to compare with."
DRAWN = {
    "bits_per_byte": "Validation bits per byte (lower is better)",
    "pass_at_1": "Verified problems asked as a conversation: pass@1",
    "choice_accuracy": "Multiple choice by likelihood",
}


def evaluation_section(phases: ReportedPhases) -> str:
    """Charts of the three leading figures, then all of them."""
    charts = []
    for name, title in DRAWN.items():
        values = [(phase.name, getattr(phase.evaluation.record, name), phase.evaluation.record.intervals.get(name)) for phase in phases]
        measured = [row for row in values if row[1] is not None]
        if measured:
            charts.append(intervals(title, measured))
    record = phases.last.evaluation.record
    told = (
        f"In brackets the 95 % interval. Suite {record.suite_digest[:DIGITS]}, {record.num_items:,} items, the same for every phase: "
        "held-out documents, generated problems whose operands no training text holds together, and questions with given answers. "
        f"Sampled answers: pass@1 is their mean, pass@{record.pass_k} the unbiased estimate that one of {record.pass_k} is right."
    )
    rows = [(title, *(with_note(*_split(text)) for text in texts)) for title, *texts in figure_rows(phases)]
    return "".join(charts) + table(("figure", *(phase.name for phase in phases)), rows) + paragraph(told, "soft")


def _split(text: str) -> tuple[str, str]:
    """(figure, its interval in brackets)."""
    value, bracket, interval = text.partition(" [")
    return value, bracket.strip() + interval


def figure_rows(phases: ReportedPhases) -> list[tuple[str, ...]]:
    """One row per figure, one column per phase."""
    records = [phase.evaluation.record for phase in phases]
    pass_k = records[-1].pass_k
    names = {
        "bits_per_byte": "bits per byte",
        "arithmetic_accuracy": "problems continued as text",
        "pass_at_1": "pass@1 in conversation",
        "pass_at_k": f"pass@{pass_k} in conversation",
        "distinct_answer_share": "different answers / right ones",
        "choice_accuracy": "multiple choice",
        "choice_accuracy_normalised": "multiple choice, per character",
    }
    rows = [(title, *(figure(record, name) for record in records)) for name, title in names.items()]
    domains = sorted({domain for record in records for domain in record.bits_per_byte_by_domain})
    rows[1:1] = [(f"bits per byte, {name}", *(_number(record.bits_per_byte_by_domain.get(name)) for record in records)) for name in domains]
    return [*rows, *_benchmark_rows(phases), ("items not finite", *(str(record.num_non_finite) for record in records))]


def figure(record: Evaluation, name: str) -> str:
    """A figure with its interval."""
    interval = record.intervals.get(name)
    bounds = "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"
    return _number(getattr(record, name)) + bounds


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _benchmark_rows(phases: ReportedPhases) -> list[tuple[str, ...]]:
    """Accuracy per source of questions; the second part of an item id names it."""
    columns = []
    for phase in phases:
        groups: dict[str, list] = {}
        for item in read_items(phase.evaluation.path("items.parquet")):
            if item.kind == CHOICE:
                groups.setdefault(item.item_id.split("/")[1], []).append(item)
        columns.append({name: f"{accuracy(items, CHOICE):.4f} of {len(items)}" for name, items in groups.items()})
    names = sorted({name for column in columns for name in column})
    return [(f"multiple choice, {name}", *(column.get(name, "not measured") for column in columns)) for name in names]


def named_verdicts(
    phases: ReportedPhases, release: Artifact[GateDecision] | None, champion: Artifact[GateDecision] | None
) -> list[tuple[str, GateDecision]]:
    """Every gate that the run came to, in order."""
    named = [(f"Gate of {phase.name}", phase.decision) for phase in phases]
    named += [(title, decision) for title, decision in ((QUANTIZED, release), (CHAMPION, champion)) if decision is not None]
    return [(title, decision.record) for title, decision in named]


def ending(phases: ReportedPhases, verdicts: Sequence[tuple[str, GateDecision]], is_released: bool) -> str:
    """What a reader must know first: why the run was refused and what it therefore did not come to. Nothing for an accepted release."""
    refused = [(title, verdict) for title, verdict in verdicts if not verdict.accepted]
    missing = [*phases.not_reached, *(() if is_released else ("the release",))]
    if not refused:
        return "" if is_released else paragraph(f"The run left after {phases.last.name}, before the release: nothing was promoted.", "soft")
    words = [paragraph(f"{title}: refused", "bad") + "".join(map(paragraph, _broken(verdict))) for title, verdict in refused]
    told = "Nothing was promoted." + (f" Not reached: {', '.join(missing)}." if missing else "")
    return boxed("".join(words) + paragraph(told, "soft"), "bad")


def verdict_section(phases: ReportedPhases, verdicts: Sequence[tuple[str, GateDecision]], champion: Artifact[GateDecision] | None) -> str:
    """Every gate with every bound; those that the run did not come to have none."""
    rows: list[tuple[Cell, ...]] = [
        (title, Html(f'<b class="{"good" if verdict.accepted else "bad"}">{_word(verdict)}</b>'), _bounds(verdict))
        for title, verdict in verdicts
    ]
    judged = {title for title, _ in verdicts}
    later = [title for title in (*(f"Gate of {name}" for name in phases.not_reached), QUANTIZED, CHAMPION) if title not in judged]
    rows += [(title, Html('<span class="soft">not reached</span>'), "") for title in later]
    details = "".join(_verdict(title, verdict) for title, verdict in verdicts)
    return table(("gate", "verdict", "bounds"), rows) + _rival(champion) + details


def _rival(champion: Artifact[GateDecision] | None) -> str:
    if champion is None:
        return ""
    rival = champion.record.champion_digest
    told = f"The champion's evaluation on the same items: {rival[:DIGITS]}." if rival else NO_CHAMPION
    return paragraph(told, "soft")


def _broken(decision: GateDecision) -> list[str]:
    return [reason.removeprefix("refused: ") for reason in decision.reasons if reason.startswith("refused: ")]


def _bounds(decision: GateDecision) -> str:
    """Those broken, or how many were held."""
    return "; ".join(_broken(decision)) or f"{len(decision.reasons)} held"


def _verdict(title: str, decision: GateDecision) -> str:
    bounds = [("✗" if reason.startswith("refused: ") else "✓", reason.removeprefix("refused: ")) for reason in decision.reasons]
    return folded(f"{title}: {_word(decision)}", table(("", "bound"), bounds), is_open=not decision.accepted)


def _word(decision: GateDecision) -> str:
    return "accepted" if decision.accepted else "refused"


def gguf_section(record: GgufEvaluation) -> str:
    """What the released files lose."""
    rows: Sequence[tuple[str, str]] = [
        (gguf_type, "not finite" if bits is None else f"{bits:.4f}") for gguf_type, bits in record.bits_per_byte.items()
    ]
    return table(("type", "bits per byte"), rows) + paragraph(
        f"Measured by llama.cpp itself on the leading tokens of {record.num_documents} validation documents ({record.num_tokens:,} tokens, "
        f"{record.num_bytes:,} bytes): every token is scored given those before it.",
        "soft",
    )
