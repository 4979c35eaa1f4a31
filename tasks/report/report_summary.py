"""The first screen of the report: what was made, from what, how well it does, in plain words and three pictures; the
same questions answered after several phases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.evaluation.items import CHAT_PROBLEM, Item, read_items
from tasks.evaluation.suite import read_suite
from tasks.prepared_data import PreparedData
from tasks.report.dropped_examples import shortened
from tasks.report.report_charts import SMALL_HEIGHT, SMALL_WIDTH, Line, bars, curves
from tasks.report.report_data import funnel_bars
from tasks.report.report_inputs import ReportedPhase, ReportedPhases
from tasks.report.report_page import framed, heading, paragraph, side_by_side, table, with_note
from tasks.report.report_training import phase_spans, read_metrics, sampled_lines, visible

if TYPE_CHECKING:
    from infra.step import Artifact
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.select_evaluation_items import EvaluationSuite

NUM_ASKED = 3
"""Questions whose answers are shown: the first of the suite, so nobody chose them."""


def summary(data: PreparedData, phases: ReportedPhases, verdicts: Sequence[tuple[str, GateDecision]]) -> str:
    """Sentences, each of figures that the report states again further down."""
    path, record = phases.path, phases.last.checkpoint.record
    began = (
        "random weights"
        if path.phases[0].checkpoint.manifest.step == "train_phase" and path.phases[0].start is None
        else "given weights"
    )
    sentences = [
        f"This is a language model of {record.num_parameters:,} parameters. It was trained from {began} on "
        f"{path.num_tokens:,} tokens, in {len(path.phases)} phases: {', '.join(phase.name for phase in path)}.",
        _origin(data),
        _quality(path),
    ]
    if all(verdict.accepted for _, verdict in verdicts):
        sentences.append(f"All {len(verdicts)} gates of the run accepted it.")
    return framed("".join(map(paragraph, sentences)))


def _origin(data: PreparedData) -> str:
    chats = f"{data.chats.record.training_chats:,} conversations"
    which = "the command glm46 lineage model lists those that it read."
    if data.documents is None:
        return f"Its tokens are drawn from {chats}; {which}"
    return (
        f"Its tokens are drawn from {data.documents.shards.record.num_documents:,} documents and {chats}; {which} The "
        f"documents are what cleaning left of {data.ingested.record.num_documents:,} records and is not held out, "
        f"with verified problems and whole repositories added."
    )


def _quality(path: ReportedPhases) -> str:
    """Of the problems if it answers any, and of held-out text if that is finite."""
    evaluated, parts = path.last.evaluation.record, []
    if evaluated.pass_at_1:
        lower, upper = evaluated.intervals["pass_at_1"]
        parts.append(
            f"Asked problems that no training text holds, it answers {evaluated.pass_at_1:.1%} right (95 % interval "
            f"{lower:.1%} to {upper:.1%})"
        )
    if evaluated.bits_per_byte is not None:
        parts.append(f"held-out text costs it {evaluated.bits_per_byte:.3f} bits per byte")
    return _sentence("; ".join(parts) or "No figure of it is finite")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def overview_section(data: PreparedData, phases: ReportedPhases) -> str:
    """Documents after each stage, loss over the tokens, right answers after each phase; then answers."""
    path, pictures = phases.path, []
    if data.documents is not None:
        drawn = bars("Documents after each stage", funnel_bars(data, data.documents), SMALL_WIDTH)
        pictures.append(("Documents after each stage", drawn))
    lines = [
        Line("loss", [(span.start + line["tokens"], line["lm"]) for line in metrics if "lm" in line])
        for span, phase in zip(phase_spans(path), path, strict=True)
        if (metrics := read_metrics(phase.checkpoint)) and not sampled_lines(metrics) and not phase.reads_pairs
    ]
    lines = [line for line in lines if line.points]
    if lines:
        drawn = curves("tokens", "nats", lines, width=SMALL_WIDTH, height=SMALL_HEIGHT)
        pictures.append(("Loss while training", drawn))
    shares = [(phase.name, phase.evaluation.record.pass_at_1) for phase in path]
    rows = [(name, share, f"{share:.1%}") for name, share in shares]
    pictures.append(("Problems answered right", bars("pass@1", rows, SMALL_WIDTH)))
    return side_by_side(pictures) + _answers(data, path)


def _answers(data: PreparedData, path: ReportedPhases) -> str:
    rows = answer_rows(data.suite, path)
    if not rows:
        return ""
    note = "The first of the answers that were sampled to each question; below it, how many of them are right."
    shown = [(question, *(with_note(*answer) for answer in answers)) for question, answers in rows]
    return (
        heading("The same questions, before and after") + table(answer_columns(path), shown) + paragraph(note, "soft")
    )


def answer_columns(path: ReportedPhases) -> tuple[str, ...]:
    """The question, and the phases after which it was asked."""
    return ("question", *(f"after {phase.name}" for phase in _answering(path)))


def answer_rows(
    suite: Artifact[EvaluationSuite], path: ReportedPhases
) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    """One sampled answer to each of the first questions, and how many of its samples are right, after the phases that
    taught to answer and the one before them."""
    shown = _answering(path)
    items = [{item.item_id: item for item in read_items(phase.evaluation.path("items.parquet"))} for phase in shown]
    asked = [
        question
        for question in read_suite(suite.path("suite.parquet"))
        if question.kind == CHAT_PROBLEM and all(question.item_id in of_phase for of_phase in items)
    ]
    asked = sorted(asked, key=lambda question: question.item_id)[:NUM_ASKED]
    return [(question.text, tuple(_answer(of_phase[question.item_id]) for of_phase in items)) for question in asked]


def _answering(path: ReportedPhases) -> list[ReportedPhase]:
    """The last phase that had read no conversation, the first that had, and the last; each once."""
    before = [phase for phase in path if not phase.checkpoint.record.is_chat_trained]
    after = [phase for phase in path if phase.checkpoint.record.is_chat_trained]
    chosen = [*before[-1:], *after[:1], *after[-1:]]
    return list({phase.name: phase for phase in chosen}.values())


def _answer(item: Item) -> tuple[str, str]:
    sampled = json.loads(item.output)
    return shortened(visible(sampled[0])), f"{item.num_right} of {item.num_samples} right"
