"""The lines of a running stage: what a person sees while it runs, with and without a terminal."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.cli.stage_output import StageOutcome
from flows.running.sparkline import BARS, MAX_BARS, Sparkline
from flows.running.stage_log import StageLog, key_figures
from infra.step import Progress
from tests.support.report_fakes import toy_checkpoint


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
    with log.running("train"):
        for done, loss in ((1, 8.0), (2, 4.5), (2, 4.5), (3, 1.0)):
            line = log.progress("train", Progress(done, 10, "tokens", f"loss {loss}", loss))
        assert line.endswith("loss 1.0 █▅▁")
        other = log.progress("train", Progress(1, 2, "windows"), "held out")
        assert other == "train, held out: 1 of 2 windows", "another part starts anew"


def test_the_time_in_a_queue_is_shown_and_counts_for_no_rate(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("flows.running.stage_log.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    log = log_to(io.StringIO(), is_terminal=False)
    with log.running("train"):
        assert log.progress("train", Progress(0, 0, "", "in the queue")) == "train: in the queue"
        seconds[0] = 5000.0
        assert log.progress("train", Progress(5, 10, "steps")) == "train: 5 of 10 steps"
        seconds[0] = 5100.0
        assert log.progress("train", Progress(7, 10, "steps")) == "train: 7 of 10 steps, 0.02/s, 150 s to go"


@pytest.mark.parametrize(("is_terminal", "between"), [(True, " | "), (False, "\n")])
def test_stages_that_run_side_by_side_are_shown_beside_each_other(is_terminal, between):
    text = io.StringIO()
    log = log_to(text, is_terminal=is_terminal)
    shown = re.compile(rf"evaluate W4A16: 30 of 90[^|\n]*{re.escape(between)} *evaluate FP8: 3 of 9")
    with log.running("evaluate W4A16"), log.running("evaluate FP8"):
        log.progress("evaluate FP8", Progress(3, 9, "windows"))
        log.progress("evaluate W4A16", Progress(30, 90, "windows"))
        while not shown.search(text.getvalue()):
            time.sleep(0.01)
    with log.running("gate"):
        text.truncate(0)
        while "gate, " not in text.getvalue():
            time.sleep(0.01)
        assert "evaluate" not in text.getvalue(), "they have ended"


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


def test_a_stage_says_which_records_are_above_the_bound_on_bytes(tmp_path):
    record = {"num_documents": 7, "num_unsampled_documents": 1044, "rejected": {"empty": 1}}
    outcome = StageOutcome(
        stage="extract",
        output=str(tmp_path),
        digest="d",
        record={"num_documents": 7, "dropped": {}},
        earlier={"ingest_documents": record},
    )
    wanted = "7 documents left, 1,044 left out by ingest.max_source_bytes, 1 rejected (empty 1)"
    assert outcome.describe().splitlines()[0] == f"ingest_documents: {wanted}"


def test_a_trained_phase_shows_what_it_learns_by():
    assert key_figures(toy_checkpoint("sft")) == "steps 30, tokens 245,760, course tokens 245,760, lm loss 2.25"
    assert key_figures(toy_checkpoint("rl_reasoning")).startswith("steps 20, tokens 163,840, mean reward 0.61, ")
    pairs = toy_checkpoint("sft").model_copy(update={"objective": "dpo"})
    assert key_figures(pairs).endswith("pair loss 2.25")
