"""What a run logs to MLflow: inputs with their contracts, parameters once, figures once, an end for every run."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flows.expect_cost import MINUTES, say_cost
from flows.running.run import Run
from flows.running.stage_log import StageLog
from flows.show.track_run import SCALE_TAG, approve_inputs, dataset_input, flattened, log_training_evidence
from flows.stages import choose_stages
from infra.registry import machine_metrics
from infra.registry.experiment_tracking import (
    connect,
    ensure_run,
    finish_run,
    log_evidence,
    log_figures,
    log_inputs,
    log_metrics,
    log_new_parameters,
    resume_run,
    running_runs,
)
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tasks.data.validate_contract import ContractResult
from tests.support.toy_steps import ensure, sum_numbers, write_numbers

EXPERIMENT = "glm46-tracking"


class Trained(Record):
    """Asked for files only."""


@step(content=("hf/*",), evidence=("profile/*", "spikes.jsonl", "logs/*"))
def write_evidence(*, output: Output) -> Trained:
    """The artifact of a phase."""
    for name in ("hf/config.json", "profile/flops.txt", "profile/trace.json", "spikes.jsonl", "logs/rank-0.log"):
        output.path(name).write_text(name)
    return Trained()


@pytest.fixture(scope="module")
def client(mlflow_server):
    return connect(mlflow_server.uri)


def contract_result(store, subject) -> Any:
    """A committed result that names its subject, as the step validate_contract writes it."""
    from infra.step import step
    from tests.support.evaluation_fakes import commit

    @step(content=("findings.json",))
    def validate_contract(*, subject, output: Output) -> ContractResult:
        output.path("findings.json").write_text("[]")
        return ContractResult(contract="numbers", num_rows=20, num_expectations=3)

    return commit(store, validate_contract, subject=subject)


def toy_run(mlflow_server, home, run_id="") -> Run:
    from configs.load import load_scale

    return Run(load_scale("micro"), home, open_store(None, home), mlflow_server.uri, run_id, StageLog())


def test_an_input_without_the_result_of_its_own_contract_stops_the_run(mlflow_server, home):
    run = toy_run(mlflow_server, home)
    numbers = ensure(run.store, write_numbers)
    total = ensure(run.store, sum_numbers, numbers=numbers)
    with pytest.raises(ValueError, match=r"numbers \(.*\) may not be trained on: its contract has no result"):
        approve_inputs(run, {"numbers": (numbers, None)})
    with pytest.raises(ValueError, match=r"total .* a result for " + numbers.digest[:12]):
        approve_inputs(run, {"total": (total, contract_result(run.store, numbers))})


def test_inputs_carry_whole_digests_and_contract_results(mlflow_server, client, home):
    run_id = ensure_run(client, EXPERIMENT, "inputs", "key-inputs", None, {})
    run = toy_run(mlflow_server, home, run_id)
    numbers = ensure(run.store, write_numbers)
    entry = dataset_input(run, "numbers", numbers, contract_result(run.store, numbers))
    log_inputs(client, run_id, [entry])
    log_inputs(client, run_id, [entry])
    (logged,) = client.get_run(run_id).inputs.dataset_inputs
    tags = {tag.key: tag.value for tag in logged.tags}
    assert logged.dataset.name == "numbers" and numbers.digest.startswith(logged.dataset.digest)
    assert tags["glm46.digest"] == numbers.digest and tags["glm46.contract"] == "numbers: 20 rows met 3 expectations"
    assert json.loads(logged.dataset.profile) == {"num_lines": 20}


def test_parameters_are_logged_once_figures_once_each_and_metrics_by_step(client):
    run_id = ensure_run(client, EXPERIMENT, "parameters", "key-parameters", None, {})
    tree = {"scale": "x", "phases": [{"name": "sft", "seed": 1}], "bounds": [1, 2], "long": "y" * 9000}
    assert flattened(tree) == {
        "scale": "x",
        "phases.sft.name": "sft",
        "phases.sft.seed": "1",
        "bounds": "[1, 2]",
        "long": "y" * 9000,
    }
    log_new_parameters(client, run_id, flattened(tree))
    log_new_parameters(client, run_id, {"scale": "other"})
    for accuracy in (0.7, 0.5, 0.5):
        log_figures(client, run_id, {"accuracy": accuracy, "loss_of_all": 2.0})
    log_metrics(client, run_id, [(number, {"loss": float(number), "rate": 1.0}) for number in range(700)])
    logged = client.get_run(run_id).data
    assert logged.params["scale"] == "x" and len(logged.params["long"]) == 500
    history = {name: client.get_metric_history(run_id, name) for name in ("accuracy", "loss_of_all")}
    assert logged.metrics["accuracy"] == 0.5, "of the last evaluation, though it is lower"
    assert [len(points) for points in history.values()] == [2, 1]
    assert [point.value for point in client.get_metric_history(run_id, "loss")] == [
        float(number) for number in range(700)
    ]


def test_a_run_that_ended_goes_on_and_ends_again(client, tmp_path):
    run_id = ensure_run(client, EXPERIMENT, "status", "key-status", None, {"glm46.flow_run": "f"})
    assert running_runs(client, "glm46.flow_run")[run_id] == "f"
    by_page = client.search_runs
    client.search_runs = lambda *given, **named: by_page(*given, max_results=1, **named)
    try:
        assert run_id in running_runs(client, "glm46.flow_run"), "of all pages"
    finally:
        del client.search_runs
    finish_run(client, run_id, "KILLED")
    assert run_id not in running_runs(client, "glm46.flow_run")
    resume_run(client, run_id)
    assert run_id in running_runs(client, "glm46.flow_run")
    (tmp_path / "report.html").write_text("<p>report</p>")
    log_evidence(client, run_id, [tmp_path / "report.html"], "evidence")
    assert [entry.path for entry in client.list_artifacts(run_id, "evidence")] == ["evidence/report.html"]
    finish_run(client, run_id, "FINISHED")
    assert client.get_run(run_id).info.status == "FINISHED"


def test_the_cost_of_a_run_is_that_of_the_last_one_of_the_same_stages(client, mlflow_server, home):
    said: list[str] = []

    def begin(key: str, until: str | None) -> str:
        run_id = ensure_run(client, EXPERIMENT, key, key, None, {SCALE_TAG: "micro"})
        run = replace(toy_run(mlflow_server, home, run_id), log=StageLog(forward=said.append))
        say_cost(run, choose_stages(run.scale, None, None, until))
        return run_id

    first = begin("key-cost-1", None)
    assert " of training on 131,072 tokens, at a speed that is assumed; " in said[-1]
    log_figures(client, first, {MINUTES: 3.5})
    begin("key-cost-2", None)
    assert said[-1].startswith("expect 3.5 minutes, as the run of ") and "computed everything" in said[-1]
    begin("key-cost-3", "sft")
    assert "at a speed that is assumed" in said[-1], "no run of these stages is known"
    begin("key-cost-4", "prepare_data")
    assert len(said) == 3, "nothing is planned for data"


def test_the_machine_is_logged_from_the_first_row_on_and_of_a_phase_in_the_store_never(
    client, mlflow_server, monkeypatch
):
    monkeypatch.setattr(machine_metrics, "SAMPLING_SECONDS", 0.1)
    trained, stored = (ensure_run(client, EXPERIMENT, name, f"key-{name}", None, {}) for name in ("trained", "stored"))
    deadline = time.monotonic() + 60
    with machine_metrics.logging_machine(mlflow_server.uri, trained, partial(log_metrics, client, trained)) as log:
        log([(1, {"loss": 2.0})])
        while not any(name.startswith("system/") for name in client.get_run(trained).data.metrics):
            assert time.monotonic() < deadline, "the monitor logged nothing"
            time.sleep(0.2)
    logged = client.get_run(trained).data.metrics
    wanted = {"cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage"}
    assert logged["loss"] == 2.0 and {f"system/{name}" for name in wanted} <= logged.keys()
    with machine_metrics.logging_machine(mlflow_server.uri, stored, partial(log_metrics, client, stored)):
        time.sleep(0.5)
    assert client.get_run(stored).data.metrics == {}
    assert not [each for each in threading.enumerate() if each.name == "SystemMetricsMonitor"], "it has ended"


def test_profile_and_spikes_of_a_phase_become_artifacts_of_its_run(client, mlflow_server, home):
    from tests.support.evaluation_fakes import commit

    artifact = commit(toy_run(mlflow_server, home).store, write_evidence)
    run_id = ensure_run(client, EXPERIMENT, "evidence", "key-evidence", None, {})
    log_training_evidence(client, run_id, artifact)
    assert sorted(entry.path for entry in client.list_artifacts(run_id, "evidence")) == [
        "evidence/profile",
        "evidence/spikes.jsonl",
    ]
    assert len(client.list_artifacts(run_id, "evidence/profile")) == 2
