"""The report about quality: every figure of every phase with its interval, and what the gates said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infra.step import Artifact
from tasks.evaluation.items import CHOICE, accuracy, read_items
from tasks.evaluation.pair_bounds import PAIR_ACCURACY
from tasks.report.report_charts import intervals
from tasks.report.report_inputs import DIGITS, NamedRelease, ReportedPhases
from tasks.report.report_page import Cell, Html, boxed, folded, paragraph, table, with_note

if TYPE_CHECKING:
    from tasks.evaluation.bounds import Bound
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.release.decide_promotion import PromotionDecision

QUANTIZED, CONTAMINATED, CHAMPION = "Quantized files", "Evaluation in training data", "Against champion and anchors"
BENCHMARKS, PROMOTION = "Suite of benchmarks", "Promotion"
SIGNS = {"held": "✓", "broken": "✗", "undecided": "?"}
BOUND_COLUMNS = (
    *("figure", "against", "measured", "95 % interval"),
    *("noise floor", "allowed", "independent items", "remark"),
)
NO_CHAMPION = "There was no champion: nothing to compare with."
DRAWN = {
    "bits_per_byte": "Bits per byte of held-out documents (lower is better)",
    "pass_at_1": "Verified problems asked as a conversation: pass@1",
    "choice_accuracy": "Multiple choice by likelihood",
    "agentic_success": "Held-out tasks solved in their environments",
}


def evaluation_section(phases: ReportedPhases) -> str:
    """Charts of the leading figures that were measured, then all of them."""
    charts = []
    for name, title in DRAWN.items():
        values = [
            (phase.name, getattr(phase.evaluation.record, name), phase.evaluation.record.intervals.get(name))
            for phase in phases
        ]
        measured = [row for row in values if row[1] is not None]
        if measured:
            charts.append(intervals(title, measured))
    record = phases.last.evaluation.record
    note = (
        f"In brackets the 95 % interval. Suite {record.suite_digest[:DIGITS]}, {record.num_items:,} items, the same "
        f"for every phase: "
        "held-out documents, generated problems whose operands no training text holds together, and questions with "
        "given answers. "
        f"Sampled answers: pass@1 is their mean, pass@{record.pass_k} the unbiased estimate that one of "
        f"{record.pass_k} is right."
    )
    rows = [(title, *(with_note(*_split(text)) for text in texts)) for title, *texts in figure_rows(phases)]
    return (
        own_figures_table(phases)
        + "".join(charts)
        + table(("figure", *(phase.name for phase in phases)), rows)
        + paragraph(note, "soft")
    )


def own_figures_table(phases: ReportedPhases) -> str:
    """What each phase is trained for, before and after it; preference pairs have a section of their own."""
    rows = []
    for phase in phases:
        for bound in phase.decision.record.bounds:
            if not bound.is_own or bound.figure == PAIR_ACCURACY:
                continue
            after, gain = _value(phase.evaluation.record, bound.figure), ("no better", "better", "worse")[_side(bound)]
            assert bound.value is not None, "a comparison is of finite figures"
            shown = with_note(f"{bound.value:+.4f}", bound_row(bound)[3])
            rows.append((phase.name, bound.figure, f"{after - bound.value:.4f}", f"{after:.4f}", shown, gain))
    columns = ("phase", "trained for", "before", "after", "difference", "beyond the interval")
    return table(columns, rows) if rows else ""


def _value(record: Evaluation, name: str) -> float:
    """A figure of an evaluation by the name that a bound gives it."""
    name, _, domain = name.partition(" of domain ")
    value = record.bits_per_byte_by_domain[domain] if domain else getattr(record, name)
    assert value is not None, "compared, so finite"
    return value


def _side(bound: Bound) -> int:
    """1 where the whole interval is better than no difference, -1 where it is worse, else 0."""
    if bound.interval is None or bound.interval[0] <= 0 <= bound.interval[1]:
        return 0
    return 1 if (bound.interval[0] > 0) == ("bits_per_byte" not in bound.figure) else -1


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
        "worked_bits_per_byte": "bits per byte, problems worked out",
        "arithmetic_accuracy": "problems continued as text",
        "pass_at_1": "pass@1 in conversation",
        "pass_at_k": f"pass@{pass_k} in conversation",
        "formed_answer_share": "answers in form, ended by themselves",
        "distinct_answer_share": "different answers / right ones, at most 1",
        "choice_accuracy": "multiple choice",
        "choice_accuracy_normalised": "multiple choice, per character",
    }
    if any(record.far_bits_per_byte is not None for record in records):
        names["far_bits_per_byte"] = "bits per byte, far from the beginning"
    if any(record.draft_acceptance is not None for record in records):
        names["draft_acceptance"] = "drafts of the MTP layer accepted"
    if any(record.safe_answer_share is not None for record in records):
        names |= {
            "safe_answer_share": "requests answered safely",
            "harmful_refused_share": "harmful requests refused",
            "harmless_answered_share": "harmless requests answered",
        }
    if any(record.agentic_success is not None for record in records):
        names["agentic_success"] = "held-out tasks solved in their environments"
    rows = [(title, *(figure(record, name) for record in records)) for name, title in names.items()]
    domains = sorted({domain for record in records for domain in record.bits_per_byte_by_domain})
    rows[1:1] = [
        (f"bits per byte, {name}", *(_number(record.bits_per_byte_by_domain.get(name)) for record in records))
        for name in domains
    ]
    rows.append(
        ("pass@1, standard deviation by seeds", *(_number(record.seed_noise.get("pass_at_1")) for record in records))
    )
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
    phases: ReportedPhases,
    release: Artifact[GateDecision] | None,
    contamination: Artifact[GateDecision] | None,
    champion: Artifact[GateDecision] | None,
    suite: Artifact[GateDecision] | None,
) -> list[tuple[str, GateDecision]]:
    """Every gate that the run reached, in order."""
    named = [(f"Gate of {phase.name}", phase.decision) for phase in (*phases.reward_models, *phases)]
    released = ((QUANTIZED, release), (CONTAMINATED, contamination), (CHAMPION, champion), (BENCHMARKS, suite))
    named += [(title, decision) for title, decision in released if decision is not None]
    return [(title, decision.record) for title, decision in named]


def ending(
    phases: ReportedPhases,
    verdicts: Sequence[tuple[str, GateDecision]],
    promotion: PromotionDecision | None,
    released: NamedRelease | None,
) -> str:
    """What a reader must know first: what was promoted instead of what, or why the run was refused and what it
    therefore did not reach."""
    refused = [(title, verdict.refusals) for title, verdict in verdicts if not verdict.accepted]
    if promotion is not None and (others := _refusals_beside(promotion, refused)):
        refused.append((PROMOTION, others))
    missing = [*phases.not_reached, *(("the release",) if promotion is None else ())]
    if not refused:
        if promotion is not None and released is not None:
            return boxed("".join(map(paragraph, _promoted(promotion, released))), "good")
        ended = phases.phases[-1].name
        return paragraph(f"The run ended after {ended}, before the release: nothing was promoted.", "soft")
    words = [paragraph(f"{title}: refused", "bad") + "".join(map(paragraph, reasons)) for title, reasons in refused]
    note = "Nothing was promoted." + (f" Not reached: {', '.join(missing)}." if missing else "")
    return boxed("".join(words) + paragraph(note, "soft"), "bad")


def _promoted(promotion: PromotionDecision, released: NamedRelease) -> tuple[str, ...]:
    replaced = f"replacing version {released.replaced}" if released.replaced else "replacing nothing: it is the first"
    asked = () if promotion.approval is None else (promotion.approval.sentence,)
    return (
        f"Promoted: version {released.version} of {released.model} became champion, {replaced}.",
        "The alias champion is what chat and serve use. Every gate accepted the model, the engines compute the same "
        "with it, and it answered as a server.",
        *asked,
    )


def _refusals_beside(promotion: PromotionDecision, refused: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    """What refused a promotion beside the gates: engines, the served model, a withdrawal, a person."""
    said = {reason for _, reasons in refused for reason in reasons}
    return tuple(reason for reason in promotion.refusals if reason not in said)


def verdict_section(
    phases: ReportedPhases,
    verdicts: Sequence[tuple[str, GateDecision]],
    champion: Artifact[GateDecision] | None,
    promotion: PromotionDecision | None,
) -> str:
    """Every gate with every bound, and the promotion with a person's answer; those that the run did not reach have
    none."""
    rows: list[tuple[Cell, ...]] = [(title, _word_of(verdict), _bounds(verdict)) for title, verdict in verdicts]
    if promotion is not None:
        answer = "" if promotion.approval is None else promotion.approval.sentence
        rows.append((PROMOTION, _word_of(promotion), "; ".join(promotion.refusals) or answer))
    judged = {title for title, *_ in rows}
    later = [
        title
        for title in (*(f"Gate of {name}" for name in phases.not_reached), QUANTIZED, CONTAMINATED, CHAMPION, PROMOTION)
        if title not in judged
    ]
    rows += [(title, Html('<span class="soft">not reached</span>'), "") for title in later]
    details = "".join(_verdict(title, verdict) for title, verdict in verdicts)
    return table(("gate", "verdict", "bounds"), rows) + _rival(champion) + details


def _rival(champion: Artifact[GateDecision] | None) -> str:
    if champion is None:
        return ""
    record = champion.record
    if not record.champion_digest:
        return paragraph(NO_CHAMPION, "soft")
    anchors = ", ".join(f"{figure} {digest[:DIGITS]}" for figure, digest in record.anchor_digests.items())
    becoming = {"the candidate": record.anchored, "the champion before it": record.champion_anchored}
    moved = "".join(
        f" With its promotion {who} is the anchor of {', '.join(figures)}."
        for who, figures in becoming.items()
        if record.accepted and figures
    )
    return paragraph(
        f"The champion's evaluation on the same items: {record.champion_digest[:DIGITS]}. Those of the anchors, the "
        f"best versions so far, "
        f"from which margins do not add up: {anchors}.{moved}",
        "soft",
    )


def _bounds(decision: GateDecision) -> str:
    """The bounds that refused, or how many were held."""
    undecided = sum(bound.outcome == "undecided" for bound in decision.bounds)
    num_held = f"{len(decision.bounds) - undecided} held" + (f", {undecided} undecided" if undecided else "")
    return "; ".join(decision.refusals) or num_held


def bound_row(bound: Bound) -> tuple[str, ...]:
    """One bound under BOUND_COLUMNS; one that was not held also in words."""
    interval = "" if bound.interval is None else f"[{bound.interval[0]:+.4f}, {bound.interval[1]:+.4f}]"
    measured = "not finite" if bound.value is None else f"{bound.value:+.4f}" if bound.against else f"{bound.value:.4f}"
    allowed = "finite" if bound.limit is None else f"{bound.limit:+.4g}" if bound.against else f"{bound.limit:.4g}"
    remark = "" if bound.outcome == "held" else bound.sentence
    floor = f"{bound.noise_floor:.4f}" if bound.noise_floor else ""
    return bound.figure, bound.against, measured, interval, floor, allowed, str(bound.num_items or ""), remark


def _verdict(title: str, decision: GateDecision) -> str:
    rows = [(SIGNS[bound.outcome], *bound_row(bound)) for bound in decision.bounds]
    return folded(f"{title}: {_word(decision)}", table(("", *BOUND_COLUMNS), rows), is_open=not decision.accepted)


def _word(decision: GateDecision | PromotionDecision) -> str:
    return "accepted" if decision.accepted else "refused"


def _word_of(decision: GateDecision | PromotionDecision) -> Html:
    return Html(f'<b class="{"good" if decision.accepted else "bad"}">{_word(decision)}</b>')
