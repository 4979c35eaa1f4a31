"""A step with its arguments: taken from the store under its key or run, with its progress and its line in the log. Does
not use Prefect."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic

from configs.schema import JobResources, SparkResources, TeacherLimits
from flows.running.spark_progress import watched_jobs
from flows.running.stage_log import StageLog, StageResult, key_figures
from infra.code_digest import refuse_changed_code
from infra.jobs.step_jobs import run_as_job
from infra.machine.executor_errors import executor_errors
from infra.machine.spark import spark_in_use
from infra.step import Artifact, Digested, LogMetrics, Output, Progress, R, Step

if TYPE_CHECKING:
    from pydantic import BaseModel

    from infra.storage.store import Store

Report = Callable[[str, Progress], None]
"""Receives the progress of a step, or of the part of it that the text names."""


@dataclass(frozen=True)
class Computation(Generic[R]):
    """One call of a step."""

    step: Step[R]
    inputs: Mapping[str, Digested | None]
    recipe: BaseModel | None = None
    resources: BaseModel | None = None
    data_files: tuple[str, ...] = ()
    stage: str = ""
    """Its name in logs, where the step runs more than once."""
    job: JobResources | None = None
    """Where its function runs; None: in this process, as on this machine's CPU. A GPU of this machine is free again
    when the process of a job has ended."""

    @property
    def name(self) -> str:
        return self.stage or self.step.name

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The parts of the key."""
        return self.step.identity(self.recipe, self.inputs, self.data_files)

    @property
    def computes_here(self) -> bool:
        """Whether its function computes on this machine, and not in a job on nodes, in executors or at a teacher."""
        where = self.job or self.resources
        if isinstance(where, JobResources):
            return where.launcher == "local"
        if isinstance(where, SparkResources):
            return where.is_local
        return not isinstance(where, TeacherLimits)

    def find_or_run(
        self,
        store: Store,
        report: Report,
        say: Callable[[str], None],
        log_metrics: LogMetrics = lambda rows: None,
        machine: AbstractContextManager[object] | None = None,
    ) -> tuple[Artifact[R], bool]:
        """The artifact, and whether it was in the store already. Spark's jobs report their progress beside the step's
        own. `machine` is held while the step computes here."""
        settings = {"recipe": self.recipe, "resources": self.resources}
        arguments = {**self.inputs, **{name: value for name, value in settings.items() if value is not None}}

        def run(output: Output) -> R:
            record = compute(output)
            refuse_changed_code(self.name, self.step.code_roots, (*self.step.data_files, *self.data_files))
            return record

        def compute(output: Output) -> R:
            if self.job is not None and (self.job.launcher, self.job.device) != ("local", "cpu"):
                return run_as_job(self.step, arguments, self.job, store, self.name, output)
            if not isinstance(self.resources, SparkResources):
                return self.step(**arguments, output=output)
            with spark_in_use(), watched_jobs(report), executor_errors():
                return self.step(**arguments, output=output)

        return store.find_or_compute(
            self.step,
            self.identity,
            run,
            partial(report, ""),
            lambda message: say(f"{self.name}: {message}"),
            log_metrics,
            machine if machine is not None and self.computes_here else nullcontext(),
        )

    def log(self, log: StageLog, started: float, artifact: Artifact[R], is_cached: bool, reason: str) -> None:
        """The line of the finished stage. started: by time.monotonic; reason: why it was computed."""
        why = "found in the store" if is_cached else reason
        seconds = round(time.monotonic() - started, 2)
        log.finish(
            StageResult(self.name, seconds, is_cached, why, artifact.digest, key_figures(artifact.record), artifact.key)
        )
