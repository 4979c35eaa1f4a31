"""Jobs on Slurm: submitted by sbatch, looked up in Slurm's own records, ended by scancel.

Files of a job in work/<key>/, beside those of scheduled_jobs.py: job.sbatch (the script), slurm-N.log.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from infra.code_digest import ROOT
from infra.jobs.launchers import Job
from infra.jobs.node_supervisor import NAME_VARIABLE
from infra.jobs.rank_processes import tail_of
from infra.jobs.scheduled_jobs import (
    NAME_DIGITS,
    NoAnswerError,
    SchedulerRecord,
    ask,
    last_line,
    queue_of,
    refuse_no_answer,
    save_after_seconds,
)
from infra.jobs.slurm_reasons import Request, fix_of, reason_in_log, reason_of_waiting, request_of, unusable_nodes
from infra.jobs.supervisor import RESTART_MARK

LOOK_SECONDS = 5.0
SCRIPT = "job.sbatch"
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")
"""States of a job that has not ended, as squeue takes them."""
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
NEVER = re.compile(
    "Partition(Time|Node)Limit|BadConstraints|QOSMax.*Per(Job|Node)|QOSMinGRES|AssocMax.*PerJob|MaxMemPerLimit|"
    "(Account|QOS)NotAllowed|Invalid(Account|QOS)|DependencyNeverSatisfied|ReservationDeleted|"
    "(Job's_account|Job's_QOS|User's_group)_not_"
)
"""Reasons for which a job waits until somebody changes it or the cluster."""

OF_AN_ALLOCATION = re.compile("SLURM_(?!CONF$|CLUSTERS$|JWT$)|SRUN_")
"""Variables by which the allocation that this process runs in, or a profile, would size the steps of a job of its
own."""
CONTAINER_OPTION = "--container-image"
"""Of `srun`, where the plugin pyxis (github.com/NVIDIA/pyxis) is installed."""


class Slurm:
    name = "slurm"

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        self.look_seconds = look_seconds

    def find(self, job: Job, work_dir: Path) -> str | None:
        """By its name and script: jobs of two homes may have one name."""
        if not (work_dir / SCRIPT).exists():
            return None
        asked = (f"--user={getpass.getuser()}", f"--name={_job_name(job)}", f"--states={','.join(ALIVE)}")
        listed = ask("squeue", "--noheader", *asked, "--format=%A %o")
        if listed.returncode:
            raise NoAnswerError(f"Slurm does not answer: {last_line(listed.stderr)}")
        jobs = [line.strip().partition(" ") for line in listed.stdout.splitlines()]
        return next((name for name, _, script in jobs if script == str(work_dir / SCRIPT)), None)

    def submit(self, job: Job, work_dir: Path) -> str:
        _refuse_missing_containers(queue_of(job).image)
        script = work_dir / SCRIPT
        script.write_text(job_script(job, work_dir))
        own = {name: value for name, value in os.environ.items() if not OF_AN_ALLOCATION.match(name)}
        # On the command line: SBATCH_JOB_NAME goes before the script, and `find` would not know the job.
        answer = ask("sbatch", "--parsable", f"--job-name={_job_name(job)}", str(script), environment=own)
        if answer.returncode:
            refuse_no_answer("Slurm", answer.stderr)
            words, queue = last_line(answer.stderr), queue_of(job)
            request = Request(queue.partition, queue.account, str(queue.time_limit_minutes), str(job.num_nodes))
            raise ValueError(f"Slurm refuses the job: {words}; {fix_of(words, request)} (see {script})")
        return answer.stdout.strip().partition(";")[0]

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        """From the controller, which forgets ended jobs after a while, else from accounting, where there is one."""
        shown = ask("scontrol", "show", "job", "--oneliner", scheduler_job)
        if shown.returncode == 0:
            return self._explained(parse_record(shown.stdout), scheduler_job, work_dir, _values(shown.stdout))
        if "Invalid job id" not in shown.stderr:
            raise NoAnswerError(f"Slurm does not answer: {last_line(shown.stderr)}")
        columns = "--format=State,Reason,NodeList"
        kept = ask("sacct", "--allocations", "--parsable2", "--noheader", columns, "--jobs", scheduler_job)
        record = parse_accounting(kept.stdout) if kept.returncode == 0 else None
        return None if record is None else self._explained(record, scheduler_job, work_dir, {})

    def _explained(
        self, record: SchedulerRecord, scheduler_job: str, work_dir: Path, values: dict[str, str]
    ) -> SchedulerRecord:
        """With what Slurm says elsewhere: in its lists of nodes and partitions, and in the job's log."""
        if record.state == "queued":
            return replace(record, reason=reason_of_waiting(record.reason, scheduler_job, values))
        if record.state == "stuck":
            return replace(record, fix=fix_of(record.reason, request_of(values)))
        if values.get("JobState") == "NODE_FAIL" and (lost := unusable_nodes("--nodes", values["NodeList"])):
            return replace(record, reason=f"{TAKEN['NODE_FAIL']}: {lost}")
        log = self.log_path(scheduler_job, work_dir)
        if record.state == "ended" and log.exists() and (taken_by := reason_in_log(tail_of(log))):
            return SchedulerRecord("taken", taken_by)
        return record

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        ask("scancel", scheduler_job)

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        return work_dir / f"slurm-{scheduler_job}.log"


def _refuse_missing_containers(image: str) -> None:
    """Raises ValueError where a job is to run in a container that Slurm cannot start."""
    if image and CONTAINER_OPTION not in ask("srun", "--help").stdout:
        raise ValueError(
            f"queue.image {image}: this Slurm starts no containers, as `srun --help` names no {CONTAINER_OPTION}. "
            f"Install its plugin pyxis, or empty queue.image"
        )


def _job_name(job: Job) -> str:
    return f"glm46-{job.key[:NAME_DIGITS]}"


def job_script(job: Job, work_dir: Path) -> str:
    """The batch script; the supervisors run in a container where the queue names an image."""
    queue = queue_of(job)
    options = {
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or "",
        "exclusive": "",
        "mem": "0",  # all: an exclusive node gives only the partition's DefMemPerNode where nobody asks
        "time": queue.time_limit_minutes,
        "partition": queue.partition,
        "account": queue.account,
        "signal": f"TERM@{queue.time_limit_minutes * 60 - save_after_seconds(queue)}",
        "output": work_dir / "slurm-%j.log",
        "open-mode": "append",
        "no-requeue": "",
    }
    flags = ("exclusive", "no-requeue")
    lines = [
        f"#SBATCH --{name}" + ("" if name in flags else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if name in flags or value != ""
    ]
    supervisor = shlex.join([sys.executable, "-m", "infra.jobs.node_supervisor", str(work_dir)])
    job_name = f"$SLURM_JOB_ID${{SLURM_RESTART_COUNT:+{RESTART_MARK}$SLURM_RESTART_COUNT}}"
    per_node = f'{NAME_VARIABLE}="$SLURMD_NODENAME" exec {supervisor} "{job_name}" "$SLURM_NODEID"'
    home = work_dir.parent.parent
    container = {CONTAINER_OPTION: queue.image, "--container-mounts": f"{home}:{home}", "--container-workdir": ROOT}
    options = [f"{name}={value}" for name, value in container.items() if queue.image]
    srun = shlex.join(["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", *options])
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            *([] if queue.image else [f"cd {shlex.quote(str(ROOT))} || exit 1"]),
            f"exec {srun} bash -c {shlex.quote(per_node)}",
            "",
        ]
    )


def parse_record(text: str) -> SchedulerRecord:
    """Of the line that `scontrol show job --oneliner` prints."""
    values = _values(text)
    return _record(values["JobState"].partition("+")[0], values.get("Reason", ""), values.get("NodeList", ""))


def _values(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", text))


def parse_accounting(text: str) -> SchedulerRecord | None:
    """Of `sacct --parsable2 --noheader --format=State,Reason,NodeList`; None where it knows no such job."""
    first = text.strip().partition("\n")[0]
    if not first:
        return None
    state, reason, nodes = first.split("|")
    return _record(state.split()[0], reason, nodes)


def _record(state: str, reason: str, nodes: str) -> SchedulerRecord:
    if state in QUEUED:
        return SchedulerRecord("stuck" if NEVER.match(reason) else "queued", reason)
    if state in RUNNING:
        return SchedulerRecord("running")
    if state in TAKEN:
        return SchedulerRecord("taken", f"{TAKEN[state]} ({nodes})")
    return SchedulerRecord("cancelled" if state == "CANCELLED" else "ended")
