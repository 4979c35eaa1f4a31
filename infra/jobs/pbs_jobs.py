"""Jobs on OpenPBS: submitted by qsub, looked up in PBS's own records, also of ended jobs (qstat -x), ended by qdel.

Files of a job in work/<key>/, beside those of scheduled_jobs.py: job.pbs (the script), pbs.log (what it printed),
supervisor-N.log (what the supervisor of node N printed).
"""

from __future__ import annotations

import getpass
import json
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from infra.code_digest import ROOT
from infra.jobs.launchers import Job
from infra.jobs.node_supervisor import LEADER, SAVE_AFTER_VARIABLE
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

SCRIPT, LOG = "job.pbs", "pbs.log"
UNKNOWN = "Unknown Job Id"
WAITING = "QHWTS"
RUNNING = "RBEU"
NEVER = "Can Never Run"
"""How the scheduler's comment begins on a job that no node could ever take."""
EXCEEDED = "exceeded resource"
"""In the comment of older versions on a job above a limit."""
DELETED_SUBSTATE = 91
BARE = re.compile(r'(":)\s*([^\s"{\[][^,}\n]*)')
"""A value without quotation marks. Some versions write texts that begin with a digit so."""
SIGNALLED = 256
"""Added to the number of the signal that ended the script."""
ENDED_BY_PBS = {
    -3: "its node could not start it",
    -4: "its node went down",
    -11: "PBS took it from its nodes",
    -14: "a node of it was lost",
    -20: "its first node was lost",
    -24: "it used more CPUs than it asked for",
    -25: "it used more CPUs than it asked for",
    -26: "its virtual memory ran out",
    -27: "its memory ran out",
    -28: "its CPU time ran out",
    -29: "its time limit came",
}
"""Exit_status below 0 by PBS's job.h; those that say nothing about the program."""


class Pbs:
    name = "pbs"
    look_seconds = 5.0

    def find(self, job: Job, work_dir: Path) -> str | None:
        """By its name and the log that it writes: jobs of two homes may have one name. Ended jobs are not listed."""
        if not (work_dir / SCRIPT).exists():
            return None
        listed = ask("qselect", "-u", getpass.getuser(), "-N", _job_name(job))
        if listed.returncode:
            raise NoAnswerError(f"PBS does not answer: {last_line(listed.stderr)}")
        for name in listed.stdout.split():
            answer = ask("qstat", "-f", "-F", "json", name)
            shown = _jobs(answer.stdout) if answer.returncode == 0 else {}  # it ended in between
            if any(each["Output_Path"].partition(":")[2] == str(work_dir / LOG) for each in shown.values()):
                return name
        return None

    def submit(self, job: Job, work_dir: Path) -> str:
        script = work_dir / SCRIPT
        script.write_text(job_script(job, work_dir))
        answer = ask("qsub", str(script))
        if answer.returncode:
            refuse_no_answer("PBS", answer.stderr)
            raise ValueError(
                f"PBS refuses the job: {last_line(answer.stderr)}. Change queue or ranks_per_node of the "
                f"resources (see {script})"
            )
        return answer.stdout.strip()

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        answer = ask("qstat", "-x", "-f", "-F", "json", scheduler_job)
        if answer.returncode == 0:
            return parse_record(answer.stdout, scheduler_job)
        if UNKNOWN in answer.stderr:
            return None
        raise NoAnswerError(f"PBS does not answer: {last_line(answer.stderr)}")

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        ask("qdel", scheduler_job)

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        log = work_dir / f"supervisor-{LEADER}.log"
        return log if log.exists() else work_dir / LOG


def _job_name(job: Job) -> str:
    return f"glm46-{job.key[: NAME_DIGITS - 6]}"  # some versions take 15 letters


def job_script(job: Job, work_dir: Path) -> str:
    """The batch script: one chunk per node, on each of which it starts a supervisor."""
    queue = queue_of(job)
    gpus = f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    options = {
        "-N": _job_name(job),
        "-q": queue.partition,
        "-A": queue.account,
        "-l select": f"{job.num_nodes}:ncpus={job.ranks_per_node}:mpiprocs=1{gpus}",
        "-l place": "scatter:excl",
        "-l walltime": f"{queue.time_limit_minutes // 60:02d}:{queue.time_limit_minutes % 60:02d}:00",
        "-j": "oe",
        "-o": work_dir / LOG,
        "-r": "n",
    }
    lines = [
        f"#PBS {name}{'=' if name.startswith('-l') else ' '}{shlex.quote(str(value))}"
        for name, value in options.items()
        if value != ""
    ]
    supervisor = shlex.join(["env", f"{SAVE_AFTER_VARIABLE}={save_after_seconds(queue)}", sys.executable])
    supervisor += f" -m infra.jobs.node_supervisor {shlex.quote(str(work_dir))}"
    per_node = (
        f'cd {shlex.quote(str(ROOT))} && exec {supervisor} "$1" "$2" '
        f'>> {shlex.quote(str(work_dir))}/supervisor-"$2".log 2>&1'
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"for node in $(seq 0 {job.num_nodes - 1}); do",
            f'  pbsdsh -n "$node" -- /bin/bash -c {shlex.quote(per_node)} supervisor "$PBS_JOBID" "$node" &',
            "done",
            "wait",
            "",
        ]
    )


def _jobs(text: str) -> dict[str, Any]:
    """Of what `qstat -f -F json` prints. Raises NoAnswerError where it cannot be read."""
    for shown in (text, BARE.sub(r'\1 "\2"', text)):
        try:
            return json.loads(shown, strict=False).get("Jobs", {})
        except json.JSONDecodeError as error:
            problem = error
    raise NoAnswerError(f"PBS does not answer in JSON: qstat printed {text[:200]!r} ({problem})")


def parse_record(text: str, scheduler_job: str) -> SchedulerRecord | None:
    """Of `qstat -x -f -F json`. Raises NoAnswerError where it cannot be read."""
    shown = _jobs(text)
    values = shown.get(scheduler_job) or next(iter(shown.values()), None)
    if values is None:
        return None
    state, comment = values["job_state"], values.get("comment", "")
    if state in WAITING:
        return SchedulerRecord("stuck" if comment.startswith(NEVER) else "queued", comment or f"state {state}")
    if state in RUNNING:
        return SchedulerRecord("running")
    exit_status, substate = int(values.get("Exit_status", 0)), int(values.get("substate", 0))
    nodes = f" ({values['exec_host']})" if "exec_host" in values else ""
    if exit_status in ENDED_BY_PBS:
        return SchedulerRecord("taken", f"{ENDED_BY_PBS[exit_status]}{nodes}")
    if EXCEEDED in comment:
        return SchedulerRecord("taken", f"it {comment[comment.index(EXCEEDED) :]}{nodes}")
    if substate == DELETED_SUBSTATE or exit_status == SIGNALLED + signal.SIGTERM:
        return SchedulerRecord("cancelled", f"it was deleted: `tracejob {scheduler_job}` says by whom")
    if exit_status > SIGNALLED:
        return SchedulerRecord("taken", f"its script got signal {exit_status - SIGNALLED}{nodes}")
    return SchedulerRecord("ended", f"{comment} (exit status {exit_status})" if exit_status else "")
