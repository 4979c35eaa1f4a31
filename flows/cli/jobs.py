"""`glm46 jobs`: jobs of this home, which run detached and outlive the run that started them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from infra.home import Home
from infra.jobs.launchers import JobHandle, JobState, job_keys
from infra.jobs.open_launcher import launcher_of
from infra.jobs.scheduled_jobs import NoAnswerError
from infra.jobs.supervisor import read_command, read_job_file

KEY_DIGITS = 12
"""Number of digits of a step key that the commands print."""
GRACE_SECONDS = 120
"""Seconds in which a job may finish its optimizer step and save."""


@dataclass(frozen=True)
class DetachedJob:
    """A job that was submitted and whose work is not committed yet."""

    key: str
    stage: str
    state: JobState | Literal["unknown"]
    """Unknown where its scheduler does not answer."""
    started: str
    directory: Path

    @property
    def short_key(self) -> str:
        return self.key[:KEY_DIGITS]

    def describe(self) -> str:
        return f"{self.short_key}  {self.stage:<30} {self.state:<12} {self.started}  {self.directory}"


def list_jobs(home: Home) -> list[DetachedJob]:
    """Jobs of this home in the order of their start; those that a scheduler has not started come first."""
    jobs = []
    for key in job_keys(home.work_root):
        directory = home.work_dir(key)
        with suppress(FileNotFoundError):  # committed at this moment, its directory removed
            stage = read_command(directory).name
            job = read_job_file(directory)
            state = _state(home, key)
            started = "" if job is None else f"{datetime.fromtimestamp(job.started_at):%Y-%m-%d %H:%M:%S}"
            jobs.append(DetachedJob(key, stage, state, started, directory))
    return sorted(jobs, key=lambda job: job.started)


def _state(home: Home, key: str) -> JobState | Literal["unknown"]:
    try:
        return launcher_of(key, home.work_root).poll(JobHandle(key)).state
    except (NoAnswerError, OSError):  # no such command on this machine
        if not home.work_dir(key).is_dir():
            raise FileNotFoundError(home.work_dir(key)) from None
        return "unknown"


def running_jobs(home: Home) -> list[DetachedJob]:
    """The jobs that run now or wait in a queue, and those that may."""
    return [job for job in list_jobs(home) if job.state in ("queued", "stuck", "running", "unknown")]


def say_running_jobs(home: Home) -> None:
    """Names them at the start of a run: what was started with other settings takes its cores, and nobody waits for
    it."""
    for job in running_jobs(home):
        print(
            f"{job.stage} ({job.short_key}) of another run goes on: this run joins it if it needs the same; if no run "
            f"does, `glm46 jobs stop {job.short_key}` lets it save and end",
            file=sys.stderr,
        )


def stop_jobs(home: Home, key: str | None) -> list[DetachedJob]:
    """Let the running jobs whose key begins with `key`, or all, save and end at the same time; returns them in their
    new state. Raises ValueError if none runs, NoAnswerError that names those whose scheduler does not answer."""
    chosen = [job for job in running_jobs(home) if key is None or job.key.startswith(key)]
    if not chosen:
        raise ValueError(
            f"no job{'' if key is None else f' with key {key}'} runs: `glm46 jobs list` shows those there are"
        )
    with ThreadPoolExecutor(len(chosen)) as threads:
        stops = {job.short_key: threads.submit(_cancel, home, job.key) for job in chosen}
    unanswered = {key: error for key, stop in stops.items() if isinstance(error := stop.exception(), NoAnswerError)}
    if unanswered:
        said = "; ".join(f"{key}: {error}" for key, error in unanswered.items())
        raise NoAnswerError(f"not stopped, run `glm46 jobs stop` again: {said}")
    for stop in stops.values():
        stop.result()
    keys = {job.key for job in chosen}
    return [job for job in list_jobs(home) if job.key in keys]


def _cancel(home: Home, key: str) -> None:
    launcher_of(key, home.work_root).cancel(JobHandle(key), GRACE_SECONDS)
