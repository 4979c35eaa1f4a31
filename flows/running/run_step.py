"""Runs a step or an effect as a Prefect task of its name: progress, retries, states.

Only this module does. Prefect's own caching and result persistence stay off: the manifest in the store is the only
cache, and a hit shows as state Cached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from flows.running.computation import Computation
from flows.running.run import Run
from flows.running.stage_log import StageLog, StageResult
from infra.jobs.launchers import JobLostError
from infra.step import Artifact, Digested, LogMetrics, Progress, R, Step
from infra.storage.rerun_reason import explain_and_remember

if TYPE_CHECKING:
    from uuid import UUID

    from pydantic import BaseModel

    from configs.schema import JobResources


T = TypeVar("T")
UI_INTERVAL_SECONDS = 5.0
EFFECT_RETRIES = 2
EFFECT_RETRY_DELAY_SECONDS = 2
JOB_RETRIES = 100
"""Times that one run submits a step's lost job again: a phase of weeks on thousands of accelerators loses jobs every
day."""
MAX_RETRIES_AT_A_CHECKPOINT = 3
"""Of these, times in a row without a new checkpoint: then the reason, for example memory, does not pass by itself."""


def run_step(
    run: Run,
    step: Step[R],
    *,
    stage: str = "",
    recipe: BaseModel | None = None,
    resources: BaseModel | None = None,
    job: JobResources | None = None,
    data_files: tuple[str, ...] = (),
    log_metrics: LogMetrics = lambda rows: None,
    **inputs: Digested | None,
) -> Artifact[R]:
    """The committed artifact of a step, from the store or computed now. `stage` names it where a step runs more than
    once. `job` says where its function runs, None in this process; a phase, whose ranks are many, asks for them by
    itself."""
    computation = Computation(step, inputs, recipe, resources, data_files, stage, job)
    name = computation.name
    reason = explain_and_remember(run.home, run.scale.scale, name, computation.identity)

    def body() -> Any:
        artifact, is_cached = computation.find_or_run(
            run.store, _progress_reporter(run.log, name), run.log.say, log_metrics, run.machine
        )
        if is_cached:
            return Completed(name="Cached", message=f"committed under key {artifact.key}", data=artifact)
        return Completed(message=f"computed: {reason}", data=artifact)

    started = time.monotonic()
    as_task = task(
        name=name,
        task_run_name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=JOB_RETRIES,
        retry_condition_fn=_lost_its_job(run.log, name),
    )
    with run.log.running(name):
        state = as_task(body)(return_state=True)
    artifact: Artifact[R] = state.result()  # pyright: ignore[reportAssignmentType]
    computation.log(run.log, started, artifact, state.name == "Cached", reason)
    return artifact


def run_effect(run: Run, stage: str, effect: Callable[[], T], describe: Callable[[T], str] = str) -> T:
    """The result of an effect, which always runs, is idempotent and is tried again where a server did not answer."""
    started = time.monotonic()
    as_task = task(
        name=stage,
        task_run_name=stage,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=EFFECT_RETRIES,
        retry_delay_seconds=EFFECT_RETRY_DELAY_SECONDS,
        retry_condition_fn=_is_worth_retrying,
    )
    with run.log.running(stage):
        result = as_task(effect)()
    run.log.finish(StageResult(stage, round(time.monotonic() - started, 2), False, describe(result), "", ""))
    return result


def _is_worth_retrying(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a retry may help: mistakes of the user and broken contracts stay."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, ValueError | AssertionError)


def _lost_its_job(log: StageLog, stage: str) -> Callable[[Any, Any, Any], bool]:
    """Condition of a step's retry: its job was taken away; under the same key it continues. A failed job is not
    repeated."""
    lost_at: list[int] = []

    def is_worth_submitting_again(task: Any, task_run: Any, state: Any) -> bool:
        error = state.result(raise_on_failure=False)
        if not isinstance(error, JobLostError):
            return False
        lost_at.append(error.step)
        times = lost_at.count(error.step)
        if times > MAX_RETRIES_AT_A_CHECKPOINT:
            log.say(f"{stage}: lost {times} times without a new checkpoint: mend the cause, then run again to continue")
            return False
        log.say(f"{error} (retry {len(lost_at)})")
        return True

    return is_worth_submitting_again


def _progress_reporter(log: StageLog, stage: str) -> Callable[[str, Progress], None]:
    """A function that receives the progress of the stage, or of a named part of it, from any thread."""
    artifact_id: UUID | None = None
    shown_at = -UI_INTERVAL_SECONDS
    one_at_a_time = threading.Lock()

    def report(part: str, progress: Progress) -> None:
        nonlocal artifact_id, shown_at
        with one_at_a_time:
            line = log.progress(stage, progress, part)
            if progress.total and time.monotonic() - shown_at >= UI_INTERVAL_SECONDS:
                shown_at = time.monotonic()
                percent = min(100.0 * progress.done / progress.total, 100.0)
                if artifact_id is None:
                    artifact_id = create_progress_artifact(percent, description=line)  # pyright: ignore[reportAssignmentType]
                else:
                    update_progress_artifact(artifact_id, percent, description=line)

    return report
