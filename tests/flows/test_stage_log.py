"""The lines of a running stage: what a person sees while it runs, with and without a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from flows.running.sparkline import BARS, MAX_BARS, Sparkline
from flows.running.stage_log import StageLog
from infra.step import Progress


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    monkeypatch.setattr("flows.running.stage_log.PROGRESS_INTERVAL_SECONDS", {True: 0.01, False: 0.01})


def log_to(text: io.StringIO, *, is_terminal: bool) -> StageLog:
    return StageLog(console=Console(file=text, force_terminal=is_terminal, width=100, highlight=False))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stage_that_reports_nothing_is_seen_to_run(is_terminal):
    text = io.StringIO()
    log = log_to(text, is_terminal=is_terminal)
    with log.running("convert_to_gguf"):
        while "convert_to_gguf, 0 s so far" not in text.getvalue():
            time.sleep(0.01)
    shown = text.getvalue()
    time.sleep(0.05)
    assert text.getvalue() == shown, "the stage has ended"


def test_the_course_of_the_loss_is_drawn_once_per_step():
    log = log_to(io.StringIO(), is_terminal=False)
    for done, loss in ((1, 8.0), (2, 4.5), (2, 4.5), (3, 1.0)):
        line = log.progress("train", Progress(done, 10, "tokens", f"loss {loss}", loss))
    assert line.endswith("loss 1.0 █▅▁")
    assert log.progress("evaluate", Progress(1, 2, "windows")).endswith("windows"), "another stage starts anew"


def test_a_sparkline_holds_any_number_of_values():
    falling = Sparkline()
    for value in range(10_000, 0, -1):
        falling.add(value)
    bars = str(falling)
    assert MAX_BARS // 2 <= len(bars) < MAX_BARS and bars[0] == BARS[-1] and bars[-1] == BARS[0]
    assert [BARS.index(bar) for bar in bars] == sorted((BARS.index(bar) for bar in bars), reverse=True)


def test_a_sparkline_leaves_out_what_is_not_finite_and_draws_no_flat_line():
    line = Sparkline()
    for value in (1.0, float("nan"), float("inf"), 1.0):
        line.add(value)
    assert str(line) == ""
    line.add(2.0)
    assert str(line) == "▁▁█"
