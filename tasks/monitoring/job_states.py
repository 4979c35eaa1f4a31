"""States of a home's jobs: on this machine from locks and files, on a cluster from its scheduler."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from infra.home import Home
from infra.jobs.launchers import SUBMISSION_FILE, JobHandle, JobState, final_state
from infra.jobs.open_launcher import launcher_of
from infra.jobs.supervisor import read_job_file

LOOK_SECONDS = 30.0
"""Between two questions of a scheduler about one job."""
NO_ANSWER = (RuntimeError, ValueError, OSError, subprocess.SubprocessError)
"""What a scheduler that is not there, or does not answer, raises."""


class JobStates:
    """A scheduler is asked beside the scrape, which must not wait for it: it may need a minute to say that it does not
    answer. Meanwhile, and where it does not, the files of the job say what they know."""

    def __init__(self, home: Home) -> None:
        self._work_root = home.work_root
        self._asking: dict[str, Future[JobState]] = {}
        self._answered: dict[str, tuple[float, JobState | None]] = {}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scheduler")

    def look(self, key: str, work_dir: Path) -> tuple[JobState, bool]:
        """The state of a job, and whether its launcher could be asked."""
        if not (work_dir / SUBMISSION_FILE).exists():
            return self._ask(key), True
        if key in self._asking and self._asking[key].done():
            self._answered[key] = time.monotonic(), _answer_of(self._asking.pop(key))
        answered_at, state = self._answered.get(key, (-LOOK_SECONDS, None))
        if key not in self._asking and time.monotonic() - answered_at >= LOOK_SECONDS:
            self._asking[key] = self._threads.submit(self._ask, key)
        if state is not None:
            return state, True
        return _state_in_files(work_dir), key not in self._answered

    def _ask(self, key: str) -> JobState:
        return launcher_of(key, self._work_root).poll(JobHandle(key)).state


def _answer_of(asked: Future[JobState]) -> JobState | None:
    error = asked.exception()
    if error is not None and not isinstance(error, NO_ANSWER):
        raise error
    return asked.result() if error is None else None


def _state_in_files(work_dir: Path) -> JobState:
    job = read_job_file(work_dir)
    if job is None:
        return "queued"
    return "running" if job.exit_code is None else final_state(job.exit_code)
