"""Training jobs on Slurm: submitted by sbatch, looked up in Slurm's own records, ended by scancel.

The work directory must be on a file system that all nodes mount. Files of a job in work/<key>/, beside those of
infra/jobs/supervisor.py: job.sbatch (the script), slurm.json (Slurm's number of the job), slurm-N.log, nodes/.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.code_digest import ROOT
from infra.jobs.build_ops import op_environment
from infra.jobs.launchers import (
    CPU_ENVIRONMENT,
    LOOPBACK,
    Job,
    JobHandle,
    JobState,
    JobStatus,
    final_state,
    read_progress,
)
from infra.jobs.rank_processes import Command, tail_of
from infra.jobs.supervisor import read_job_file, write_json

NAME_DIGITS = 12
LOOK_SECONDS = 5.0
"""Between two questions to Slurm's controller, which serves all users."""
SAVE_SECONDS = 120
"""Before the time limit the ranks are told to save."""
COMMAND_SECONDS = 60
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED"}
TAKEN = {
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "PREEMPTED": "a job of higher priority took its nodes",
    "TIMEOUT": "its time limit came",
    "DEADLINE": "its deadline came",
    "OUT_OF_MEMORY": "a node's memory ran out",
    "REVOKED": "another cluster took it",
}
"""Ends that say nothing about the program."""
NEVER = re.compile("Partition(Time|Node)Limit|BadConstraints|QOSMax.*PerJob|AssocMax.*PerJob|AccountNotAllowed")
"""Reasons for which a job waits until somebody changes it or the cluster."""


@dataclass(frozen=True)
class SlurmRecord:
    """What Slurm knows of a job."""

    state: str
    reason: str
    nodes: str


class SlurmLauncher:
    """Jobs on Slurm; `work_root` is the home's directory of work directories, on a shared file system."""

    def __init__(self, work_root: Path, look_seconds: float = LOOK_SECONDS) -> None:
        self.work_root = work_root
        self.look_seconds = look_seconds
        self._looked: dict[str, tuple[float, SlurmRecord | None]] = {}

    def submit(self, job: Job) -> JobHandle:
        """Raises ValueError with Slurm's reason where it takes no such job."""
        work_dir = self.work_root / job.key
        handle = JobHandle(job.key)
        if self.find(job.key):
            if self.poll(handle).state in ("queued", "running"):
                return handle
            _run("scancel", self._number(job.key))  # one that waits for ever; of an ended job it is no news
        work_dir.mkdir(parents=True, exist_ok=True)
        loopback = LOOPBACK if job.num_nodes == 1 else {}
        environment = {**op_environment(), **CPU_ENVIRONMENT, **loopback, **job.environment}
        command = Command(job.module, job.arguments, job.num_ranks, job.num_nodes, environment)
        write_json(work_dir / "command.json", asdict(command))
        (work_dir / "job.sbatch").write_text(job_script(job, work_dir))
        answer = _run("sbatch", "--parsable", str(work_dir / "job.sbatch"))
        if answer.returncode:
            raise ValueError(
                f"Slurm refuses the job: {_reason(answer.stderr)}. Change queue or ranks_per_node of the phase's "
                f"resources (see {work_dir / 'job.sbatch'})"
            )
        write_json(work_dir / "slurm.json", {"job": answer.stdout.strip().partition(";")[0]})
        self._looked.pop(job.key, None)
        return handle

    def poll(self, handle: JobHandle) -> JobStatus:
        work_dir = self.work_root / handle.key
        number, record = self._number(handle.key), self._look(handle.key)
        progress, job = read_progress(work_dir), read_job_file(work_dir)
        if record is not None and record.state in QUEUED:
            if NEVER.match(record.reason):
                reason = (
                    f"Slurm does not start job {number} ({record.reason}): change queue or ranks_per_node of the "
                    f"phase's resources and run again (see {work_dir / 'job.sbatch'})"
                )
                return JobStatus("failed", None, None, None, "", (), reason)
            return JobStatus("queued", None, None, None, "", (), record.reason)
        if record is not None and record.state in RUNNING:
            return JobStatus("running", progress, None, None, "", ())
        if job is None or job.scheduler_job != number:  # it ended before its supervisor began
            log = work_dir / f"slurm-{number}.log"
            tail = tuple(tail_of(log)) if log.exists() else ()
            state, reason = _end_of(record, None, is_cancelled=self._is_cancelled(handle.key))
            return JobStatus(state if state != "succeeded" else "failed", None, None, None, str(log), tail, reason)
        state, reason = _end_of(record, job.exit_code, is_cancelled=self._is_cancelled(handle.key))
        if state == "lost" and not reason and job.failing_rank is None:
            reason = "the ranks of a node, or the job's script, were killed"
        tail = tuple(job.log_tail) or (tail_of(Path(job.log_path)) if job.log_path else ())
        return JobStatus(state, progress, job.exit_code, job.failing_rank, job.log_path, tuple(tail), reason)

    def cancel(self, handle: JobHandle, grace_seconds: float) -> None:
        work_dir, number = self.work_root / handle.key, self._number(handle.key)
        (work_dir / "cancelled").write_text(number)
        deadline = time.monotonic() + grace_seconds
        is_told = False
        while (record := _record(number)) is not None and record.state in QUEUED | RUNNING:
            if record.state in QUEUED or time.monotonic() > deadline:
                _run("scancel", number)
            elif not is_told:
                is_told = _run("scancel", "--signal=TERM", "--batch", number).returncode == 0
            time.sleep(min(1.0, self.look_seconds))
        self._looked.pop(handle.key, None)

    def find(self, key: str) -> JobHandle | None:
        return JobHandle(key) if (self.work_root / key / "slurm.json").exists() else None

    def _number(self, key: str) -> str:
        return json.loads((self.work_root / key / "slurm.json").read_text())["job"]

    def _is_cancelled(self, key: str) -> bool:
        path = self.work_root / key / "cancelled"
        return path.exists() and path.read_text() == self._number(key)

    def _look(self, key: str) -> SlurmRecord | None:
        looked_at, record = self._looked.get(key, (0.0, None))
        if time.monotonic() - looked_at >= self.look_seconds or looked_at == 0.0:
            record = _record(self._number(key))
            self._looked[key] = time.monotonic(), record
        return record


def job_script(job: Job, work_dir: Path) -> str:
    """The batch script."""
    assert job.queue is not None, job
    options = {
        "job-name": f"glm46-{job.key[:NAME_DIGITS]}",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "exclusive": "",
        "time": job.queue.time_limit_minutes,
        "partition": job.queue.partition,
        "account": job.queue.account,
        "signal": f"B:TERM@{SAVE_SECONDS}",
        "output": work_dir / "slurm-%j.log",
        "open-mode": "append",
        "no-requeue": "",
    }
    flags = ("exclusive", "no-requeue")
    lines = [
        f"#SBATCH --{name}" + ("" if name in flags else f"={value}")
        for name, value in options.items()
        if name in flags or value != ""
    ]
    run = shlex.join([sys.executable, "-m", "infra.jobs.slurm_supervisor", str(work_dir)])
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"cd {shlex.quote(str(ROOT))} || exit 1",
            f"export GLM46_JOB_LOG={shlex.quote(str(work_dir))}/slurm-$SLURM_JOB_ID.log",
            f"exec {run}",
            "",
        ]
    )


def parse_record(text: str) -> SlurmRecord:
    """Of the line that `scontrol show job --oneliner` prints."""
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    return SlurmRecord(values["JobState"].partition("+")[0], values.get("Reason", ""), values.get("NodeList", ""))


def parse_accounting(text: str) -> SlurmRecord | None:
    """Of `sacct --parsable2 --noheader --format=State,Reason,NodeList`; None where it knows no such job."""
    first = text.strip().partition("\n")[0]
    if not first:
        return None
    state, reason, nodes = first.split("|")
    return SlurmRecord(state.split()[0], reason, nodes)


def _record(number: str) -> SlurmRecord | None:
    """From the controller, which forgets ended jobs after a while, else from accounting, where there is one."""
    shown = _run("scontrol", "show", "job", "--oneliner", number)
    if shown.returncode == 0:
        return parse_record(shown.stdout)
    if "Invalid job id" not in shown.stderr:
        raise RuntimeError(f"Slurm does not answer: {_reason(shown.stderr)}")
    columns = "--format=State,Reason,NodeList"
    kept = _run("sacct", "--allocations", "--parsable2", "--noheader", columns, "--jobs", number)
    return parse_accounting(kept.stdout) if kept.returncode == 0 else None


def _end_of(record: SlurmRecord | None, exit_code: int | None, *, is_cancelled: bool) -> tuple[JobState, str]:
    """State and reason of a job that does not run. exit_code: what its supervisor wrote, None where it was killed."""
    state = "" if record is None else record.state
    if exit_code == 0 or (final_state(exit_code) == "failed" and state not in TAKEN):
        return final_state(exit_code), ""
    if is_cancelled or state == "CANCELLED":
        return "interrupted", "it was cancelled"
    if record is not None and state in TAKEN:
        return "lost", f"{TAKEN[state]} ({record.nodes})"
    if exit_code is not None and final_state(exit_code) == "interrupted":
        return "lost", "its time limit came near, and it has saved"
    if state == "FAILED" and exit_code is None:
        return "failed", "its script failed"
    return final_state(exit_code), ""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)


def _reason(text: str) -> str:
    """Slurm's own words, without the name of its command."""
    lines = [line.partition("error: ")[2] or line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
