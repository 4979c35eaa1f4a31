"""Steps as jobs: by the launcher of this machine, on a host reached by ssh, and on Slurm (long)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from configs.load import load_scale
from configs.schema import EvaluationResources, Frozen, JobResources
from flows.running.computation import Computation
from infra.home import Home
from infra.jobs.follow_job import JobStoppedError
from infra.jobs.launchers import JobFailedError, JobHandle, JobLostError
from infra.jobs.open_launcher import launcher_of
from infra.jobs.step_jobs import Argument, Call, run_as_job, run_call
from infra.jobs.supervisor import read_job_file
from infra.step import Artifact, Output, Record, step
from infra.storage.open_store import open_store
from infra.storage.store import step_key
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.generate_reference import generate_reference
from tests.conftest import ROOT
from tests.infra.test_launcher import wait_for
from tests.support.cluster import slurm, ssh_hosts
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.evaluation_fakes import RECIPE, checkpoint, commit, evaluation_suite

HERE = JobResources(launcher="local", device="cpu", queue=DEFAULT_QUEUE)
RELEASE = load_scale("micro").release.recipe.model_copy(update={"gguf_types": ("F32", "Q8_0")})
CLUSTERS = {
    "ssh": (ssh_hosts.missing_programs, ssh_hosts.ssh_hosts, "ssh.json"),
    "slurm": (slurm.missing_programs, slurm.slurm_cluster, "job.sbatch"),
}


FLOW = """
import pathlib, sys
from tests.infra import test_step_jobs as tests
store = tests.open_store(None, tests.Home(pathlib.Path(sys.argv[1])))
tests.compute_here(store, tests.pass_gate, tests.HERE, numbers=None, recipe=tests.GateRecipe(gate=sys.argv[2]))
"""


class GateRecipe(Frozen):
    """What the toy step waits for, and how it ends."""

    gate: str
    error: str = ""


class Passed(Record):
    num_starts: int


@step(content=("starts.txt",))
def pass_gate(*, numbers: Artifact[Passed] | None, recipe: GateRecipe, output: Output) -> Passed:
    """Writes which starts of its job there were; waits for a file."""
    assert numbers is None
    starts = output.work_dir / "starts"
    starts.write_text((starts.read_text() if starts.exists() else "") + f"{os.getpid()} ")
    output.path("starts.txt").write_text("passed")
    while not Path(recipe.gate).exists():
        time.sleep(0.02)
    if recipe.error:
        raise ValueError(recipe.error)
    return Passed(num_starts=1)


@pytest.fixture
def store(home):
    return open_store(None, home)


@contextmanager
def nodes(launcher: str, root: Path, **resources):
    """Resources that name a launcher, and its nodes while the block runs."""
    missing_programs, start_cluster, _ = CLUSTERS[launcher]
    if reason := missing_programs():
        pytest.skip(reason)
    with start_cluster(root) as cluster:
        queue = DEFAULT_QUEUE.model_copy(update={"hostfile": str(root / "hostfile")})
        yield cluster, JobResources(launcher=launcher, device="cpu", queue=queue)  # pyright: ignore[reportArgumentType]


def compute(store, computed, job: JobResources, report=lambda part, progress: None, **given) -> Artifact:
    """As flows/running/run_step.py does, without Prefect."""
    inputs = {name: value for name, value in given.items() if name not in ("recipe", "resources")}
    settings = {name: value for name, value in given.items() if name in ("recipe", "resources")}
    return Computation(computed, inputs, **settings, job=job).find_or_run(store, report, print)[0]


def compute_here(store, computed, job: JobResources, **given) -> Artifact:
    """As a job of this machine, which a section never asks for: there the step runs in the flow's process."""
    inputs = {name: value for name, value in given.items() if name != "recipe"}

    def run(output: Output) -> Record:
        return run_as_job(computed, given, job, store, "pass the gate", output)

    identity = computed.identity(given.get("recipe"), inputs)
    return store.find_or_compute(computed, identity, run, lambda progress: None, print)[0]


def work_dir_of(home: Home, gate: Path) -> Path:
    identity = pass_gate.identity(GateRecipe(gate=str(gate)), {"numbers": None})
    return home.work_dir(step_key(identity))


def pids(work_dir: Path) -> list[int]:
    path = work_dir / "starts"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


@contextmanager
def meanwhile(act):
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_a_lost_job_begins_again_a_stopped_one_too_and_nothing_of_them_is_left(store, home, tmp_path):
    gate = tmp_path / "gate"
    work_dir, given = work_dir_of(home, gate), {"numbers": None, "recipe": GateRecipe(gate=str(gate))}

    def kill() -> None:
        os.kill(wait_for(lambda: pids(work_dir))[0], signal.SIGKILL)

    with meanwhile(kill), pytest.raises(JobLostError, match=r"pass the gate was lost: .* continues from its beginning"):
        compute_here(store, pass_gate, HERE, **given)

    def stop() -> None:
        wait_for(lambda: len(pids(work_dir)) == 2)
        launcher_of(work_dir.name, home.work_root).cancel(JobHandle(work_dir.name), grace_seconds=20)

    with meanwhile(stop), pytest.raises(JobStoppedError, match="pass the gate was asked to stop"):
        compute_here(store, pass_gate, HERE, **given)

    with meanwhile(lambda: (wait_for(lambda: len(pids(work_dir)) == 3), gate.touch())):
        passed = compute_here(store, pass_gate, HERE, **given)
    expected = commit(store, pass_gate, **given)
    assert (passed.digest, set(passed.manifest.content)) == (expected.digest, {"starts.txt"})
    assert "== start 3" in passed.path("job/rank-0.log").read_text() and not work_dir.exists()


def test_a_flow_that_is_killed_finds_its_job_again(store, home, tmp_path):
    gate = tmp_path / "gate"
    work_dir = work_dir_of(home, gate)
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(home.root), str(gate)], cwd=ROOT)
    wait_for(lambda: pids(work_dir), seconds=60)
    flow.kill()
    flow.wait()
    with meanwhile(gate.touch):
        passed = compute_here(store, pass_gate, HERE, numbers=None, recipe=GateRecipe(gate=str(gate)))
    log = passed.path("job/rank-0.log").read_text()
    assert "== start 1" in log and "== start 2" not in log


def test_a_mistake_is_one_sentence_and_a_store_that_a_node_does_not_see_has_its_fix(store, home, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    recipe = GateRecipe(gate=str(gate), error="num_documents is 0: give documents")
    with pytest.raises(JobFailedError, match="pass the gate failed: rank 0 ended with exit code 1") as failed:
        compute_here(store, pass_gate, HERE, numbers=None, recipe=recipe)
    assert str(failed.value).splitlines()[-1].strip() == recipe.error
    elsewhere = Call(home=str(home.root), store=str(tmp_path / "elsewhere"), key="0", arguments={})
    with pytest.raises(ValueError, match=r"does not see what store .*elsewhere holds: name a directory that all nodes"):
        run_call(pass_gate, elsewhere, tmp_path, 1)


def test_a_job_that_reads_a_store_writes_nothing_there(store, home, tmp_path):
    (tmp_path / "gate").touch()
    recipe = Argument(type=f"{__name__}:GateRecipe", settings={"gate": str(tmp_path / "gate")})
    call = Call(home=str(home.root), store=store.uri, key="0", arguments={"numbers": None, "recipe": recipe})
    before = (store.root / "manifests").stat().st_mtime_ns
    run_call(pass_gate, call, tmp_path, 1)
    assert (store.root / "manifests").stat().st_mtime_ns == before


def test_evaluation_conversion_and_reference_as_jobs_by_ssh_equal_those_of_this_process(store, tmp_path):
    model, suite, shown = checkpoint(store, "trained"), evaluation_suite(store), []
    with nodes("ssh", tmp_path / "ssh") as (_, job):
        resources = EvaluationResources(**job.model_dump(), batch_sequences=4, rollout_server="")
        asked = RELEASE.reference_recipe()
        calls = [
            (evaluate_checkpoint, {"checkpoint": model, "suite": suite, "recipe": RECIPE, "resources": resources}),
            (convert_to_gguf, {"checkpoint": model, "recipe": RELEASE.conversion_recipe()}),
            (generate_reference, {"checkpoint": model, "suite": suite, "recipe": asked, "resources": job}),
        ]
        for computed, given in calls:
            as_job = compute(store, computed, job, lambda part, progress: shown.append(progress.unit), **given)
            here = commit(store, computed, **given)
            assert (as_job.digest, as_job.record) == (here.digest, here.record), computed.name
            assert "node1" in as_job.path("job/ssh.json").read_text() and not here.manifest.evidence
    assert "tokens" in shown, "progress of the job is that of the stage"
    on_gpu = HERE.model_copy(update={"device": "cuda"})
    given = {"checkpoint": model, "suite": suite, "recipe": asked.model_copy(update={"smoke_new_tokens": 1})}
    if not torch.cuda.is_available():
        with pytest.raises(JobFailedError, match=r"no CUDA device on .*: set device to cpu, or launcher to one that"):
            compute(store, generate_reference, on_gpu, resources=on_gpu, **given)


@pytest.mark.long
@pytest.mark.parametrize("launcher", CLUSTERS)
def test_an_evaluation_that_loses_its_node_runs_again_and_has_the_digest_of_this_process(launcher, store, tmp_path):
    model, suite = checkpoint(store, "trained"), evaluation_suite(store)
    with nodes(launcher, tmp_path / launcher) as (cluster, job):
        resources = EvaluationResources(**job.model_dump(), batch_sequences=4, rollout_server="")
        given = {"checkpoint": model, "suite": suite, "recipe": RECIPE, "resources": resources}
        inputs = {"checkpoint": model, "suite": suite}
        work_dir = store.home.work_dir(step_key(evaluate_checkpoint.identity(RECIPE, inputs)))

        def kill_node() -> None:
            wait_for(lambda: list(work_dir.glob("output-1/files")), seconds=120)
            cluster.kill_node("node1")

        with meanwhile(kill_node), pytest.raises(JobLostError, match="continues from its beginning"):
            compute(store, evaluate_checkpoint, job, **given)
        cluster.start_node("node1")
        as_job = compute(store, evaluate_checkpoint, job, **given)
    assert as_job.digest == commit(store, evaluate_checkpoint, **given).digest
    assert read_job_file(work_dir) is None and as_job.path(f"job/{CLUSTERS[launcher][2]}").read_text()
