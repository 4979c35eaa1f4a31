"""Step: writes report.html (self-contained) and two Markdown cards about a run.

They answer what the model is made of, how good it is, and why it was promoted or refused. In: the artifacts that a run
has made. Out: three files, as evidence: they show times and keys, which do not enter digests. Every number is read from
an artifact or its manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.files.atomic_files import replace_durably
from infra.step import Artifact, Output, Record, step
from tasks.prepared_data import PreparedData
from tasks.report.cards import architecture_rows, data_card, model_card
from tasks.report.report_cost import energy_note
from tasks.report.report_data import data_section
from tasks.report.report_evaluation import ending, evaluation_section, figure, named_verdicts, verdict_section
from tasks.report.report_formats import formats_section
from tasks.report.report_inputs import DIGITS, NamedRelease, ReportedPhases
from tasks.report.report_lineage import (
    contract_section,
    key_section,
    lineage_section,
    named_stages,
    time_section,
    transfer_section,
)
from tasks.report.report_page import Section, page, table
from tasks.report.report_pairs import pairs_section
from tasks.report.report_suite import suite_table
from tasks.report.report_summary import overview_section, summary
from tasks.report.report_training import training_section

if TYPE_CHECKING:
    from configs.schema import Prices
    from tasks.data.filtering.blocked_documents import BlockedDocuments
    from tasks.evaluation.benchmarks.evaluate_suite import SuiteEvaluation
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.release.decide_promotion import PromotionDecision
    from tasks.release.decide_quantization import QuantizedEvaluations
    from tasks.release.evaluate_gguf import GgufEvaluation

REPORT_FILE, MODEL_CARD_FILE, DATA_CARD_FILE = "report.html", "model_card.md", "data_card.md"


class Report(Record):
    """The report's result in one line."""

    bits_per_byte: float | None
    pass_at_1: float
    accepted: bool
    """Whether everything that the report shows accepted: gates, and the decision on the promotion."""


@step(content=(), evidence=(REPORT_FILE, MODEL_CARD_FILE, DATA_CARD_FILE), distributions=("pyarrow",))
def write_report(
    *,
    data: PreparedData,
    blocked: BlockedDocuments | None,
    phases: ReportedPhases,
    gguf_evaluation: Artifact[GgufEvaluation] | None,
    quantized: QuantizedEvaluations | None,
    quantization_decision: Artifact[GateDecision] | None,
    contamination_decision: Artifact[GateDecision] | None,
    decision: Artifact[GateDecision] | None,
    suite_evaluation: Artifact[SuiteEvaluation] | None,
    suite_decision: Artifact[GateDecision] | None,
    promotion: Artifact[PromotionDecision] | None,
    released: NamedRelease | None,
    recipe: Prices,
    output: Output,
) -> Report:
    """`blocked` is not quoted. `recipe` has what a rank costs and draws, `decision` is that against the champion. The
    last eight artifacts and `released` are None where the run ended before the release, those of the suite also where
    the scale has none."""
    verdicts = named_verdicts(phases, quantization_decision, contamination_decision, decision, suite_decision)
    promoted = None if promotion is None else promotion.record
    accepted = all(verdict.accepted for _, verdict in verdicts) if promoted is None else promoted.accepted
    scored = {} if quantized is None else quantized.evaluations
    decided = (quantization_decision, contamination_decision, decision, suite_evaluation, suite_decision, promotion)
    stages = named_stages(data, phases, [("", gguf_evaluation), *scored.items(), *(("", each) for each in decided)])
    sections = [
        Section("In short", overview_section(data, phases)),
        Section("Verdicts", verdict_section(phases, verdicts, decision, promoted)),
        Section("Evaluation", evaluation_section(phases) + suite_table(suite_evaluation)),
        Section("Preference pairs", pairs_section(phases)),
        Section("Training", training_section(phases)),
        Section("Data", data_section(data, blocked, phases.unread)),
        Section("Contracts", contract_section(data)),
        Section("Lineage", lineage_section(data, phases)),
        Section("Formats", formats_section(gguf_evaluation, quantized)),
        Section("Architecture", table(("glm4_moe key", "value"), architecture_rows(phases))),
        Section("Time", time_section(stages) + energy_note(phases, recipe) + transfer_section(data)),
        Section("Keys and versions", key_section(stages)),
    ]
    last = phases.last
    subtitle = (
        f"checkpoint {last.checkpoint.digest[:DIGITS]} of phase {last.name}, export "
        f"{last.checkpoint.record.export_digest[:DIGITS]}"
    )
    lead = ending(phases, verdicts, promoted, released) + summary(data, phases, verdicts)
    text = page("glm46 report", subtitle, lead, _facts(data, phases, accepted), sections)
    output.path(REPORT_FILE).write_text(text, encoding="utf-8")
    output.path(MODEL_CARD_FILE).write_text(model_card(data, phases.path, verdicts), encoding="utf-8")
    output.path(DATA_CARD_FILE).write_text(data_card(data), encoding="utf-8")
    evaluated = last.evaluation.record
    return Report(bits_per_byte=evaluated.bits_per_byte, pass_at_1=evaluated.pass_at_1, accepted=accepted)


def _facts(data: PreparedData, phases: ReportedPhases, accepted: bool) -> list[tuple[str, str]]:
    """The figures at the top of the page."""
    evaluated, trained = phases.last.evaluation.record, phases.last.checkpoint.record
    reached = len(phases.phases) + len(phases.reward_models)
    return [
        ("verdict of all gates", "accepted" if accepted else "refused"),
        ("held-out bits per byte", figure(evaluated, "bits_per_byte").split(" [")[0]),
        ("pass@1 on verified problems", f"{evaluated.pass_at_1:.1%}"),
        (
            "multiple choice",
            "not measured" if evaluated.choice_accuracy is None else f"{evaluated.choice_accuracy:.1%}",
        ),
        ("parameters", f"{trained.num_parameters:,}"),
        ("tokens trained on", f"{phases.path.num_tokens:,}"),
        ("conversations", f"{data.chats.record.training_chats:,}")
        if data.documents is None
        else ("records read", f"{data.ingested.record.num_documents:,}"),
        ("phases", f"{reached} of {reached + len(phases.not_reached)}" if phases.not_reached else f"{reached}"),
    ]


def publish_report(report: Artifact[Report], path: Path) -> Path:
    """Copy the report to `path` and its cards beside it. It is an effect; a file of equal content is not written
    again."""
    targets = {
        name: path.with_name(f"{path.stem}-{name.replace('_', '-')}") for name in (MODEL_CARD_FILE, DATA_CARD_FILE)
    }
    for name, target in ({REPORT_FILE: path} | targets).items():
        _write_if_changed(report.path(name).read_bytes(), target)
    return path


def _write_if_changed(content: bytes, path: Path) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, content)
