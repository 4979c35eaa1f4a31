"""A run of the command line whose phases, evaluation and release are jobs of Slurm; what is done to it meanwhile."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.load import load_scale
from infra.jobs.supervisor import read_command
from tasks.training.state.checkpoints import latest_step
from tests.conftest import ROOT
from tests.support.cluster.slurm import SlurmCluster
from tests.support.pipeline import Finished, command, environment

PATIENCE_SECONDS = 900
"""For a stage to come so far."""


def write_slurm_scale(scale: str, path: Path, **first_phase: Any) -> Path:
    """Write a scale whose jobs go to Slurm; first_phase: more of the resources of its first phase, also `queue`."""
    tree = load_scale(scale).model_dump(mode="json")
    for section in (*tree["phases"], tree["evaluation"], tree["release"]):
        section["resources"] |= {"launcher": "slurm"}
        section["resources"]["queue"] |= {"time_limit_minutes": 60}
    resources = tree["phases"][0]["resources"]
    queue = first_phase.pop("queue", {})
    resources |= first_phase
    resources["queue"] |= queue
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@dataclass
class Disturbances:
    """What is done to a run, each as soon as a stage has come so far; `done` names those that were done."""

    home: Path
    cluster: SlurmCluster
    done: list[str] = field(default_factory=list)

    def work_dir(self, stage: str) -> Path | None:
        """Of the stage's job, None while it has none."""
        for path in (self.home / "work").glob("*/command.json"):
            try:
                if read_command(path.parent).name == stage:
                    return path.parent
            except FileNotFoundError:  # it was committed at this moment
                continue
        return None

    def after_step(self, stage: str, step: int, number: int = 1) -> Path:
        """Wait until the phase has a checkpoint of this step and runs as its `number`th job; its work directory."""

        def reached() -> Path | None:
            work_dir = self.work_dir(stage)
            if work_dir is None or latest_step(work_dir) < step or len(list(work_dir.glob("slurm-*.log"))) < number:
                return None
            return work_dir

        return wait_for_value(reached)

    def scancel(self, work_dir: Path, *options: str) -> None:
        subprocess.run(["scancel", *options, slurm_job(work_dir)], check=True)

    def requeue(self, work_dir: Path) -> None:
        """As an administrator does; Slurm would let the job wait for two minutes."""
        job = slurm_job(work_dir)
        subprocess.run(["scontrol", "update", f"jobid={job}", "requeue=1"], check=True)
        subprocess.run(["scontrol", "requeue", job], check=True)
        wait_for_value(lambda: "JobState=PENDING" in shown_job(job))
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=True)


def slurm_job(work_dir: Path) -> str:
    return json.loads((work_dir / "submission.json").read_text())["job"]


def shown_job(job: str) -> str:
    return subprocess.run(["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True).stdout


def wait_for_value(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.05)
    return value


def run_disturbed(*arguments: str, home: Path, disturb: Callable[[], None], timeout: float = 3600) -> Finished:
    """Run a command to its end while `disturb` does something to it; what fails there fails here."""
    failures: list[BaseException] = []

    def act() -> None:
        try:
            disturb()
        except BaseException as error:
            failures.append(error)

    run = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    stdout, stderr = run.communicate(timeout=timeout)
    acting.join(timeout=60)
    assert not failures, (failures, stderr)
    assert not acting.is_alive(), f"it ended before everything was done to it:\n{stderr}"
    return Finished(run.returncode, stdout, stderr)
