"""Follows a job to its end, whoever submitted it: a flow that is killed and started again finds it by its key."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from infra.jobs.launchers import Job, JobFailedError, JobHandle, JobLostError, JobStatus, Launcher
from infra.jobs.scheduled_jobs import NAME_DIGITS, NO_ANSWER_SECONDS, NoAnswerError, StaysAwayError
from infra.step import Output, Progress

POLL_SECONDS = 0.2
REMIND_SECONDS = 1800.0
"""Between two sentences on a job that still waits in the queue."""
ASK_AGAIN_SECONDS = 5.0
NO_REASON = "the scheduler names no reason"


Answer = TypeVar("Answer")


class JobStoppedError(RuntimeError):
    """The job did not fail and did not end: run again to continue."""


class JobSubmission:
    """A job on its way to nodes. `prepare` writes what it reads, before it is submitted."""

    def __init__(self, launcher: Launcher, job: Job, output: Output, prepare: Callable[[], None]) -> None:
        self.launcher, self.job, self.output = launcher, job, output
        self._prepare = prepare
        self._reasons: set[str] = set()
        self._queued_since: float | None = None
        self._reminded_at = 0.0

    def find_or_submit(self) -> JobHandle:
        """The job that runs or has succeeded, else a new one."""
        handle = self.launcher.find(self.job.key)
        if handle is not None and self.launcher.poll(handle).state in ("queued", "running", "succeeded"):
            return handle
        return self.submit()

    def submit(self) -> JobHandle:
        self._prepare()
        return self.launcher.submit(self.job)

    def wait(self, handle: JobHandle, status: JobStatus) -> JobHandle:
        """Say each reason for which a job is in the queue once, and again and again that it still waits; the job that
        is to be followed from here on. No time ends the wait, as the job would lose its place in the queue."""
        now = time.monotonic()
        if self._queued_since is None:
            self._queued_since = self._reminded_at = now
        minutes = f"{(now - self._queued_since) / 60:.0f} minutes"
        self.output.report(Progress(0, 0, "", f"in the queue for {minutes}: {status.reason or NO_REASON}"))
        if status.reason and status.reason not in self._reasons:
            self._reasons.add(status.reason)
            self.say(f"waits in the queue: {status.reason}")
        elif now - self._reminded_at >= REMIND_SECONDS:
            self._reminded_at = now
            self.say(f"still waits in the queue after {minutes}: {status.reason or NO_REASON}. {self.way_out()}")
        return handle

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What a scheduler answers; one that does not is asked again. Raises StaysAwayError after
        NO_ANSWER_SECONDS."""
        asked_at, words = time.monotonic(), ""
        while True:
            try:
                return question()
            except StaysAwayError:
                raise
            except NoAnswerError as error:
                if time.monotonic() - asked_at >= NO_ANSWER_SECONDS:
                    raise StaysAwayError(str(error)) from error
                if words != (words := str(error)):
                    self.say(f"{words}; it is asked again for {NO_ANSWER_SECONDS / 60:.0f} minutes")
                time.sleep(ASK_AGAIN_SECONDS)

    def way_out(self) -> str:
        """What ends the wait for a job whose reason does not pass."""
        return (
            f"`glm46 jobs stop {self.job.key[:NAME_DIGITS]}` takes it out of the queue; then change queue or num_ranks "
            f"of its resources, and run again"
        )

    def describe(self, progress: Progress) -> Progress:
        """The job's progress as it is reported."""
        return progress

    def say(self, message: str) -> None:
        self.output.say(message)


def follow(
    launcher: Launcher,
    submission: JobSubmission,
    output: Output,
    *,
    look: Callable[[bool], None] = lambda is_last: None,
    saved_step: Callable[[], int] = lambda: 0,
) -> None:
    """Submit the job or find it, and report its progress until it succeeds.

    look: called at each poll, is told the last. saved_step: where a lost job continues. Raises JobFailedError with the
    failing rank's last lines, JobLostError, JobStoppedError, StaysAwayError.
    """
    handle, name = submission.ask(submission.find_or_submit), submission.job.name
    while True:
        status = submission.ask(partial(launcher.poll, handle))
        look(status.state not in ("queued", "running"))
        if status.state == "queued":
            handle = submission.ask(partial(submission.wait, handle, status))
        if status.progress is not None:
            output.report(submission.describe(status.progress))
        if status.state == "succeeded":
            return
        if status.state in ("failed", "stuck"):
            raise JobFailedError(name, status)
        if status.state == "interrupted":
            why = f" ({status.reason})" if status.reason else ""
            raise JobStoppedError(f"{name} was asked to stop{why} and has saved what it can: run again to continue")
        if status.state == "lost":
            raise JobLostError(name, status, saved_step())
        time.sleep(POLL_SECONDS)
