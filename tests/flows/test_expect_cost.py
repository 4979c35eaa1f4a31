"""What a run will cost, as it is said before the run: by a run before it, by the plan, and what ranks cost."""

from __future__ import annotations

import pytest

from configs.load import load_scale
from flows.expect_cost import MINUTES, STAGES_TAG, expected_cost, newest_alike
from flows.show.outcome import RunOutcome, print_outcome
from flows.show.track_run import SCALE_TAG
from infra.registry.experiment_tracking import TrackedRun, ensure_run, log_figures
from tasks.training.plan.plan_training import plan_training


def test_the_minutes_are_those_of_the_newest_run_of_the_same_stages():
    plan = plan_training(load_scale("tiny"))
    runs = [TrackedRun(0.0, {MINUTES: 99.0}, {}), TrackedRun(86400.0, {MINUTES: 12.44}, {})]
    line = expected_cost(plan, plan.phases, runs)
    assert line.startswith("expect 12.4 minutes, as the run of 1970-01-02 00:00 that computed everything; ")
    needed = sum(phase.needs.disk_bytes + phase.needs.data_bytes for phase in plan.phases)
    assert f"{needed / 1e9:.1f} GB of disk" in line and "USD" not in line, "CPU ranks have no price"


def test_the_run_that_is_named_computed_everything_in_the_same_stages(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db", f"sqlite:///{tmp_path}/mlflow.db")
    nights = [("toy", "a b", 3.0), ("toy", "a b", 5.0), ("toy", "a b", None), ("toy", "a", 7.0), ("other", "a b", 9.0)]
    for number, (scale, stages, minutes) in enumerate(nights):
        tags = {SCALE_TAG: scale, STAGES_TAG: stages}
        run_id = ensure_run(client, f"glm46-{scale}", "run", str(number), None, tags)
        log_figures(client, run_id, {"loss": 1.0} if minutes is None else {MINUTES: minutes})
    assert [run.metrics[MINUTES] for run in newest_alike(client, "toy", "a b")] == [5.0]
    assert newest_alike(client, "toy", "b") == []


def test_without_a_run_the_plan_says_how_long_and_how_it_knows():
    plan = plan_training(load_scale("tiny"))
    minutes = sum(phase.hours for phase in plan.phases[:2]) * 60
    line = expected_cost(plan, plan.phases[:2], [])
    assert f"expect {minutes:,.1f} minutes of training on 524,288 tokens, at a speed that is assumed; data, " in line
    assert "; sampling of answers, data, evaluation" in expected_cost(plan, plan.phases, [])
    measured = [phase.model_copy(update={"known_by": "run abc"}) for phase in plan.phases]
    assert "measured by runs in the store; " in expected_cost(plan, measured, [])
    assert "assumed or measured by runs in the store" in expected_cost(plan, [*measured[:1], *plan.phases[1:]], [])


def test_accelerators_cost_what_the_prices_say():
    plan = plan_training(load_scale("scaled_down"))
    line = expected_cost(plan, plan.phases, [])
    assert f"{plan.cost.rank_hours:,.1f} rank-hours cost {plan.cost.ranks:,.0f} USD" in line
    assert " hours of training" in line and "derived" in line


def test_a_promoted_run_ends_with_how_to_ask_its_model(capsys):
    ended = {"model": "glm46-micro", "version": "4", "seconds": 1.0, "digest": "", "report": "", "stages": []}
    promoted = RunOutcome(promoted=True, alias="champion", reasons=[], **ended)
    print_outcome(promoted, "micro", None)
    assert "talk to it: glm46 chat --scale micro\n" in capsys.readouterr().err
    print_outcome(promoted, "my scale.yaml", "s3://bucket/x")
    assert "talk to it: glm46 chat --scale 'my scale.yaml' --store s3://bucket/x\n" in capsys.readouterr().err
    print_outcome(RunOutcome(promoted=False, alias="", reasons=["too high"], **ended), "micro", None)
    assert "talk to it" not in capsys.readouterr().err
