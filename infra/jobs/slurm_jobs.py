"""Jobs on Slurm: submitted by sbatch, looked up in Slurm's own records, ended by scancel.

Files of a job in work/<key>/, beside those of scheduled_jobs.py: job.sbatch (the script), slurm-N.log.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from infra.code_digest import ROOT
from infra.jobs.launchers import Job
from infra.jobs.scheduled_jobs import NAME_DIGITS, SAVE_SECONDS, SchedulerRecord, ask, last_line, queue_of

LOOK_SECONDS = 5.0
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


class Slurm:
    name = "slurm"

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        self.look_seconds = look_seconds

    def submit(self, job: Job, work_dir: Path) -> str:
        script = work_dir / "job.sbatch"
        script.write_text(job_script(job, work_dir))
        answer = ask("sbatch", "--parsable", str(script))
        if answer.returncode:
            raise ValueError(
                f"Slurm refuses the job: {last_line(answer.stderr)}. Change queue or ranks_per_node of the "
                f"resources (see {script})"
            )
        return answer.stdout.strip().partition(";")[0]

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        """From the controller, which forgets ended jobs after a while, else from accounting, where there is one."""
        shown = ask("scontrol", "show", "job", "--oneliner", scheduler_job)
        if shown.returncode == 0:
            return parse_record(shown.stdout)
        if "Invalid job id" not in shown.stderr:
            raise RuntimeError(f"Slurm does not answer: {last_line(shown.stderr)}")
        columns = "--format=State,Reason,NodeList"
        kept = ask("sacct", "--allocations", "--parsable2", "--noheader", columns, "--jobs", scheduler_job)
        return parse_accounting(kept.stdout) if kept.returncode == 0 else None

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        ask("scancel", scheduler_job)

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        return work_dir / f"slurm-{scheduler_job}.log"


def job_script(job: Job, work_dir: Path) -> str:
    """The batch script."""
    queue = queue_of(job)
    options = {
        "job-name": f"glm46-{job.key[:NAME_DIGITS]}",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or "",
        "exclusive": "",
        "time": queue.time_limit_minutes,
        "partition": queue.partition,
        "account": queue.account,
        "signal": f"TERM@{SAVE_SECONDS}",
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
    supervisor = shlex.join([sys.executable, "-m", "infra.jobs.node_supervisor", str(work_dir)])
    per_node = f'exec {supervisor} "$SLURM_JOB_ID" "$SLURM_NODEID"'
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"cd {shlex.quote(str(ROOT))} || exit 1",
            f"exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 bash -c {shlex.quote(per_node)}",
            "",
        ]
    )


def parse_record(text: str) -> SchedulerRecord:
    """Of the line that `scontrol show job --oneliner` prints."""
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    return _record(values["JobState"].partition("+")[0], values.get("Reason", ""), values.get("NodeList", ""))


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
