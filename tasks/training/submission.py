"""Submits the job of a phase with the largest world whose nodes can be had, and keeps evidence of each (worlds.jsonl).

The first try of every start is the full world, so that nodes that are back are used again. Where nodes are missing
(hosts that do not answer, a job that waits in the queue for too long) the next smaller world that the phase allows is
tried. All worlds continue from the same checkpoints.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from infra.jobs.follow_job import JobSubmission
from infra.jobs.launchers import Job, JobHandle, JobStatus, Launcher, TooFewNodesError
from infra.jobs.supervisor import write_json
from infra.step import Output, Progress
from tasks.training.plan.worlds import num_nodes, smaller_worlds
from tasks.training.state.checkpoints import latest_step
from tasks.training.state.job import JOB_FILE, WORLDS_FILE, TrainingJob

if TYPE_CHECKING:
    from configs.schema import TrainingResources

SAVE_SECONDS = 60.0
"""For a job that begins in the moment in which it is given up."""


class Submission(JobSubmission):
    """The job of a phase on its way to nodes; `phase` describes the full world."""

    def __init__(self, launcher: Launcher, phase: TrainingJob, output: Output) -> None:
        self.phase = phase
        self.worlds = [phase.resources, *smaller_worlds(phase.recipe, phase.resources)]
        self._world = phase.resources
        super().__init__(launcher, self._job_on(self.worlds[0], output), output, prepare=self._write)

    def submit(self) -> JobHandle:
        return self._submit(self.worlds, "")

    def wait(self, handle: JobHandle, status: JobStatus) -> JobHandle:
        """As any job; it gives way to one of fewer nodes after the patience."""
        super().wait(handle, status)
        assert self._queued_since is not None, status
        patience_minutes = self.phase.resources.queue.patience_minutes
        smaller = [world for world in self.worlds if world.num_ranks < self._num_ranks()]
        if not smaller or time.monotonic() - self._queued_since < patience_minutes * 60:
            return handle
        self.launcher.cancel(handle, SAVE_SECONDS)
        return self._submit(smaller, f"the job waited for {patience_minutes:g} minutes in the queue ({status.reason})")

    def way_out(self) -> str:
        """As of any job; a phase of several nodes may also begin on fewer."""
        fewer = "; with queue.max_missing_nodes above 0 it would begin on fewer nodes"
        return f"{super().way_out()}{fewer if self.job.num_nodes > 1 and len(self.worlds) == 1 else ''}"

    def describe(self, progress: Progress) -> Progress:
        """With the world, where it is not the full one."""
        full, now = self.phase.resources.num_ranks, self._num_ranks()
        if now == full:
            return progress
        return replace(progress, message=f"{progress.message}, {now} of {full} ranks")

    def _submit(self, worlds: list[TrainingResources], why: str) -> JobHandle:
        self._world, *smaller = worlds
        self.job = self._job_on(self._world, self.output)
        try:
            handle = super().submit()
        except TooFewNodesError as error:
            enough = [each for each in smaller if num_nodes(each) <= error.num_usable]
            if not enough:
                raise
            return self._submit(enough, str(error))
        self._record(self._world, why)
        self._queued_since = None
        return handle

    def _job_on(self, world: TrainingResources, output: Output) -> Job:
        # On a GPU this number would only hold back what is left to the CPU.
        environment = {"OMP_NUM_THREADS": str(self.phase.recipe.num_threads)} if world.device == "cpu" else {}
        return Job(
            output.key,
            "tasks.training.worker",
            (str(output.work_dir / JOB_FILE),),
            world.num_ranks,
            environment,
            num_nodes=num_nodes(world),
            queue=world.queue,
            device=world.device,
            name=f"train {self.phase.recipe.phase}",
        )

    def _write(self) -> None:
        described = self.phase.model_copy(update={"resources": self._world})
        write_json(self.output.work_dir / JOB_FILE, described.model_dump(mode="json"))

    def _record(self, world: TrainingResources, why: str) -> None:
        """One line per world that was submitted, where it is not always the same."""
        if len(self.worlds) == 1:
            return
        line = {
            "after_step": latest_step(self.output.work_dir),
            "num_nodes": num_nodes(world),
            "num_ranks": world.num_ranks,
            "why": why or "all nodes",
        }
        with open(self.output.work_dir / WORLDS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if why:
            self.say(f"goes on with {num_nodes(world)} of {num_nodes(self.phase.resources)} nodes: {why}")

    def _num_ranks(self) -> int:
        """Of the world that was submitted last, maybe by a flow before this one."""
        return json.loads((self.output.work_dir / JOB_FILE).read_text())["resources"]["num_ranks"]
