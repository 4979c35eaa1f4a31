"""The jobs by which a cluster is looked at and tried, through the launcher that phases use."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from configs.schema import Device
from infra.cluster.cluster_settings import ClusterSettings
from infra.cluster.probe_node import ANSWER, REQUEST, NodeReport, ProbeFailure, ProbeRequest
from infra.cluster.trial_job import HOLD_STEP, TrialResult, read_step
from infra.home import Home
from infra.jobs.launchers import Job, JobFailedError, JobHandle, JobState, Launcher
from infra.jobs.open_launcher import open_launcher
from infra.jobs.supervisor import read_job_file

POLL_SECONDS = 0.2
WAIT_SECONDS = 1800.0
"""In the queue and for the job: a busy cluster lets short jobs wait."""


class NodeJobs:
    """Jobs on all nodes of a cluster. Their work directories go when they have succeeded on all."""

    def __init__(self, home: Home, settings: ClusterSettings) -> None:
        self.settings = settings
        self.work_root = home.work_root
        self.launcher: Launcher = open_launcher(settings.launcher, home.work_root)

    def probe(self, request: ProbeRequest) -> list[NodeReport | ProbeFailure]:
        """What each node sees. Raises ValueError or RuntimeError with the launcher's reason."""
        job = self._job("infra.cluster.probe_node", "probe", ())
        work_dir = self.work_root / job.key
        work_dir.mkdir(parents=True)
        (work_dir / "request.json").write_bytes(REQUEST.dump_json(request))
        self._run(job)
        paths = [work_dir / f"report-{node}.json" for node in range(request.num_nodes)]
        answers = [ANSWER.validate_json(path.read_bytes()) for path in paths]
        if all(isinstance(answer, NodeReport) for answer in answers):
            shutil.rmtree(work_dir, ignore_errors=True)  # NFS keeps what a node still has open
        return answers

    def try_job(self) -> TrialResult:
        """A job to its end."""
        job = self._job("infra.cluster.trial_job", "trial", (self._device, "run"))
        self._run(job)
        return self._result(job)

    def try_recovery(self) -> TrialResult:
        """A job that is killed halfway, and submitted again under the same key."""
        job = self._job("infra.cluster.trial_job", "recovery", (self._device, "hold"))
        work_dir = self.work_root / job.key
        handle = self.launcher.submit(job)
        with self._cancelling(handle):
            self._await(handle, job, lambda state: read_step(work_dir) >= HOLD_STEP)
        self.launcher.cancel(handle, grace_seconds=0)
        self._run(job)
        started = read_job_file(work_dir)
        assert started is not None and started.fencing > 1, started
        return self._result(job)

    @property
    def _device(self) -> Device:
        return "cuda" if self.settings.gpus_per_node else "cpu"

    def _job(self, module: str, name: str, arguments: tuple[str, ...]) -> Job:
        """With a rank per GPU, or one per node without GPUs; a key of its own each time."""
        key, num_nodes = secrets.token_hex(8), self.settings.num_nodes
        return Job(
            key,
            module,
            (str(self.work_root / key), *arguments),
            num_ranks=num_nodes * max(1, self.settings.gpus_per_node),
            environment={"OMP_NUM_THREADS": "1"},
            num_nodes=num_nodes,
            queue=self.settings.queue,
            device=self._device,
            name=f"cluster {name}",
        )

    def _run(self, job: Job) -> None:
        """Submit it and wait for success. Raises JobFailedError with the failing rank's last lines."""
        handle = self.launcher.submit(job)
        with self._cancelling(handle):
            self._await(handle, job, lambda state: state == "succeeded")

    def _await(self, handle: JobHandle, job: Job, is_reached: Callable[[JobState], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_reached((status := self.launcher.poll(handle)).state):
            if status.state not in ("queued", "running"):
                raise JobFailedError(job.name, status)
            if time.monotonic() > deadline:
                why = f" ({status.reason})" if status.reason else ""
                raise RuntimeError(f"the job was {status.state}{why} after {WAIT_SECONDS:.0f} s, and was cancelled")
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _cancelling(self, handle: JobHandle) -> Iterator[None]:
        """A job that nobody waits for any longer does not stay on the nodes."""
        try:
            yield
        except BaseException:
            self.launcher.cancel(handle, grace_seconds=0)
            raise

    def _result(self, job: Job) -> TrialResult:
        work_dir = self.work_root / job.key
        result = TrialResult(**json.loads((work_dir / "result.json").read_text()))
        shutil.rmtree(work_dir, ignore_errors=True)  # NFS keeps what a node still has open
        return result


def failure_sentence(error: Exception) -> str:
    """One line: of the log's lines that a JobFailedError ends with, the last."""
    first, *lines = str(error).splitlines()
    return f"{first.removesuffix(', last lines:')}{f': {lines[-1].strip()}' if lines else ''}"
