"""What a store's phases tell the plan: measured ones count, damaged ones and those of another version are named."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from configs.load import load_scale
from configs.machine import this_machine
from flows.cli.command import app
from infra.step import Output, Record, step
from infra.storage.local_store import LocalStore
from infra.storage.store import step_key

if TYPE_CHECKING:
    from infra.home import Home

SCALE = load_scale("micro")
GOOD = {
    "job.json": {
        "pid": 1,
        "started_at": 0.0,
        "fencing": 1,
        "master_port": 1,
        "machine": str(this_machine()),
        "rank_pids": [1],
    },
    "time.json": {
        "submitted_at": 0.0,
        "stretches": [{"first_step": 0, "opened_at": 0.0, "last_step": 10, "seen_at": 20.0}],
    },
    "metrics.jsonl": {"filled_positions": 10_000, "attended_tokens": 64.0, "memory_bytes": 10**9},
}
RECIPE = SCALE.training_recipe(SCALE.phases[0]).model_dump(mode="json")
TOLD = "of the store is not counted, its measurements cannot be read"


class Trained(Record):
    """As much of a phase's record as the plan reads."""

    num_tokens: int


def commit_phase(home: Home, files: dict, recipe: dict) -> tuple[str, LocalStore]:
    """Commit a phase whose evidence are these files, under the name of the real step."""

    @step(content=("weights.txt",), evidence=("*.json", "*.jsonl"))
    def train_phase(*, output: Output) -> Trained:
        output.path("weights.txt").write_text("1")
        for name, value in files.items():
            output.path(name).write_text(
                value if isinstance(value, str) else "" if value is None else json.dumps(value)
            )
        return Trained(num_tokens=10_000)

    store = LocalStore(home.store_dir, home)
    identity = {"step": "train_phase", "recipe": recipe, "inputs": {}, "code": "", "distributions": {}}
    key = step_key(identity)
    with store.locked(key, print):
        store.compute(
            train_phase,
            key,
            identity,
            lambda output: train_phase(output=output),
            lambda progress: None,
            print,
            lambda rows: None,
            time.monotonic,
        )
    return key, store


def test_a_line_of_steps_that_a_spike_left_out_does_not_count(home):
    taken = {**GOOD["metrics.jsonl"], "loss": 3.0, "skipped_steps": 0}
    both = json.dumps(taken) + "\n" + json.dumps({"step": 2, "tokens": 128, "skipped_steps": 1, "rollbacks": 1})
    key, _ = commit_phase(home, GOOD | {"metrics.jsonl": both}, RECIPE)
    assert json.loads(planned().stdout)["phases"][0]["known_by"] == f"run {key[:12]}"


def planned(*options: str):
    return CliRunner().invoke(app, ["plan", "micro", "--json", *options])


def test_a_measured_phase_tells_hours_and_tokens_per_second(home):
    key, _ = commit_phase(home, GOOD, RECIPE)
    done = planned()
    assert (done.exit_code, done.stderr) == (0, "")
    phase = json.loads(done.stdout)["phases"][0]
    assert phase["known_by"] == f"run {key[:12]}"
    assert phase["tokens_per_second"] == pytest.approx(10_000 / 20, rel=0.1), "attention over other lengths"
    assert phase["tokens_per_second"] == pytest.approx(phase["num_tokens"] / phase["hours"] / 3600)


@pytest.mark.parametrize(
    ("changed", "recipe", "why"),
    [
        ({"job.json": {**GOOD["job.json"], "queue": "removed"}}, RECIPE, "TypeError"),
        ({"job.json": None}, RECIPE, "Expecting value"),
        ({"time.json": {"stretches": GOOD["time.json"]["stretches"]}}, RECIPE, "KeyError: 'submitted_at'"),
        ({"metrics.jsonl": None}, RECIPE, "ZeroDivisionError"),
        ({"metrics.jsonl": {"filled_positions": 1, "attended_tokens": 64.0}}, RECIPE, "KeyError: 'memory_bytes'"),
        ({"metrics.jsonl": {"attended_tokens": 64.0}}, RECIPE, "KeyError: 'filled_positions'"),
        ({}, {name: value for name, value in RECIPE.items() if name != "course"}, "KeyError: 'course'"),
    ],
)
def test_a_phase_that_another_version_measured_is_left_out_and_named(home, changed, recipe, why):
    key, _ = commit_phase(home, {**GOOD, **changed}, recipe)
    done = planned()
    assert done.exit_code == 0, done.output
    assert f"phase {key[:12]} {TOLD}: " in done.stderr and why in done.stderr
    assert {phase["known_by"] for phase in json.loads(done.stdout)["phases"]} == {"assumed"}


def test_a_damaged_phase_is_left_out_and_named(home):
    key, store = commit_phase(home, GOOD, RECIPE)
    (damaged,) = (store.root / "objects" / key).rglob("time.json")
    damaged.write_bytes(damaged.read_bytes()[::-1])
    done = planned()
    assert done.exit_code == 0, done.output
    assert f"phase {key[:12]} {TOLD}: " in done.stderr and "corrupt" in done.stderr


def test_a_phase_without_time_is_assumed(home):
    stretch = {**GOOD["time.json"]["stretches"][0], "seen_at": 0.0}
    commit_phase(home, {**GOOD, "time.json": {"submitted_at": 0.0, "stretches": [stretch]}}, RECIPE)
    assert planned().exit_code == 0
