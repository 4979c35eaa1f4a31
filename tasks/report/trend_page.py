"""The page about the last runs of a scale: figures of each, and whether the newest is worse than intervals allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import mean, stdev

from infra.step import digest_of
from tasks.report.report_charts import Line, curves
from tasks.report.report_inputs import ReportedPhases
from tasks.report.report_page import Figure, Section, boxed, page, paragraph, table
from tasks.report.report_training import effective_time_of, median_of, read_metrics

MIN_EARLIER_RUNS = 3
"""Fewer have no spread that a figure without an interval of its own could be compared with."""
DEVIATIONS = 2.0
MIN_DEVIATION = 0.01
"""Least standard deviation of a figure without an interval, as a share of its mean: equal runs have a spread of 0, and
a machine is never that even."""
FIGURES = {
    "bits per byte": False,
    "pass@1": True,
    "last loss": False,
    "tokens per second": True,
    "minutes": False,
    "effective time": True,
}
"""Name, and whether more is better."""


@dataclass(frozen=True)
class TrendRun:
    """One finished run. `intervals` are those of figures that were measured on items; a run has what it reached."""

    name: str
    figures: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    measured: str = ""
    """Digest over the trainings and evaluations that the figures are from."""
    phase: str = ""
    """Phase whose weights were evaluated, the last that the run reached; empty in runs of an earlier version."""


def trend_run(name: str, phases: ReportedPhases, seconds: float, is_cached: bool) -> TrendRun:
    """What this run adds; the minutes of a run that took stages from the cache say nothing and are left out."""
    last = phases.last
    evaluated = last.evaluation.record
    figures = {"bits per byte": evaluated.bits_per_byte, "pass@1": evaluated.pass_at_1}
    intervals = {
        shown: evaluated.intervals[key]
        for shown, key in (("bits per byte", "bits_per_byte"), ("pass@1", "pass_at_1"))
        if key in evaluated.intervals
    }
    # A surrogate says nothing, and the loss of a pair is no token's.
    predicting = [phase for phase in phases if phase.checkpoint.record.mean_reward is None and not phase.reads_pairs]
    if predicting:
        figures["last loss"] = predicting[-1].checkpoint.record.lm_loss
    measured = [metrics for phase in phases if (metrics := read_metrics(phase.checkpoint))]
    if measured:
        figures["tokens per second"] = median_of(
            [line for metrics in measured for line in metrics], "tokens_per_second"
        )
    times = [time for phase in phases if (time := effective_time_of(phase.checkpoint)) is not None]
    if times:
        figures["effective time"] = sum(time.productive for time in times) / sum(time.total for time in times)
    if not is_cached:
        figures["minutes"] = seconds / 60
    kept = {key: float(value) for key, value in figures.items() if value is not None and math.isfinite(value)}
    computed = [
        [artifact.digest, artifact.manifest.attempt]
        for phase in phases
        for artifact in (phase.checkpoint, phase.evaluation)
    ]
    kept_intervals = {key: each for key, each in intervals.items() if key in kept}
    return TrendRun(name, kept, kept_intervals, digest_of(computed), last.name)


def without_repeats(runs: Sequence[TrendRun]) -> list[TrendRun]:
    """The runs without those that took every training and evaluation of the run before them from the store: they
    measured nothing. Runs in their order."""
    return [run for number, run in enumerate(runs) if not (number and run.measured == runs[number - 1].measured)]


def regressions(runs: Sequence[TrendRun]) -> list[str]:
    """What is worse in the newest run than in those before it that ended after the same phase; runs in their order. A
    figure with intervals is worse where its interval and that of the run before do not overlap; another where it is
    more than DEVIATIONS standard deviations worse than the mean of the runs before; of a deviation, MIN_DEVIATION of
    the mean is assumed at least."""
    if not runs:
        return []
    newest, found = runs[-1], []
    earlier = [run for run in runs[:-1] if run.phase == newest.phase]
    for name, more_is_better in FIGURES.items():
        if name not in newest.figures:
            continue
        value, sign = newest.figures[name], 1 if more_is_better else -1
        bounded = [run for run in earlier if name in run.intervals]
        if name in newest.intervals and bounded:
            before = bounded[-1]
            (low, high), (low_before, high_before) = newest.intervals[name], before.intervals[name]
            if (high < low_before) if more_is_better else (low > high_before):
                found.append(
                    f"{name} {value:.4g} [{low:.4g}, {high:.4g}] is worse than {before.figures[name]:.4g} "
                    f"[{low_before:.4g}, {high_before:.4g}] of {before.name}"
                )
            continue
        known = [run.figures[name] for run in earlier if name in run.figures]
        if name not in newest.intervals and len(known) >= MIN_EARLIER_RUNS:
            spread = max(stdev(known), MIN_DEVIATION * abs(mean(known)))
            bound = mean(known) - sign * DEVIATIONS * spread
            if sign * (value - bound) < 0:
                found.append(f"{name} {value:.4g} is worse than {bound:.4g}, the bound of {len(known)} runs before it")
    return found


def trend_rows(runs: Sequence[TrendRun]) -> list[dict[str, str]]:
    """A row per run, the newest first."""
    return [
        {"run": run.name, "phase": run.phase, **{name: _shown(run, name) for name in FIGURES}} for run in reversed(runs)
    ]


def trend_page(scale: str, runs: Sequence[TrendRun]) -> str:
    """The whole file."""
    worse = regressions(runs)
    ending = boxed("".join(paragraph(sentence) for sentence in worse), "bad") if worse else ""
    rows = [[row["run"], row["phase"], *(Figure(row[name]) for name in FIGURES)] for row in trend_rows(runs)]
    note = (
        "Brackets: the interval over the items of the evaluation. Minutes are empty where a run took stages from the "
        "cache. Effective time: productive share of the phases' wall time. Phase: the last that the run reached, whose "
        "weights were evaluated; only runs that ended after the same phase are compared, and the curves are theirs. "
        "Runs differ by code, configuration or data: one that took all its trainings and evaluations from the store "
        "repeats the run before it and is left out."
    )
    drawn = "".join(
        curves("runs, the oldest first", name, [Line(name, points)])
        for name in FIGURES
        if len(points := _points(runs, name)) > 1
    )
    sections = [
        Section("Runs", table(("run", "phase", *FIGURES), rows) + paragraph(note, "soft")),
        Section("Curves", drawn),
    ]
    facts = [("runs", str(len(runs))), ("regressions of the newest", str(len(worse)))]
    return page(f"glm46 trend of {scale}", "The last runs that reached an evaluation", ending, facts, sections)


def _points(runs: Sequence[TrendRun], name: str) -> list[tuple[float, float]]:
    """A figure of the runs that ended after the same phase as the newest, by their numbers."""
    alike = [(number, run) for number, run in enumerate(runs, 1) if run.phase == runs[-1].phase]
    return [(float(number), run.figures[name]) for number, run in alike if name in run.figures]


def _shown(run: TrendRun, name: str) -> str:
    if name not in run.figures:
        return ""
    bounds = f" [{run.intervals[name][0]:.4g}, {run.intervals[name][1]:.4g}]" if name in run.intervals else ""
    return f"{run.figures[name]:.4g}{bounds}"


def trend_row_name(started: float) -> str:
    """A run by its start, seconds since the epoch, in UTC."""
    return datetime.fromtimestamp(started, tz=UTC).strftime("%Y-%m-%d %H:%M")
