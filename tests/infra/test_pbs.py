"""The PBS launcher without PBS: its script runs here, and its records are as OpenPBS documents them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest

from configs.schema import QueueResources
from infra.jobs.launchers import SUBMISSION_FILE, Job, JobHandle
from infra.jobs.pbs_jobs import Pbs, job_script, parse_record
from infra.jobs.scheduled_jobs import NoAnswerError, ScheduledLauncher, SchedulerRecord
from infra.jobs.supervisor import read_job_file
from tests.infra.test_launcher import starts, wait_for
from tests.support.cluster.default_queue import DEFAULT_QUEUE

KEY = "0123abcd"
NAME = "12.head"
PBSDSH = '#!/bin/bash\n[ "$1" = -n ] && [ "$3" = -- ] || exit 64\nshift 3\nexec env -i PATH="$PATH" "$@"\n'
"""PBS runs the command on the node of this number, in an environment of its own."""
COMMANDS = {
    "qsub": f'#!/bin/bash\n(PBS_JOBID={NAME} bash "$1" &)\necho {NAME}\n',
    "qstat": '#!/bin/bash\ncat "$RECORD"\n',
    "qselect": f'#!/bin/bash\n[[ "$*" == *"-N glm46-{KEY[:6]}" ]] && echo {NAME}\n',
    "pbsdsh": PBSDSH,
}


def job(tmp_path, deed: str = "succeed", queue: QueueResources = DEFAULT_QUEUE) -> Job:
    return Job(KEY, "tests.support.toy_job", (str(tmp_path / KEY), deed), 2, {"TOY": "1"}, 2, queue)


def shown(state: str, **values: object) -> str:
    """As `qstat -x -f -F json` prints a job."""
    record = {"Job_Name": "glm46-0123", "Job_Owner": "me@head", "job_state": state, "queue": "workq", **values}
    return json.dumps({"timestamp": 1, "pbs_version": "23.06.06", "pbs_server": "head", "Jobs": {NAME: record}})


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Stand-ins of PBS's commands: the job's script runs at once, and records are read from a file."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "bin"


def test_the_script_asks_for_what_the_resources_say(tmp_path):
    queue = DEFAULT_QUEUE.model_copy(update={"partition": "gpu", "account": "team", "time_limit_minutes": 90})
    lines = job_script(job(tmp_path, queue=queue), tmp_path / "a b").splitlines()
    assert {
        "#PBS -N glm46-0123ab",
        "#PBS -q gpu",
        "#PBS -A team",
        "#PBS -l select=2:ncpus=1:mpiprocs=1",
        "#PBS -l place=scatter:excl",
        "#PBS -l walltime=01:30:00",
        "#PBS -r n",
        f"#PBS -o '{tmp_path}/a b/pbs.log'",
    } <= set(lines)
    without = job_script(job(tmp_path), tmp_path)
    assert not [line for line in without.splitlines() if line.startswith("#PBS -q") or "ngpus" in line]
    with_gpus = job_script(replace(job(tmp_path), device="cuda", num_ranks=16), tmp_path).splitlines()
    assert "#PBS -l select=2:ncpus=8:mpiprocs=1:ngpus=8" in with_gpus


def test_the_script_runs_the_job_on_each_of_its_nodes(commands, tmp_path):
    launcher = ScheduledLauncher(tmp_path, Pbs())
    (tmp_path / KEY).mkdir()
    queue = DEFAULT_QUEUE.model_copy(update={"environment": {"HF_HOME": "/a cache"}})
    handle = launcher.submit(job(tmp_path, "say HF_HOME", queue))
    subprocess.run(["bash", "-n", str(tmp_path / KEY / "job.pbs")], check=True)
    (tmp_path / "record").write_text(shown("R"))
    assert launcher.poll(handle).state == "running"
    wait_for(lambda: (ended := read_job_file(tmp_path / KEY)) and ended.exit_code is not None, seconds=60)
    (tmp_path / "record").write_text(shown("F", Exit_status=0, substate=92))
    assert ScheduledLauncher(tmp_path, Pbs()).poll(handle).state == "succeeded"
    assert [starts(tmp_path, rank)[0][1:3] for rank in (0, 1)] == [["1", "2"]] * 2
    logs = [(tmp_path / KEY / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [log.splitlines()[-1] for log in logs] == ["/a cache"] * 2


@pytest.mark.parametrize(
    ("text", "record"),
    [
        (
            shown("Q", comment="Not Running: Insufficient amount of resource: ncpus"),
            SchedulerRecord("queued", "Not Running: Insufficient amount of resource: ncpus"),
        ),
        (
            shown("Q", comment="Can Never Run: Insufficient amount of resource: ncpus (R: 99 A: 4 T: 4)"),
            SchedulerRecord("stuck", "Can Never Run: Insufficient amount of resource: ncpus (R: 99 A: 4 T: 4)"),
        ),
        (shown("H", Hold_Types="u"), SchedulerRecord("queued", "state H")),
        (shown("R", exec_host="node1/0+node2/0"), SchedulerRecord("running")),
        (shown("E"), SchedulerRecord("running")),
        (shown("F", Exit_status=0, substate=92), SchedulerRecord("ended")),
        (
            shown("F", Exit_status=1, substate=93, comment="Job run at Mon Nov 23 on (node1) and failed"),
            SchedulerRecord("ended", "Job run at Mon Nov 23 on (node1) and failed (exit status 1)"),
        ),
        (
            shown("F", Exit_status=-29, substate=93, exec_host="node1/0"),
            SchedulerRecord("taken", "its time limit came (node1/0)"),
        ),
        (
            shown("F", Exit_status=271, comment="Job run on (node1) and exceeded resource walltime"),
            SchedulerRecord("taken", "it exceeded resource walltime"),
        ),
        (shown("F", Exit_status=-27, substate=93), SchedulerRecord("taken", "its memory ran out")),
        (shown("F", Exit_status=-14, substate=93), SchedulerRecord("taken", "a node of it was lost")),
        (shown("F", Exit_status=-20, substate=93), SchedulerRecord("taken", "its first node was lost")),
        (shown("F", Exit_status=265, substate=93), SchedulerRecord("taken", "its script got signal 9")),
        (
            shown("F", Exit_status=271, substate=91),
            SchedulerRecord("cancelled", "it was deleted: `tracejob 12.head` says by whom"),
        ),
    ],
)
def test_records_are_read(text, record):
    assert parse_record(text, NAME) == record


def test_records_of_versions_that_leave_out_quotation_marks_are_read():
    """Texts that begin with a digit are written as numbers that JSON does not know, and tabs as they are."""
    record = shown("R", Account_Name="00123", Variable_List={"A": "x\ty"}, project="2024-gpu", mem="5kb")
    bare = record.replace('"00123"', "00123").replace('"2024-gpu"', "2024-gpu").replace("\\t", "\t")
    assert bare != record and parse_record(bare, NAME) == SchedulerRecord("running")
    assert parse_record('{"timestamp": 1}', NAME) is None
    with pytest.raises(NoAnswerError, match="qstat printed 'Not JSON"):
        parse_record("Not JSON", NAME)


def test_a_job_whose_submitter_was_killed_before_it_wrote_the_name_is_found_and_not_submitted_twice(commands, tmp_path):
    """By the log that it writes: one of another home has its name."""
    launcher = ScheduledLauncher(tmp_path, Pbs())
    for home, name in ((tmp_path, NAME), (tmp_path / "elsewhere", "13.head")):
        (commands / "qsub").write_text(f"#!/bin/bash\necho {NAME}\n")
        launcher.submit(job(tmp_path))
        (tmp_path / KEY / SUBMISSION_FILE).unlink()
        (commands / "qsub").write_text("#!/bin/bash\necho 13.head\n")
        (tmp_path / "record").write_text(shown("Q", Output_Path=f"head:{home / KEY / 'pbs.log'}"))
        launcher.submit(job(tmp_path))
        assert launcher._name(KEY) == name
        for left in (SUBMISSION_FILE, "job.pbs"):
            (tmp_path / KEY / left).unlink()


def test_a_refusal_and_a_job_that_can_never_run_end_with_the_schedulers_words(commands, tmp_path):
    launcher = ScheduledLauncher(tmp_path, Pbs())
    (commands / "qsub").write_text("#!/bin/bash\necho 'qsub: Unknown queue' >&2\nexit 170\n")
    with pytest.raises(ValueError, match=r"PBS refuses the job: qsub: Unknown queue\. Change queue or ranks_per_node"):
        launcher.submit(job(tmp_path))
    (commands / "qsub").write_text("#!/bin/bash\necho 'qsub: cannot connect to server pbs (errno=111)' >&2\nexit 1\n")
    with pytest.raises(NoAnswerError, match="PBS does not answer: qsub: cannot connect"):
        launcher.submit(job(tmp_path))
    (commands / "qsub").write_text(f"#!/bin/bash\necho {NAME}\n")
    launcher.submit(job(tmp_path))
    (tmp_path / "record").write_text(shown("Q", comment="Can Never Run: no such resource"))
    status = launcher.poll(JobHandle(KEY))
    assert status.state == "stuck" and "pbs does not start job 12.head (Can Never Run: no such" in status.reason
