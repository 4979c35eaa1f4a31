"""Jobs on nodes that somebody else gives: Slurm, PBS, Kubernetes, or a list of hosts.

A `Scheduler` submits, looks up and ends; ScheduledLauncher knows the rest. The work directory must be on a file system
that all nodes mount. Files of a job in work/<key>/, beside those of launchers.py: the script or manifest, logs of the
scheduler, submission.json (which scheduler, and its name of the job), nodes/ (node_files.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from infra.code_digest import code_digest
from infra.jobs.launchers import SUBMISSION_FILE, Job, JobHandle, JobState, JobStatus, final_state, read_progress
from infra.jobs.node_files import NodeFiles
from infra.jobs.rank_processes import tail_of
from infra.jobs.supervisor import JobFile, read_job_file, write_json
from infra.machine.network import job_environment
from infra.storage.object_store import SHARED_VARIABLES

if TYPE_CHECKING:
    from configs.schema import QueueResources

SUBMITTED_FILES = ("job.sbatch", "job.pbs", "job.yaml", "ssh.json", "slurm-*.log", "supervisor-*.log")
"""What schedulers were given and what supervisors printed: evidence of the step whose job it was."""
CANCELLED_FILE = "cancelled"
CHANGE_RESOURCES = "change queue or ranks_per_node of the resources"
COMMAND_SECONDS = 60
"""For an answer of a scheduler's command."""
NAME_DIGITS = 12
"""Of the key, in the scheduler's lists."""
NO_ANSWER_SECONDS = 900.0
"""For a scheduler that is restarted while its jobs go on."""
NO_ANSWER = re.compile(
    r"timed? ?out|unable to (contact|connect|communicate)|cannot connect|connection (refused|reset)|"
    r"temporar(y|ily) (failure|unable|unavailable)|no route to host",
    re.IGNORECASE,
)
"""In the words of a command that did not reach its scheduler, which then refused nothing."""
SAVE_SECONDS = 120
"""Before the time limit the ranks are told to save."""


@dataclass(frozen=True)
class SchedulerRecord:
    """What a scheduler says of a job. queued: it waits. stuck: it waits until somebody changes it or the cluster.
    ended: by itself. taken: by the cluster, which says nothing about the program. cancelled: by a person."""

    state: Literal["queued", "stuck", "running", "ended", "taken", "cancelled"]
    reason: str = ""
    fix: str = CHANGE_RESOURCES
    """Of a stuck one."""


class NoAnswerError(RuntimeError):
    """The scheduler itself cannot be reached, which says nothing about its jobs."""


class StaysAwayError(NoAnswerError):
    """The scheduler could not be reached for NO_ANSWER_SECONDS."""

    def __init__(self, words: str) -> None:
        super().__init__(f"{words}; jobs go on without it: run again when it answers")


class Scheduler(Protocol):
    name: str
    look_seconds: float
    """Between two questions: a controller serves all users."""

    def find(self, job: Job, work_dir: Path) -> str | None:
        """Its name of a job of this work directory that waits or runs: whoever submitted it may have been killed before
        that name was written. Raises NoAnswerError."""
        ...

    def submit(self, job: Job, work_dir: Path) -> str:
        """Its name of the new job. Raises ValueError with its reason where it takes no such job, and
        NoAnswerError, where it may have taken it: `find` knows."""
        ...

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        """None where it knows no such job. Raises NoAnswerError."""
        ...

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        """Take a job from the queue or kill it; nothing where it has ended."""
        ...

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        """What the job's first node printed."""
        ...


@dataclass(frozen=True)
class Looked:
    """What a scheduler said last of a job; times by time.monotonic."""

    asked_at: float
    answered_at: float
    record: SchedulerRecord | None


class ScheduledLauncher:
    """Jobs of a scheduler; `work_root` is the home's directory of work directories, on a shared file system."""

    def __init__(self, work_root: Path, scheduler: Scheduler) -> None:
        self.work_root, self.scheduler = work_root, scheduler
        self._looked: dict[str, Looked] = {}

    def submit(self, job: Job) -> JobHandle:
        """Raises ValueError with the scheduler's reason where it takes no such job, and NoAnswerError."""
        work_dir = self.work_root / job.key
        handle, ended = JobHandle(job.key), None
        if self.find(job.key):
            if self.poll(handle).state in ("queued", "running"):
                return handle
            ended = self._name(job.key)
            self.scheduler.end(ended, work_dir)  # one that waits for ever
        work_dir.mkdir(parents=True, exist_ok=True)
        name = self.scheduler.find(job, work_dir)
        if name in (None, ended):
            name = self._submit(job, work_dir)
        write_json(work_dir / SUBMISSION_FILE, {"scheduler": self.scheduler.name, "job": name})
        self._looked.pop(job.key, None)
        return handle

    def _submit(self, job: Job, work_dir: Path) -> str:
        servers = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
        network = job_environment(self.work_root.parent) if job.num_nodes > 1 else {}
        command = job.command({**servers, **network}, code_digest((job.module, *job.roots)))
        write_json(work_dir / "command.json", asdict(command))
        return self.scheduler.submit(job, work_dir)

    def poll(self, handle: JobHandle) -> JobStatus:
        """Raises NoAnswerError where the scheduler has said nothing of the job yet, StaysAwayError where it says
        nothing more."""
        work_dir = self.work_root / handle.key
        name, record = self._name(handle.key), self._look(handle.key)
        progress, job = read_progress(work_dir), read_job_file(work_dir)
        if record is not None and record.state == "queued":
            return JobStatus("queued", None, None, None, "", (), record.reason)
        if record is not None and record.state == "stuck":
            reason = f"{self.scheduler.name} does not start job {name} ({record.reason}): {record.fix}, and run again"
            return JobStatus("stuck", None, None, None, "", (), reason)
        if job is not None and not job.is_of(name):
            job = None
        # What the nodes found out of each other is news that the scheduler may have to learn yet.
        if record is not None and record.state == "running" and not (job is not None and job.reason):
            return JobStatus("running", progress, None, None, "", ())
        if job is not None and job.exit_code is None and _ends_what_lives(NodeFiles(work_dir, job.fencing)):
            return JobStatus("running", progress, None, None, "", ())
        state, reason = end_of(record, job, is_cancelled=self._is_cancelled(handle.key))
        if job is None or job.failing_rank is None:
            log = self.scheduler.log_path(name, work_dir)
            tail = tuple(tail_of(log)) if log.exists() else ()
            return JobStatus(state, progress, job and job.exit_code, None, str(log), tail, reason)
        return JobStatus(state, progress, job.exit_code, job.failing_rank, job.log_path, tuple(job.log_tail), reason)

    def cancel(self, handle: JobHandle, grace_seconds: float) -> None:
        """Raises NoAnswerError where the scheduler does not answer within the grace."""
        work_dir, name = self.work_root / handle.key, self._name(handle.key)
        (work_dir / CANCELLED_FILE).write_text(name)
        deadline = time.monotonic() + grace_seconds
        while True:
            is_late = time.monotonic() > deadline
            try:
                record = self.scheduler.look(name, work_dir)
            except NoAnswerError:
                if is_late:
                    raise
            else:
                if record is None or record.state not in ("queued", "stuck", "running"):
                    break
                job = read_job_file(work_dir)
                if record.state != "running" or is_late:
                    self.scheduler.end(name, work_dir)
                elif job is not None and job.is_of(name):
                    NodeFiles(work_dir, job.fencing).order("TERM")
            time.sleep(min(1.0, self.scheduler.look_seconds))
        self._looked.pop(handle.key, None)

    def find(self, key: str) -> JobHandle | None:
        return JobHandle(key) if scheduler_of(self.work_root / key) == self.scheduler.name else None

    def _name(self, key: str) -> str:
        return json.loads((self.work_root / key / SUBMISSION_FILE).read_text())["job"]

    def _is_cancelled(self, key: str) -> bool:
        path = self.work_root / key / CANCELLED_FILE
        return path.exists() and path.read_text() == self._name(key)

    def _look(self, key: str) -> SchedulerRecord | None:
        looked, now = self._looked.get(key), time.monotonic()
        if looked is None or now - looked.asked_at >= self.scheduler.look_seconds:
            try:
                looked = Looked(now, now, self.scheduler.look(self._name(key), self.work_root / key))
            except NoAnswerError as error:
                if looked is None:
                    raise
                if now - looked.answered_at > NO_ANSWER_SECONDS:
                    raise StaysAwayError(str(error)) from error
                looked = replace(looked, asked_at=now)
            self._looked[key] = looked
        return looked.record


def _ends_what_lives(files: NodeFiles) -> bool:
    """Whether nodes of a job that its scheduler no longer has still give signs of life: they are told to kill their
    ranks. A controller that was killed may have forgotten what it started."""
    lives = bool(files.beating_nodes())
    if lives:
        files.order("KILL")
    return lives


def scheduler_of(work_dir: Path) -> str:
    """The name of the scheduler that has the job of a work directory; empty where none has."""
    try:
        return json.loads((work_dir / SUBMISSION_FILE).read_text())["scheduler"]
    except FileNotFoundError:
        return ""


def end_of(record: SchedulerRecord | None, job: JobFile | None, *, is_cancelled: bool) -> tuple[JobState, str]:
    """State and reason of a job that does not run. `job` is what its first node wrote, None before it began."""
    state, reason = ("", "") if record is None else (record.state, record.reason)
    own = final_state(None if job is None else job.exit_code)
    if own == "succeeded" or (own == "failed" and state != "taken"):
        return own, "" if job is None else job.reason
    if is_cancelled or state == "cancelled":
        return "interrupted", reason or "it was cancelled"
    if state == "taken":
        return "lost", reason
    if own == "interrupted":
        return "lost", "its time limit came near, and it was asked to save"
    if job is None or (job.exit_code is None and reason):
        return "failed", reason or "it ended before its first node began"
    if job.failing_rank is None:
        return "lost", job.reason or "the supervisor of its first node was killed"
    return "lost", ""


def ask(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command, with the variables of this process where none are given. Raises NoAnswerError where it
    does not come back."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{command[0]} did not come back in {COMMAND_SECONDS} s") from error


def refuse_no_answer(scheduler: str, words: str) -> None:
    """Raises NoAnswerError where the words of a command that failed say that it did not reach its scheduler."""
    if NO_ANSWER.search(words):
        raise NoAnswerError(f"{scheduler} does not answer: {last_line(words)}")


def last_line(text: str) -> str:
    """The scheduler's own words, without the name of its command."""
    lines = [line.partition("error: ")[2] or line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def queue_of(job: Job) -> QueueResources:
    assert job.queue is not None, job
    return job.queue


def save_after_seconds(queue: QueueResources) -> int:
    """When the ranks are told to save, from the start of the job."""
    limit_seconds = queue.time_limit_minutes * 60
    return max(limit_seconds - SAVE_SECONDS, limit_seconds // 2)
