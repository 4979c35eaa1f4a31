"""Branches of a flow: in order on this machine, at the same time where they compute elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prefect import flow

from configs.load import load_scale
from configs.schema import Frozen, JobResources
from flows.release_model import convert_and_quantize
from flows.running.branches import Branches
from flows.running.computation import Computation
from flows.running.run import Run
from flows.running.run_step import run_step
from flows.running.stage_log import StageLog
from infra.machine import spark
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tests.support.cluster.default_queue import DEFAULT_QUEUE

MEETING_SECONDS = 60
HERE = JobResources(launcher="local", device="cpu", queue=DEFAULT_QUEUE)
NODES = HERE.model_copy(update={"launcher": "ssh"})
meeting = threading.Barrier(2, timeout=MEETING_SECONDS)
working: list[str] = []
"""Names of the toy steps that compute now."""


class Toy(Frozen):
    name: str
    meets: bool


class Done(Record):
    name: str
    most_at_once: int


@step(content=("done.txt",))
def work(*, recipe: Toy, output: Output) -> Done:
    """Waits for the other step, where it meets it; else sees how many compute at the same time."""
    working.append(recipe.name)
    if recipe.meets:
        meeting.wait()
    most = max(len(working) for _ in range(1000))
    output.path("done.txt").write_text(recipe.name)
    working.remove(recipe.name)
    return Done(name=recipe.name, most_at_once=most)


@pytest.fixture(scope="module")
def prefect_server():
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def run(home):
    lines: list[str] = []
    run = Run(load_scale("micro"), home, open_store(None, home), "", "", StageLog(lines.append))
    return SimpleNamespace(run=run, lines=lines)


def as_job(monkeypatch):
    """Jobs on nodes, without nodes: their functions run in the thread that would follow the job."""
    calls = lambda step, arguments, resources, store, name, output: step(**arguments, output=output)  # noqa: E731
    monkeypatch.setattr("flows.running.computation.run_as_job", calls)


def two_steps(run: Run, job: JobResources, *, meet: bool, are_side_by_side: bool = True) -> list[Done]:
    """The records of two toy steps in two branches of a flow."""

    @flow(name="toy", validate_parameters=False)
    def both() -> list[Done]:
        with Branches(run, are_side_by_side=are_side_by_side) as branches:
            begun = [
                branches.begin(
                    name, lambda name=name: run_step(run, work, stage=name, recipe=Toy(name=name, meets=meet), job=job)
                )
                for name in ("left", "right")
            ]
        return [future.result().record for future in begun]

    return both()


def test_jobs_on_nodes_run_at_the_same_time_and_steps_of_this_machine_one_after_the_other(
    run, prefect_server, monkeypatch
):
    as_job(monkeypatch)
    assert [done.name for done in two_steps(run.run, NODES, meet=True)] == ["left", "right"]
    assert {result.name for result in run.run.log.results} == {"left", "right"}
    assert [done.most_at_once for done in two_steps(run.run, HERE, meet=False)] == [1, 1]
    in_order = two_steps(run.run, HERE, meet=False, are_side_by_side=False)
    assert [done.name for done in in_order] == ["left", "right"]
    assert [(each.name, each.cached) for each in run.run.log.results[-2:]] == [("left", True), ("right", True)]


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_formats_suite_and_reference_of_a_release_are_computed_at_the_same_time_on_nodes(launcher, run, monkeypatch):
    """By the span of each step: on nodes every branch has begun before one of them ends, here each ends before the next
    begins."""
    scale = run.run.scale
    resources = scale.release.resources.model_copy(update={"launcher": launcher})
    scale = scale.model_copy(update={"release": scale.release.model_copy(update={"resources": resources})})
    firsts = ("convert_to_gguf", "generate_reference", "quantize FP8_DYNAMIC", "quantize GPTQ_W4A16", "suite")
    all_begun = threading.Barrier(len(firsts), timeout=MEETING_SECONDS)
    spans: list[tuple[str, str]] = []

    def compute(run, step, *, stage="", benchmarks=None, **arguments):
        name = stage or step.name
        spans.append(("begins", name))
        if launcher == "slurm" and name in firsts:
            all_begun.wait()
        spans.append(("ends", name))
        return SimpleNamespace(name=name, record=None, benchmarks=benchmarks)

    for module in ("release_model", "quantize_model"):
        monkeypatch.setattr(f"flows.{module}.run_step", compute)
    monkeypatch.setattr("flows.quantize_model.calibration_texts", lambda run, prepared: {})
    monkeypatch.setattr("flows.release_model.calibration_texts", lambda run, prepared: {})
    assessed = SimpleNamespace(checkpoint="checkpoint", evaluation="evaluation")
    prepared = SimpleNamespace(suite="suite")
    on_nodes = replace(run.run, scale=scale)
    with Branches(on_nodes, are_side_by_side=launcher == "slurm") as branches:
        suite = branches.begin("suite", lambda: compute(on_nodes, None, stage="suite"))
        formats = convert_and_quantize(on_nodes, prepared, assessed, suite)
    names = [f"{kind} {name}" for kind in ("quantize", "evaluate") for name in formats.quantized]
    assert {*names, *firsts, "evaluate_gguf"} <= {name for _, name in spans}
    assert all(model.evaluation.benchmarks is suite.result() for model in formats.quantized.values())
    opened = [sum((kind == "begins") - (kind == "ends") for kind, _ in spans[:end]) for end in range(len(spans))]
    assert max(opened) == (len(firsts) if launcher == "slurm" else 1)


def test_what_computes_here_is_known_from_its_resources():
    micro = load_scale("micro")
    cluster = micro.data.resources.model_copy(update={"master": "spark://host:7077"})
    slurm = micro.phases[0].resources.model_copy(update={"launcher": "slurm"})
    teacher = micro.data.recipe.teacher.limits
    cases = {
        True: ((None, None), (HERE, None), (None, micro.data.resources), (None, micro.phases[0].resources)),
        False: ((NODES, HERE), (None, cluster), (None, slurm), (None, teacher)),
    }
    for expected, given in cases.items():
        for job, resources in given:
            assert Computation(work, {}, None, resources, job=job).computes_here is expected, (job, resources)


def test_a_branch_that_fails_is_named_at_once_and_the_others_run_to_their_end(run):
    failed, finished = threading.Event(), []

    def go_on() -> None:
        assert failed.wait(MEETING_SECONDS)
        finished.append("slow")

    def fail() -> None:
        raise ValueError("no documents\nname some with --data")

    with pytest.raises(ValueError, match="no documents"), Branches(run.run, are_side_by_side=True) as branches:
        branches.begin("slow", go_on)
        failing = branches.begin("failing", fail)
        waiting = branches.begin("waiting", lambda: failing.result())
        while not run.lines:
            pass
        failed.set()
    assert run.lines[0] == "failing failed: no documents. What runs beside it goes on; the next run finds it"
    assert finished == ["slow"] and len(run.lines) == 1, "who waited for it says nothing of its own"
    assert waiting.exception() is failing.exception()


def test_an_interruption_waits_for_no_branch(run):
    over = threading.Event()
    with pytest.raises(KeyboardInterrupt), Branches(run.run, are_side_by_side=True) as branches:
        endless = branches.begin("endless", lambda: over.wait(MEETING_SECONDS))
        raise KeyboardInterrupt
    assert not endless.done() and not run.lines
    over.set()


def test_on_this_machine_nothing_begins_after_a_failure(run):
    begun = []
    with pytest.raises(ZeroDivisionError), Branches(run.run, are_side_by_side=False) as branches:
        branches.begin("first", lambda: begun.append("first"))
        branches.begin("second", lambda: 1 // 0)
        branches.begin("third", lambda: begun.append("third"))
    assert begun == ["first"]


def test_spark_that_another_branch_uses_is_stopped_when_it_is_free(monkeypatch):
    stopped = []
    monkeypatch.setattr(spark, "_stop", lambda: stopped.append(spark._num_users))
    with spark.spark_in_use():
        with spark.spark_in_use():
            spark.stop_spark()
        assert not stopped
    assert stopped == [0]
    spark.stop_spark()
    assert stopped == [0, 0]
