"""The trend over runs: what is flagged as worse, on each side of its bound, and what MLflow keeps of a run."""

from __future__ import annotations

import pytest

from flows.show import show_trend
from flows.show.show_trend import MEASURED_TAG, _as_metrics, read_trend
from infra.registry.experiment_tracking import ensure_run, log_figures, set_run_tags
from tasks.report.trend_page import TrendRun, regressions, trend_page, trend_rows, without_repeats


def night(name: str, pass_at_1: float, minutes: float | None = None, width: float = 0.05) -> TrendRun:
    figures = {"pass@1": pass_at_1} | ({} if minutes is None else {"minutes": minutes})
    return TrendRun(name, figures, {"pass@1": (pass_at_1 - width, pass_at_1 + width)})


def test_a_figure_is_worse_only_where_intervals_do_not_overlap():
    assert regressions([night("mon", 0.8), night("tue", 0.71)]) == []
    (worse,) = regressions([night("mon", 0.8), night("tue", 0.69)])
    assert worse.startswith("pass@1 0.69 [0.64, 0.74] is worse than 0.8 [0.75, 0.85] of mon")
    assert regressions([night("mon", 0.69), night("tue", 0.8)]) == [] == regressions([])


def test_a_figure_without_an_interval_is_compared_with_the_spread_of_at_least_three_runs():
    before = [night(day, 0.8, minutes) for day, minutes in (("mon", 60), ("tue", 62), ("wed", 64))]
    assert regressions([*before, night("thu", 0.8, 65.9)]) == [], "62 and twice 2 minutes"
    (worse,) = regressions([*before, night("thu", 0.8, 66.1)])
    assert worse == "minutes 66.1 is worse than 66, the bound of 3 runs before it"
    assert regressions([*before[:2], night("thu", 0.8, 90)]) == []
    assert regressions([*before, night("thu", 0.8)]) == [], "a cached run has no minutes"


def test_only_runs_that_ended_after_the_same_phase_are_compared():
    def ended(phase: str, bits: float, minutes: float) -> TrendRun:
        interval = {"bits per byte": (bits - 0.1, bits + 0.1)}
        return TrendRun(f"after {phase}", {"bits per byte": bits, "minutes": minutes}, interval, "", phase)

    full, refused = [ended("sft", 2.0, 60.0 + day) for day in range(3)], ended("pretrain_general", 3.0, 90.0)
    assert regressions([*full, refused]) == [], "a night that a gate refused early is no worse for it"
    worse = regressions([*full, refused, ended("sft", 2.3, 90.0)])
    assert [sentence.split(" is worse")[0] for sentence in worse] == ["bits per byte 2.3 [2.2, 2.4]", "minutes 90"]
    assert [row["phase"] for row in trend_rows([*full, refused])] == ["pretrain_general", *["sft"] * 3]
    assert "<svg" in trend_page("nightly", full) and "<svg" not in trend_page("nightly", [*full, refused])


def test_equal_runs_have_a_spread_all_the_same():
    def speed(value: float) -> TrendRun:
        return TrendRun("night", {"tokens per second": value}, {})

    equal = [speed(5130)] * 3
    assert regressions([*equal, speed(5129)]) == [] == regressions([*equal, speed(5028)])
    (worse,) = regressions([*equal, speed(5000)])
    assert worse == "tokens per second 5000 is worse than 5027, the bound of 3 runs before it"


def test_a_run_from_the_store_is_no_other_night():
    def measured(name: str, digest: str) -> TrendRun:
        return TrendRun(name, {"minutes": 60.0}, {}, digest)

    runs = [
        measured("mon", "a"),
        measured("tue", "a"),
        measured("wed", "b"),
        measured("thu", "b"),
        measured("fri", "a"),
    ]
    assert [run.name for run in without_repeats(runs)] == ["mon", "wed", "fri"]


def test_the_page_shows_the_newest_first_and_what_is_worse():
    runs = [night("mon", 0.8, 60), night("tue", 0.69)]
    assert [row["run"] for row in trend_rows(runs)] == ["tue", "mon"]
    text = trend_page("nightly", runs)
    assert (
        "is worse than" in text
        and "0.69 [0.64, 0.74]" in text
        and "http" not in text.split("</style>")[1].replace("http://www.w3.org", "")
    )


def test_quiet_nights_push_no_measurement_out_of_the_trend(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(show_trend, "NUM_RUNS", 2)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db", f"sqlite:///{tmp_path}/mlflow.db")
    seen = []
    for number, digest in enumerate(("a", "b", "b", "b")):
        own = TrendRun("", {"pass@1": 0.5 + number / 10}, {}, digest, "sft")
        run_id = ensure_run(client, "glm46-toy", "run", str(number), None, {"glm46.scale": "toy"})
        runs = show_trend.runs_with(client, "toy", run_id, own)
        seen = [run.measured for run in runs]
        assert {run.phase for run in runs} == {"sft"}
        assert seen == [run.measured for run in show_trend.runs_with(client, "toy", run_id, own)], "a retried run"
    assert seen == ["a", "b"]


def test_mlflow_keeps_what_the_trend_needs(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db", f"sqlite:///{tmp_path}/mlflow.db")
    for number, run in enumerate((night("", 0.8, 60), night("", 0.7))):
        run_id = ensure_run(client, "glm46-toy", "run", str(number), None, {"glm46.scale": "toy"})
        log_figures(client, run_id, _as_metrics(run) | {"evaluation/pass_at_1": 0.1})
        set_run_tags(client, run_id, {MEASURED_TAG: str(number)})
    ensure_run(client, "glm46-toy", "failed", "2", None, {"glm46.scale": "toy"})
    read = read_trend(client, "toy")
    assert [run.figures for run in read] == [{"pass@1": 0.8, "minutes": 60}, {"pass@1": 0.7}]
    assert read[0].intervals == {"pass@1": pytest.approx((0.75, 0.85))}
