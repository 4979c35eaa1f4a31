"""The report about training: loss, expert load and reward over the tokens of all phases, and what the policy
answered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from infra.step import Artifact
from tasks.report.dropped_examples import shortened
from tasks.report.report_charts import Line, Point, Span, curves, strips
from tasks.report.report_inputs import ReportedPhase, ReportedPhases
from tasks.report.report_page import Figure, chips, folded, heading, paragraph, table
from tasks.report.report_progress import experts_table, packed_table, spikes_section, validation_curves
from tasks.report.report_solutions import solutions_section
from tasks.training.watch.effective_time import TIME_FILE, EffectiveTime, effective_time

METRICS_FILE, ROLLOUTS_FILE = "metrics.jsonl", "rollouts.jsonl"
REWARD = "reward_mean"
PAIR_LOSS = "validation_pair_loss"
REWARD_PARTS = {
    "pass_rate": "right",
    "reward_format": "in form",
    "reward_length": "punished for length",
    "unverified": "answers per step without a verdict",
}
PARTS_OF_SOME = {
    "entropy_estimate": "nats per token, by sampled tokens",
    "temperature": "temperature of the sampling",
    "reward_score": "score of the reward model",
    "reference_kl": "nats per token from the reference",
    "explained_variance": "variance of the returns that the critic explains",
    "episode_turns": "turns of an episode",
    "tool_success": "tool calls without an error",
    "tool_tokens": "tokens of tools in an episode",
    "tool_timeouts": "tool calls per step that ran out of time",
    "format_error_share": "episodes ended by an unreadable call",
    "tool_failed_share": "episodes ended by a tool that failed",
    "weight_sync_seconds": "seconds of a step in giving the weights to the sampling",
    "rollout_seconds": "in sampling",
    "reward_seconds": "in rewards",
    "training_seconds": "in training",
}
"""Of phases with a reward model, a critic, or environments, and what earlier versions did not log."""
TIMEOUTS = "tool_timeouts_"
"""Beginning of the metric of an environment, logged by the steps that played in it."""
SMOOTHED_STEPS = 10
NUM_SAMPLE_GROUPS = 4
"""Number of groups that are shown of the first and of the last logged step."""
LOAD = "expert_load_"
NUM_NAMED_TENSORS = 6

Metrics = list[dict[str, float]]


def training_section(phases: ReportedPhases) -> str:
    """Empty where every phase's weights were imported."""
    trained = _logged(phases)
    if not trained:
        return paragraph("These weights were imported: there is no training log.", "soft")
    spans = [span for _, span, _ in trained]
    parts = (
        _table(phases),
        _losses(trained, spans),
        validation_curves(trained, spans),
        _expert_load(trained, spans),
        experts_table(phases),
        spikes_section(trained),
        packed_table(phases),
        solutions_section(phases),
        _rewards(trained),
    )
    return "".join(parts)


def _logged(phases: ReportedPhases) -> list[tuple[ReportedPhase, Span, Metrics]]:
    """The phases that have a log."""
    logged = [
        (phase, span, read_metrics(phase.checkpoint)) for phase, span in zip(phases, phase_spans(phases), strict=True)
    ]
    return [entry for entry in logged if entry[2]]


def phase_spans(phases: ReportedPhases) -> list[Span]:
    """The tokens of each phase, on one axis over all of them."""
    spans, start = [], 0
    for phase in phases:
        stop = start + phase.checkpoint.record.num_tokens
        spans.append(Span(phase.name, start, stop))
        start = stop
    return spans


def read_metrics(checkpoint: Artifact[Any]) -> Metrics:
    """Lines of a phase's metrics.jsonl, `tokens` counted from the phase's start; none for imported weights."""
    if METRICS_FILE not in checkpoint.manifest.evidence:
        return []
    record = checkpoint.record
    lines = [json.loads(line) for line in checkpoint.path(METRICS_FILE).read_text().splitlines()]
    return [{**line, "tokens": line["tokens"] - (record.course_tokens - record.num_tokens)} for line in lines]


def effective_time_of(checkpoint: Artifact[Any]) -> EffectiveTime | None:
    """Where the wall time of a phase went; None for imported weights."""
    if TIME_FILE not in checkpoint.manifest.evidence:
        return None
    return effective_time(checkpoint.path(TIME_FILE).read_bytes())


def _table(phases: ReportedPhases) -> str:
    """Columns that no phase fills are left out."""
    trained = (*phases, *phases.reward_models)
    logged = [(phase, phase.checkpoint.record, read_metrics(phase.checkpoint)) for phase in trained]
    times = [effective_time_of(phase.checkpoint) for phase in trained]
    columns: dict[str, list[Figure | str | int]] = {
        "phase": [phase.name for phase, _, _ in logged],
        "objective": [phase.objective for phase, _, _ in logged],
        "steps": [record.num_steps for _, record, _ in logged],
        "tokens": [record.num_tokens for _, record, _ in logged],
        "last loss": [
            _number(None if record.mean_reward is not None or phase.reads_pairs else record.lm_loss)
            for phase, record, _ in logged
        ],
        "last loss of a pair": [_number(record.lm_loss if phase.reads_pairs else None) for phase, record, _ in logged],
        "quoted loss": [
            Figure("" if phase.quoted_loss is None else f"{phase.quoted_loss:g}") for phase, _, _ in logged
        ],
        "final reward": [_number(record.mean_reward) for _, record, _ in logged],
        "tokens per second": [
            Figure(f"{median_of(metrics, 'tokens_per_second'):,.0f}" if metrics else "") for _, _, metrics in logged
        ],
        "MFU": [Figure(f"{median_of(metrics, 'mfu'):.1%}" if metrics else "") for _, _, metrics in logged],
        "effective time": [Figure("" if spent is None else f"{spent.share:.1%}") for spent in times],
        "lost": [Figure("" if spent is None else f"{spent.lost:,.0f} s") for spent in times],
        "peak memory": [
            Figure(f"{max(line.get('memory_bytes', 0) for line in metrics) / 2**30:.2f} GiB" if metrics else "")
            for _, _, metrics in logged
        ],
        "tensors without a gradient": [Figure(f"{len(record.unreached_tensors) or ''}") for _, record, _ in logged],
        "error of the merge": [
            Figure("" if record.merge_error is None else f"{record.merge_error:.1e}") for _, record, _ in logged
        ],
        "prompts too long": [Figure(str(record.num_long_prompts or "")) for _, record, _ in logged],
        "rollbacks": [Figure(str(record.num_rollbacks or "")) for _, record, _ in logged],
    }
    filled = {
        name: cells
        for name, cells in columns.items()
        if any(not isinstance(cell, Figure) or cell.text for cell in cells)
    }
    note = "Loss: cross-entropy of the next token in nats, of the last step. Speed and MFU: median over the log."
    if "effective time" in filled:
        note += " Effective time: productive share of the wall time from submission to end; lost: steps taken again and"
        note += " the time between two starts."
    if "error of the merge" in filled:
        note += " Error of the merge: largest difference of a logit with the adapter merged in or beside the weights,"
        note += " as a share of the largest; above 1e-6 the phase ends."
    if "quoted loss" in filled:
        note += " Quoted: what S0 expects at full scale without evidence; it decides nothing."
    unreached = {phase.name: record.unreached_tensors for phase, record, _ in logged if record.unreached_tensors}
    for name, tensors in unreached.items():
        more = "" if len(tensors) <= NUM_NAMED_TENSORS else " and others"
        note += f" No gradient reached in {name}: {', '.join(tensors[:NUM_NAMED_TENSORS])}{more}."
    return table(tuple(filled), list(zip(*filled.values(), strict=True))) + paragraph(note, "soft")


def _number(value: float | None) -> Figure:
    return Figure("" if value is None else f"{value:.4f}")


def median_of(metrics: Metrics, name: str) -> float:
    """Over the lines of a log that have it: one of a step that a spike left out has no speed."""
    values = sorted(line[name] for line in metrics if name in line)
    return values[len(values) // 2]


def _losses(trained: Sequence[tuple[ReportedPhase, Span, Metrics]], spans: Sequence[Span]) -> str:
    """A policy objective's surrogate is no measure of the model: its phases stay empty. The loss of a preference pair
    has a picture of its own."""
    lines = []
    for name, key, colour in (("next token", "lm", "accent"), ("token after it (MTP)", "mtp", "second")):
        for phase, span, metrics in trained:
            points = _points(span, metrics, key)
            if not sampled_lines(metrics) and not phase.reads_pairs and any(value for _, value in points):
                lines.append(Line(name, points, colour, width=2 if key == "lm" else 1.4))
    drawn = heading("Loss") + curves("tokens", "cross-entropy, nats per token", lines, spans) if lines else ""
    of_pairs = [
        Line(phase.name, points)
        for phase, span, metrics in trained
        if phase.reads_pairs and (points := _points(span, metrics, "lm"))
    ]
    if not of_pairs:
        return drawn
    return drawn + heading("Loss of preference pairs") + curves("tokens", "nats per pair", of_pairs, spans)


def _points(span: Span, metrics: Metrics, key: str) -> list[Point]:
    """Steps that have the metric: a step that learned nothing from its sampled answers routed no token."""
    return [(span.start + line["tokens"], line[key]) for line in metrics if key in line]


def _expert_load(trained: Sequence[tuple[ReportedPhase, Span, Metrics]], spans: Sequence[Span]) -> str:
    """Load of the busiest expert over the mean, per layer with experts."""
    loads = _loads(trained, spans)
    return "" if loads is None else heading("Expert load") + loads[0] + paragraph(loads[1], "soft")


def load_strips(phases: ReportedPhases) -> str | None:
    """The picture of the experts' load over the tokens of all phases; None where there is none."""
    trained = _logged(phases)
    loads = _loads(trained, [span for _, span, _ in trained]) if trained else None
    return None if loads is None else loads[0]


def _loads(trained: Sequence[tuple[ReportedPhase, Span, Metrics]], spans: Sequence[Span]) -> tuple[str, str] | None:
    """The picture, and a sentence about it."""
    names = {key for _, _, metrics in trained for line in metrics for key in line if key.startswith(LOAD)}
    layers = sorted(names, key=lambda key: int(key.removeprefix(LOAD)))
    if not layers:
        return None
    config = json.loads(trained[-1][0].checkpoint.path("hf/config.json").read_text(encoding="utf-8"))
    num_trunk_layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    rows = [
        (
            f"layer {number}" if number <= num_trunk_layers else "MTP layer",
            [point for _, span, metrics in trained for point in _points(span, metrics, key)],
        )
        for number, key in enumerate(layers, 1)
    ]
    highest = max(value for _, points in rows for _, value in points)
    last = ", ".join(f"{name} {points[-1][1]:.2f}" for name, points in rows)
    drawn = strips("tokens", f"1 (pale) to {highest:.2f} (full colour)", rows, 1.0, max(highest, 1.01), spans)
    note = f"Routed tokens of the busiest expert over the mean, per layer with experts: 1 is balance. Last: {last}."
    if len(rows) > num_trunk_layers:
        note += " The MTP layer routes tokens where its loss has a weight."
    return drawn, note


def _rewards(trained: Sequence[tuple[ReportedPhase, Span, Metrics]]) -> str:
    parts = []
    for phase, _, metrics in trained:
        if rewarded := sampled_lines(metrics):
            points = [(line["step"], line[REWARD]) for line in rewarded]
            lines = [
                Line("per step", points, "soft", 1, 0.7),
                Line(f"mean of {SMOOTHED_STEPS} steps", _smoothed(points), "accent", 2),
            ]
            drawn = curves("steps", "mean reward of sampled answers", lines)
            parts += [heading(f"Reward of {phase.name}"), drawn, _reward_parts(rewarded), samples(phase.checkpoint)]
    return "".join(parts)


def sampled_lines(metrics: Metrics) -> Metrics:
    """The lines of steps that sampled answers: one that is passed over after a spike has none."""
    return [line for line in metrics if REWARD in line]


def _reward_parts(metrics: Metrics) -> str:
    """What the reward was made of at the end, whatever the parts weigh."""
    last = metrics[-SMOOTHED_STEPS:]
    values = {name: [line[key] for line in last if key in line] for key, name in (REWARD_PARTS | PARTS_OF_SOME).items()}
    means = [f"{name} {sum(each) / len(each):.3f}" for name, each in values.items() if each]
    said = f"Means over the last {len(last)} logged steps, of those that have the part: {', '.join(means)}."
    played = sorted({key for line in metrics for key in line if key.startswith(TIMEOUTS)})
    timeouts = [
        f"{key.removeprefix(TIMEOUTS)} {sum(line[key] for line in metrics if key in line):,.0f}" for key in played
    ]
    return paragraph(said + (f" Tool calls out of time in all: {', '.join(timeouts)}." if timeouts else ""), "soft")


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Each point with the mean over itself and those before it."""
    windows = [points[max(0, number - SMOOTHED_STEPS + 1) : number + 1] for number in range(len(points))]
    return [(window[-1][0], sum(y for _, y in window) / len(window)) for window in windows]


def samples(checkpoint: Artifact[Any]) -> str:
    """Sampled answers of the first and of the last step that kept some; right ones are marked."""
    groups = [json.loads(line) for line in checkpoint.path(ROLLOUTS_FILE).read_text().splitlines()]
    if not groups:
        return ""
    parts = []
    for step in dict.fromkeys((groups[0]["step"], groups[-1]["step"])):
        shown = [group for group in groups if group["step"] == step][:NUM_SAMPLE_GROUPS]
        body = "".join(
            paragraph(f"{group['question']}  (right: {shortened(group['answer'])})")
            + chips((visible(text), "good" if reward > 0 else "bad") for text, reward in _rewarded(group))
            for group in shown
        )
        parts.append(
            folded(
                f"Sampled answers of step {step}; rewarded ones have a green frame",
                body,
                is_open=step == groups[-1]["step"],
            )
        )
    return "".join(parts)


def _rewarded(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return zip(group["samples"], group["rewards"], strict=True)


def visible(text: str) -> str:
    """The text with a visible sign for line ends, and one for an empty text."""
    return text.strip("\n").replace("\n", " ⏎ ") or "(empty)"
