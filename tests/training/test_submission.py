"""The worlds with which a phase is submitted while nodes go and come: 2, 1 and 2 of them. There are none here; with
real nodes and training: test_phase_on_nodes.py (long)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from configs.schema import TrainingResources
from infra.jobs.follow_job import JobStoppedError, follow
from infra.jobs.launchers import Job, JobHandle, JobLostError, JobState, JobStatus, TooFewNodesError
from infra.step import Output, Progress
from tasks.training.state.job import JOB_FILE, WORLDS_FILE, TrainingJob
from tasks.training.submission import Submission
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.training_inputs import RESOURCES, small_recipe

KEY = "0123abcd"
QUEUE = DEFAULT_QUEUE.model_copy(update={"max_missing_nodes": 1, "patience_minutes": 1e-9})
TWO_NODES = RESOURCES.model_copy(
    update={"launcher": "ssh", "num_ranks": 2, "ranks_per_node": 1, "micro_batch_sequences": 1, "queue": QUEUE}
)
NO_FILES = ("packed", "shards", "validation")
NO_PATHS = (
    "prompts_path",
    "solved_path",
    "pairs_dir",
    "reference_dir",
    "reward_model_dir",
    "tokenizer_path",
    "start_dir",
)


class Nodes:
    """A launcher that has so many nodes; its jobs go through the states that the test gives."""

    def __init__(self, num_usable: int, *states: JobState) -> None:
        self.num_usable, self.states = num_usable, list(states)
        self.submitted: list[Job] = []
        self.num_cancelled = 0

    def submit(self, job: Job) -> JobHandle:
        if job.num_nodes > self.num_usable:
            raise TooFewNodesError("host node2 does not answer", self.num_usable)
        self.submitted.append(job)
        return JobHandle(job.key)

    def poll(self, handle: JobHandle) -> JobStatus:
        return JobStatus(self.states.pop(0), None, None, None, "", (), reason="Resources")

    def cancel(self, handle: JobHandle, grace_seconds: float) -> None:
        self.num_cancelled += 1

    def find(self, key: str) -> JobHandle | None:
        return None


@pytest.fixture
def said() -> list[str]:
    """What stays in the terminal and in Prefect's log."""
    return []


@pytest.fixture
def output(tmp_path, said):
    return Output(tmp_path, "", tmp_path, KEY, lambda progress: None, said.append, lambda rows: None, lambda name: None)


def train_on(nodes: Nodes, output: Output, resources: TrainingResources = TWO_NODES) -> dict:
    """Follow a job of the phase to its end; the job that its ranks read."""
    values = (
        {name: () for name in NO_FILES}
        | dict.fromkeys(NO_PATHS, "")
        | dict.fromkeys(("start_weights_dir", "start_weights_sha256"), "")
    )
    phase = TrainingJob(
        recipe=small_recipe(),
        resources=resources,
        work_dir=str(output.work_dir),
        validation_domains={},
        eos_token_ids=(0,),
        pad_token_id=0,
        **values,
    )
    try:
        follow(nodes, Submission(nodes, phase, output), output, saved_step=lambda: 0)
    except JobLostError:
        assert not nodes.states
    return json.loads((output.work_dir / JOB_FILE).read_text())


def save_checkpoint_of(output: Output, step: int) -> None:
    (output.work_dir / "checkpoints").mkdir(exist_ok=True)
    (output.work_dir / "checkpoints" / "latest").write_text(f"step-{step:09d}")


def test_a_phase_goes_on_with_one_node_of_two_and_uses_the_second_when_it_is_back(output):
    jobs = []
    for num_usable, step, states in ((2, 3, ("running", "lost")), (1, 5, ("lost",)), (2, 6, ("succeeded",))):
        jobs.append(train_on(Nodes(num_usable, *states), output))
        save_checkpoint_of(output, step)
    assert [each["resources"]["num_ranks"] for each in jobs] == [2, 1, 2]
    assert jobs[0]["recipe"] == jobs[1]["recipe"], "the batch and the key are those of the full world"
    assert [json.loads(line) for line in (output.work_dir / WORLDS_FILE).read_text().splitlines()] == [
        {"after_step": 0, "num_nodes": 2, "num_ranks": 2, "why": "all nodes"},
        {"after_step": 3, "num_nodes": 1, "num_ranks": 1, "why": "host node2 does not answer"},
        {"after_step": 5, "num_nodes": 2, "num_ranks": 2, "why": "all nodes"},
    ]


def test_a_job_that_waits_too_long_gives_way_to_one_of_fewer_nodes(output, said):
    nodes = Nodes(2, "queued", "queued", "running", "succeeded")
    assert train_on(nodes, output)["resources"]["num_ranks"] == 1
    assert [job.num_nodes for job in nodes.submitted] == [2, 1] and nodes.num_cancelled == 1
    last = json.loads((output.work_dir / WORLDS_FILE).read_text().splitlines()[-1])
    assert last["why"] == "the job waited for 1e-09 minutes in the queue (Resources)"
    assert said == ["waits in the queue: Resources", f"goes on with 1 of 2 nodes: {last['why']}"], "each once"


def test_a_job_that_waits_on_and_on_says_so_again_with_what_ends_the_wait(output, said, monkeypatch):
    monkeypatch.setattr("infra.jobs.follow_job.REMIND_SECONDS", 0.0)
    shown = []
    everything = replace(output, report=shown.append)
    waiting = Nodes(2, "queued", "queued", "queued", "interrupted")
    full = TWO_NODES.model_copy(update={"queue": DEFAULT_QUEUE})
    with pytest.raises(JobStoppedError, match="was asked to stop"):
        train_on(waiting, everything, full)
    still = (
        f"still waits in the queue after 0 minutes: Resources. `glm46 jobs stop {KEY}` takes it out of the queue; then "
        f"change queue or num_ranks of its resources, and run again; with queue.max_missing_nodes above 0 it would "
        f"begin on fewer nodes"
    )
    assert said == ["waits in the queue: Resources", still, still] and waiting.num_cancelled == 0
    assert shown == [Progress(0, 0, "", "in the queue for 0 minutes: Resources")] * 3
    monkeypatch.setattr("infra.jobs.follow_job.REMIND_SECONDS", 1800.0)
    said.clear()
    train_on(Nodes(2, "queued", "queued", "lost"), everything, full)
    assert said == ["waits in the queue: Resources"], "not again so soon"


def test_without_a_node_the_run_says_which_host_is_missing(output):
    with pytest.raises(TooFewNodesError, match="host node2 does not answer"):
        train_on(Nodes(0), output)
