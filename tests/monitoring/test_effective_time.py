"""Where a phase's wall time went, against stretches whose seconds are known."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from tasks.training.watch.effective_time import TIME_FILE, TimeLog, effective_time


def stretch(first: int, last: int, opened: float, seen: float, wait: float = 0.0, pause: float = 0.0) -> dict:
    times = {"opened_at": opened, "seen_at": seen, "wait_seconds": wait, "pause_seconds": pause}
    return {"first_step": first, "last_step": last, **times}


def measured(*stretches: dict) -> Any:
    return effective_time(json.dumps({"submitted_at": 100.0, "stretches": list(stretches)}).encode())


def parts(time) -> tuple[float, ...]:
    return time.productive, time.paused, time.waiting, time.lost


def test_an_undisturbed_phase_loses_nothing():
    spent = measured(stretch(0, 10, 105, 205, wait=3, pause=7))
    assert parts(spent) == pytest.approx((90, 7, 8, 0)) and spent.data_wait == 3


def test_steps_that_were_taken_again_and_the_time_between_starts_are_lost():
    """10 steps in 100 s, killed; back at 6 after 20 s; then to the end."""
    twice = measured(stretch(0, 10, 100, 200), stretch(6, 12, 220, 280))
    assert parts(twice) == pytest.approx((60 + 60, 0, 0, 40 + 20)) and twice.share == pytest.approx(120 / 180)
    thrice = measured(stretch(0, 10, 100, 200), stretch(6, 12, 220, 280), stretch(3, 12, 280, 370))
    assert thrice.productive == pytest.approx(30 + 0 + 90), "the second stretch was thrown away as a whole"
    assert thrice.total == pytest.approx(270), "all the time is somewhere"


def test_a_clock_that_was_set_back_takes_no_time():
    assert parts(measured(stretch(0, 5, 90, 140), stretch(5, 10, 130, 180))) == pytest.approx((100, 0, 0, 0))
    assert measured() is None and measured(stretch(0, 0, 90, 90)) is None


def test_the_log_goes_on_where_another_process_ended(tmp_path):
    (tmp_path / "command.json").touch()
    os.utime(tmp_path / "command.json", (0, 0))
    for first, last in ((0, 4), (2, 6)):
        log = TimeLog(tmp_path, first, "cpu")
        log.waited(0.25)
        log.paused(0.5)
        log.seen(last)
    values = json.loads((tmp_path / TIME_FILE).read_text())
    assert values["submitted_at"] == 0
    assert [(each["first_step"], each["last_step"], each["pause_seconds"]) for each in values["stretches"]] == [
        (0, 4, 0.5),
        (2, 6, 0.5),
    ]


def test_an_empty_log_of_a_power_cut_ends_no_training(tmp_path, capsys):
    (tmp_path / "command.json").touch()
    (tmp_path / TIME_FILE).touch()
    TimeLog(tmp_path, 2, "cpu").seen(4)
    assert "is damaged: the time of earlier starts counts as waiting" in capsys.readouterr().out
    measured = effective_time((tmp_path / TIME_FILE).read_bytes())
    assert measured is not None and measured.lost == 0


@pytest.mark.parametrize("set_by", [3600, -3600])
def test_a_clock_that_is_set_within_a_stretch_changes_no_second(set_by, tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    log = TimeLog(tmp_path, 0, "cpu")
    monkeypatch.setattr(time, "time", lambda: now + set_by)
    time.sleep(0.05)
    log.seen(4)
    spent = effective_time((tmp_path / TIME_FILE).read_bytes())
    assert spent is not None and 0.05 <= spent.productive < 60
