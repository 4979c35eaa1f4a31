"""The Slurm launcher: scripts and records without Slurm; jobs on a real Slurm of two nodes (long)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.schema import QueueResources
from infra.jobs import follow_job, scheduled_jobs, slurm_jobs, slurm_reasons
from infra.jobs.follow_job import JobSubmission, follow
from infra.jobs.launchers import SUBMISSION_FILE, Job, JobFailedError, JobHandle, JobLostError
from infra.jobs.open_launcher import launcher_of
from infra.jobs.scheduled_jobs import NoAnswerError, ScheduledLauncher, SchedulerRecord
from infra.jobs.scheduled_jobs import end_of as end_of_job
from infra.jobs.slurm_jobs import Slurm, job_script, parse_accounting, parse_record
from infra.jobs.supervisor import JobFile, read_job_file
from tests.conftest import ROOT
from tests.infra.test_launcher import is_alive, starts, wait_for
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.cluster.slurm import LIMITED_MEMORY, limits_memory, missing_programs, slurm_cluster

KEY = "0123abcd"
SHOWN = (
    "JobId=7 JobName=glm46-0123 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "JobState={} Reason={} Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "NodeList={} BatchHost=node1 NumNodes=2 TimeLimit=00:10:00"
)
"""As `scontrol show job --oneliner` of Slurm 22.05 prints it."""


def job(tmp_path, deed: str, num_ranks: int = 2, queue: QueueResources = DEFAULT_QUEUE) -> Job:
    return Job(KEY, "tests.support.toy_job", (str(tmp_path / KEY), deed), num_ranks, {"TOY": "1"}, 2, queue)


def test_the_script_asks_for_what_the_resources_say(tmp_path):
    queue = DEFAULT_QUEUE.model_copy(update={"partition": "gpu", "account": "team", "time_limit_minutes": 90})
    lines = job_script(job(tmp_path, "succeed", 16, queue), tmp_path / "a b").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=team",
        "#SBATCH --time=90",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --mem=0",
        "#SBATCH --no-requeue",
        f"#SBATCH --output='{tmp_path}/a b/slurm-%j.log'",
    } <= set(lines)
    per_node = shlex.split(shlex.split(lines[-1])[-1])
    started = "$SLURM_JOB_ID${SLURM_RESTART_COUNT:++$SLURM_RESTART_COUNT}"
    assert per_node[-4:] == ["infra.jobs.node_supervisor", str(tmp_path / "a b"), started, "$SLURM_NODEID"]
    short = job_script(job(tmp_path, "succeed", queue=queue.model_copy(update={"time_limit_minutes": 2})), tmp_path)
    assert "#SBATCH --signal=TERM@60" in short.splitlines(), "not when it begins"
    without = job_script(job(tmp_path, "succeed"), tmp_path)
    assert not [line for line in without.splitlines() if "partition" in line or "gpus" in line]
    with_gpus = job_script(replace(job(tmp_path, "succeed", 16), device="cuda"), tmp_path)
    assert "#SBATCH --gpus-per-node=8" in with_gpus.splitlines()


def test_a_job_in_a_container_needs_the_plugin_that_starts_it(tmp_path, monkeypatch):
    queue = DEFAULT_QUEUE.model_copy(update={"image": "team/glm46:1"})
    work_dir = tmp_path / "home" / "work" / KEY
    work_dir.mkdir(parents=True)
    printed = {"srun": "      --container=path   Path to OCI container bundle\n", "sbatch": "7\n"}
    answers = lambda *command, environment=None: subprocess.CompletedProcess(command, 0, printed[command[0]], "")  # noqa: E731
    monkeypatch.setattr(slurm_jobs, "ask", answers)
    with pytest.raises(ValueError, match=r"queue\.image team/glm46:1: this Slurm .* Install its plugin pyxis"):
        Slurm().submit(job(tmp_path, "succeed", queue=queue), work_dir)
    printed["srun"] += "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n"  # as pyxis 0.20 adds it
    assert Slurm().submit(job(tmp_path, "succeed", queue=queue), work_dir) == "7"
    started = shlex.split((work_dir / "job.sbatch").read_text().splitlines()[-1])
    home = tmp_path / "home"
    assert {
        "--container-image=team/glm46:1",
        f"--container-mounts={home}:{home}",
        f"--container-workdir={ROOT}",
    } <= set(started)


def test_a_job_whose_submitter_was_killed_before_it_wrote_the_name_is_found_and_not_submitted_twice(
    tmp_path, monkeypatch
):
    """squeue lists it with its script, beside one of another home."""
    others = f"6 {tmp_path}/elsewhere/{KEY}/job.sbatch\n"
    (tmp_path / "bin").mkdir()
    for name, text in {
        "sbatch": f"echo x >> {tmp_path}/submitted; echo 7",
        "squeue": f'[[ "$*" == *"--name=glm46-{KEY} "* ]] && cat {tmp_path}/listed',
        "scontrol": f"echo '{SHOWN.format('PENDING', 'Resources', '(null)')}'",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for own, num_submitted in ((f"7 {tmp_path}/{KEY}/job.sbatch\n", 1), ("", 2)):
        ScheduledLauncher(tmp_path, Slurm()).submit(job(tmp_path, "succeed"))
        (tmp_path / KEY / SUBMISSION_FILE).unlink()
        (tmp_path / "listed").write_text(others + own)
        launcher = ScheduledLauncher(tmp_path, Slurm())
        handle = launcher.submit(job(tmp_path, "succeed"))
        assert len((tmp_path / "submitted").read_text().split()) == num_submitted
        assert launcher._name(KEY) == "7" and launcher.poll(handle).state == "queued"
        (tmp_path / KEY / SUBMISSION_FILE).unlink()
        (tmp_path / KEY / "job.sbatch").unlink()
        (tmp_path / "submitted").write_text("")


def test_records_of_controller_and_accounting_are_read():
    shown = parse_record(SHOWN.format("PENDING", "Resources", "(null)"))
    assert shown == SchedulerRecord("queued", "Resources")
    not_known = "Job's_account_not_known,_so_it_can't_use_this_partition_(debug_allows_team)"
    for reason in ("PartitionTimeLimit", "InvalidAccount", not_known):
        assert parse_record(SHOWN.format("PENDING", reason, "(null)")).state == "stuck"
    assert parse_record(SHOWN.format("COMPLETING", "None", "node[1-2]")).state == "running"
    assert parse_accounting("CANCELLED by 0|None|node[1-2]\n") == SchedulerRecord("cancelled")
    assert parse_accounting("FAILED|None|node[1-2]\n") == SchedulerRecord("ended")
    assert parse_accounting("NODE_FAIL|None|node[1-2]\n") == SchedulerRecord("taken", "its node failed (node[1-2])")
    assert parse_accounting("\n") is None


@pytest.mark.parametrize(
    ("slurm", "exit_code", "state", "reason"),
    [
        ("COMPLETED", 0, "succeeded", ""),
        ("FAILED", 7, "failed", ""),
        ("FAILED", -signal.SIGKILL, "lost", ""),
        ("NODE_FAIL", None, "lost", "its node failed (node2)"),
        ("NODE_FAIL", 1, "lost", "its node failed (node2)"),
        ("PREEMPTED", None, "lost", "a job of higher priority took its nodes (node2)"),
        ("OUT_OF_MEMORY", -signal.SIGKILL, "lost", "a node's memory ran out (node2)"),
        ("TIMEOUT", None, "lost", "its time limit came (node2)"),
        ("FAILED", os.EX_TEMPFAIL, "lost", "its time limit came near, and it was asked to save"),
        ("FAILED", None, "lost", "the supervisor of its first node was killed"),
        ("CANCELLED", None, "interrupted", "it was cancelled"),
    ],
)
def test_every_end_has_a_state_and_a_reason(slurm, exit_code, state, reason):
    record = parse_record(SHOWN.format(slurm, "None", "node2"))
    failing_rank = None if exit_code is None else 1
    written = JobFile(1, 0.0, 1, 1, "7", exit_code=exit_code, failing_rank=failing_rank)
    assert end_of_job(record, written, is_cancelled=False) == (state, reason)


def test_a_job_that_ended_before_it_began_is_a_failed_one_unless_it_was_taken():
    for slurm, state in [("FAILED", "failed"), ("NODE_FAIL", "lost"), ("CANCELLED", "interrupted")]:
        assert end_of_job(parse_record(SHOWN.format(slurm, "None", "node2")), None, is_cancelled=False)[0] == state


PRINTED = {
    "partition": "PartitionName=debug AllowAccounts=ALL Default=YES MaxNodes=9 MaxTime=01:00:00 State=UP TotalNodes=2\n"
    "PartitionName=team AllowAccounts=one,two Default=NO MaxNodes=4 MaxTime=UNLIMITED State=UP TotalNodes=8\n"
    "PartitionName=old AllowAccounts=ALL Default=NO MaxNodes=1 MaxTime=UNLIMITED State=INACTIVE TotalNodes=8\n",
    "sinfo": "node1|idle|none\nnode2|drained|bad disk\nnode3|idle*|none\nnode4|mixed|none\nnode5|down*|Not responding",
    "associations": "mine\nours\nmine\n",
}
"""By `scontrol show partition --oneliner`, `sinfo` and `sacctmgr show associations`, shortened."""


@pytest.fixture
def recorded(monkeypatch):
    """Slurm's commands print what they printed."""

    def ask(*command: str) -> subprocess.CompletedProcess[str]:
        (printed,) = [text for word, text in PRINTED.items() if word in command]
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(slurm_reasons, "ask", ask)


@pytest.mark.parametrize(
    ("words", "request_changes", "fix"),
    [
        ("Invalid partition name specified", {"partition": "nowhere"}, "set queue.partition to one of debug, team"),
        ("Required partition not available (inactive or drain)", {}, "set queue.partition to one of debug, team"),
        ("Invalid account or account/partition combination specified", {}, "set queue.account to one of mine, ours"),
        ("Job's_account_not_permitted_to_use", {"partition": "team"}, "set queue.account to one of one,two"),
        ("PartitionTimeLimit", {}, "time_limit_minutes asks for 600 minutes, its partition allows 01:00:00: lower it"),
        ("Requested time limit is invalid (missing or exceeds some limit)", {}, "partition allows 01:00:00: lower it"),
        ("PartitionNodeLimit", {"partition": "team"}, "its partition has 8 and allows 4 for a job: lower num_ranks"),
        ("Invalid generic resource (gres) specification", {}, "set device to cpu"),
        ("Could not establish a configuration source", {}, "run on a machine where Slurm answers"),
        ("Invalid qos specification", {}, "set SBATCH_QOS in the shell of the run"),
        ("Out of licences", {}, "change queue or ranks_per_node"),
    ],
)
def test_every_refusal_names_what_to_change(recorded, words, request_changes, fix):
    asked = replace(slurm_reasons.Request("", "nobody", "600", "9"), **request_changes)
    assert fix in slurm_reasons.fix_of(words, asked)


def test_a_job_that_waits_says_for_which_nodes_and_how_it_goes_on(recorded):
    def reason(words: str, **values: str) -> str:
        return slurm_reasons.reason_of_waiting(words, "7", {"Partition": "debug", **values})

    nodes = (
        "node2 is drained (bad disk), node3 is idle and does not answer, node5 is down and does not answer (Not resp"
    )
    for words in ("Nodes_required_for_job_are_DOWN,_DRAINED", "ReqNodeNotAvail,_UnavailableNodes:node2"):
        assert reason(words).startswith(nodes)
    assert "state=resume" in reason("ReqNodeNotAvail")
    assert reason("Resources") == "Resources", "other jobs have them"
    assert reason("None") == "", "Slurm has not looked yet"
    assert reason("JobHeldAdmin") == "JobHeldAdmin: `scontrol release 7` lets it go"
    assert reason("BeginTime", Restarts="1", StartTime="12:00") == "it was requeued; it begins at 12:00"
    assert reason("BeginTime", Restarts="0", StartTime="12:00") == "BeginTime; it begins at 12:00"


def test_a_reason_of_several_lines_is_no_node(monkeypatch):
    printed = "node1|drained|bad disk\nseen on Monday\nnode2|idle|none\n"
    monkeypatch.setattr(slurm_reasons, "ask", lambda *command: subprocess.CompletedProcess(command, 0, printed, ""))
    assert slurm_reasons.unusable_nodes() == "node1 is drained (bad disk)"


def test_the_log_says_what_the_state_of_a_job_does_not():
    oom = "slurmstepd-node1: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been"
    launch = "srun: error: Task launch for StepId=1.0 failed on node node2: Communication connection failure"
    assert "lower micro_batch_sequences" in slurm_reasons.reason_in_log(["srun: error: task 0: Out Of Memory", oom])
    assert slurm_reasons.reason_in_log(["srun: error: Node failure on node2"]) == "its node failed: node2"
    assert slurm_reasons.reason_in_log([launch]) == "node2 did not start it (Communication connection failure)"
    assert slurm_reasons.reason_in_log(["srun: error: node1: task 0: Exited with exit code 1"]) == ""


AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class Answers:
    """Of Slurm's commands, by their names, one after the other; the last stays."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers, self.asked = answers, []

    def __call__(self, *command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        self.asked.append((command, environment))
        answers = self.answers[command[0]]
        text = answers.pop(0) if len(answers) > 1 else answers[0]
        is_error = "error" in text
        return subprocess.CompletedProcess(command, int(is_error), "" if is_error else text, text if is_error else "")


def submission(tmp_path, monkeypatch, **answers: list[str]) -> tuple[JobSubmission, list[str]]:
    """A job on a Slurm that gives these answers, and what is said of it."""
    monkeypatch.setattr(slurm_jobs, "ask", Answers(**answers))
    monkeypatch.setattr(follow_job, "ASK_AGAIN_SECONDS", 0.0)
    said: list[str] = []
    output = SimpleNamespace(say=said.append, report=lambda progress: None)
    launcher = ScheduledLauncher(tmp_path, Slurm(look_seconds=0.0))
    return JobSubmission(launcher, job(tmp_path, "succeed"), output, lambda: None), said


def test_a_controller_that_is_away_for_a_moment_ends_no_run_and_gets_no_job_twice(tmp_path, monkeypatch):
    """It takes the job and does not say so, is away when it is asked of it, and then ends it."""
    ended = SHOWN.format("FAILED", "NonZeroExitCode", "node2")
    answers = {
        "sbatch": [BUSY, "8"],
        "squeue": [AWAY, f"7 {tmp_path / KEY / 'job.sbatch'}"],
        "scontrol": [AWAY, SHOWN.format("RUNNING", "None", "node2"), AWAY, ended],
    }
    followed, said = submission(tmp_path, monkeypatch, **answers)
    with pytest.raises(JobFailedError):
        follow(followed.launcher, followed, followed.output)
    assert followed.launcher._name(KEY) == "7" and slurm_jobs.ask.answers["sbatch"] == ["8"]
    assert {line.partition(":")[0] for line in said} == {"Slurm does not answer"}
    assert any("Socket timed out" in line for line in said)


def test_a_controller_that_stays_away_ends_the_run(tmp_path, monkeypatch):
    followed, _ = submission(tmp_path, monkeypatch, sbatch=[AWAY])
    for module in (follow_job, scheduled_jobs):
        monkeypatch.setattr(module, "NO_ANSWER_SECONDS", 0.0)
    with pytest.raises(NoAnswerError, match=r"Slurm does not answer: Unable to contact .* run again when it answers"):
        follow(followed.launcher, followed, followed.output)
    shown = SHOWN.format("RUNNING", "None", "node2")
    followed, _ = submission(tmp_path, monkeypatch, squeue=[""], sbatch=["7"], scontrol=[shown, shown, AWAY])
    with pytest.raises(NoAnswerError, match=r"Slurm does not answer: Unable to contact .* run again when it answers"):
        follow(followed.launcher, followed, followed.output)


def test_a_job_is_given_nothing_of_the_allocation_that_submits_it(tmp_path, monkeypatch):
    """Slurm's own command options name it, whatever the shell says; what leads to the cluster stays."""
    kept = {"SLURM_CONF": "/etc/s.conf", "SLURM_CLUSTERS": "a", "SBATCH_QOS": "night"}
    for name, value in {"SLURM_MEM_PER_GPU": "4096", "SLURM_EXACT": "1", "SRUN_CPUS_PER_TASK": "1", **kept}.items():
        monkeypatch.setenv(name, value)
    followed, _ = submission(tmp_path, monkeypatch, sbatch=["7"])
    followed.submit()
    ((command, environment),) = slurm_jobs.ask.asked
    assert f"--job-name=glm46-{KEY}" in command
    assert {name: value for name, value in environment.items() if name.startswith(("SLURM", "SRUN", "SB"))} == kept


def test_a_job_that_never_starts_is_listed_and_can_be_stopped(tmp_path, monkeypatch):
    waits = SHOWN.format("PENDING", "QOSMinGRES", "(null)")
    answers = {"sbatch": ["7"], "scontrol": [waits, waits, AWAY, SHOWN.format("CANCELLED", "None", "(null)")]}
    followed, _ = submission(tmp_path, monkeypatch, scancel=[""], **answers)
    handle = followed.submit()
    status = followed.launcher.poll(handle)
    assert status.state == "stuck" and "set SBATCH_QOS" in status.reason
    followed.launcher.cancel(handle, grace_seconds=60)
    assert ("scancel", "7") in [command for command, _ in slurm_jobs.ask.asked]
    assert followed.launcher.poll(handle).state == "interrupted"


@pytest.fixture
def cluster(tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    with slurm_cluster(tmp_path / "slurm") as started:
        yield started


@pytest.fixture
def launcher(cluster, tmp_path):
    return ScheduledLauncher(tmp_path, Slurm(look_seconds=0.2))


def end_of(launcher, handle):
    return wait_for(
        lambda: None if (status := launcher.poll(handle)).state in ("queued", "running") else status, seconds=120
    )


@pytest.mark.long
def test_jobs_run_fail_stop_and_are_lost_on_a_real_slurm(cluster, launcher, tmp_path):
    """One cluster for all: it takes a while to come up."""
    handle = launcher.submit(job(tmp_path, "succeed"))
    assert launcher_of(KEY, tmp_path).find(KEY) == handle
    assert end_of(launcher, handle).state == "succeeded"
    port = read_job_file(tmp_path / KEY).master_port
    assert [starts(tmp_path, rank)[0][1:] for rank in (0, 1)] == [["1", "2", str(port)]] * 2

    queue = DEFAULT_QUEUE.model_copy(update={"environment": {"HF_HOME": "/a cache"}})
    assert end_of(launcher, launcher.submit(job(tmp_path, "say HF_HOME", queue=queue))).state == "succeeded"
    logs = [(tmp_path / KEY / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [log.splitlines()[-1] for log in logs] == ["/a cache"] * 2

    status = end_of(launcher, launcher.submit(job(tmp_path, "fail", num_ranks=4)))
    assert (status.state, status.exit_code, status.failing_rank) == ("failed", 7, 1)
    assert "rank 1 ended with exit code 7" in str(JobFailedError("training", status))

    status = end_of(launcher, launcher.submit(job(tmp_path, "lose a rank")))
    assert (status.state, status.exit_code, status.failing_rank) == ("lost", -signal.SIGKILL, 1)

    with pytest.raises(ValueError, match=r"Slurm refuses the job: .*partition.*; set queue.partition to one of debug"):
        launcher.submit(job(tmp_path, "succeed", queue=DEFAULT_QUEUE.model_copy(update={"partition": "nowhere"})))

    with pytest.raises(ValueError, match=r"queue\.image a: this Slurm starts no containers, .* Install its plugin"):
        launcher.submit(job(tmp_path, "succeed", queue=DEFAULT_QUEUE.model_copy(update={"image": "a"})))

    launcher.submit(job(tmp_path, "succeed", queue=DEFAULT_QUEUE.model_copy(update={"time_limit_minutes": 600})))
    status = end_of(launcher, handle)
    assert status.state == "stuck" and "does not start job" in str(JobFailedError("training", status))
    assert "(PartitionTimeLimit): time_limit_minutes asks for 10:00:00, its partition allows 01:00:00" in status.reason
    stuck = launcher._name(KEY)

    before = len(starts(tmp_path))
    launcher.submit(job(tmp_path, "stop on request"))
    wait_for(lambda: len(starts(tmp_path)) == before + 1 and len(starts(tmp_path, 1)) > before, seconds=60)
    assert launcher.submit(job(tmp_path, "stop on request")) == handle, "a running job is attached to"
    submitted = (tmp_path / KEY / SUBMISSION_FILE).read_text()
    (tmp_path / KEY / SUBMISSION_FILE).unlink()  # as a kill between sbatch and the write
    launcher.submit(job(tmp_path, "stop on request"))
    assert (tmp_path / KEY / SUBMISSION_FILE).read_text() == submitted
    assert Slurm().look(stuck, tmp_path).state == "cancelled"
    launcher.cancel(handle, grace_seconds=60)
    assert launcher.poll(handle).state == "interrupted"
    assert len(starts(tmp_path)) == before + 1

    queued = queued_behind(launcher, tmp_path)
    launcher.cancel(queued, grace_seconds=60)
    status = launcher.poll(queued)
    assert (status.state, status.exit_code) == ("interrupted", None), "not how the start before it ended"


def queued_behind(launcher, tmp_path) -> JobHandle:
    """A job of the same key whose nodes another job holds."""
    holder = Job("ffff0000", "tests.support.toy_job", (str(tmp_path / "ffff0000"), "sleep"), 2, {}, 2, DEFAULT_QUEUE)
    launcher.submit(holder)
    wait_for(lambda: launcher.poll(JobHandle(holder.key)).state == "running", seconds=60)
    handle = launcher.submit(job(tmp_path, "succeed"))
    wait_for(lambda: launcher.poll(handle).reason in ("Resources", "Priority"), seconds=60)
    return handle


@pytest.mark.long
def test_a_node_that_goes_down_is_a_lost_job_which_runs_again_on_the_node_that_came_back(cluster, launcher, tmp_path):
    handle = launcher.submit(job(tmp_path, "sleep"))
    pids = [int(wait_for(lambda rank=rank: starts(tmp_path, rank), seconds=60)[0][0]) for rank in (0, 1)]
    cluster.kill_node("node2")
    status = end_of(launcher, handle)
    assert status.state == "lost", status
    message = str(JobLostError("training", status, 12))
    log = Slurm().log_path(launcher._name(KEY), tmp_path / KEY).read_text()
    assert re.search(r"its node failed: node2|no sign of life of node2", message), f"{status}\n{log}"
    assert "continues from the checkpoint of step 12" in message
    wait_for(lambda: not any(map(is_alive, pids)), seconds=60)
    cluster.start_node("node2")
    launcher.submit(job(tmp_path, "succeed"))
    assert end_of(launcher, JobHandle(KEY)).state == "succeeded"
    time.sleep(0.1)
    assert [start[1] for start in starts(tmp_path)] == ["1", "2"]


def says_while_it_waits(launcher, handle, words: str) -> None:
    wait_for(lambda: words in launcher.poll(handle).reason, seconds=60)
    assert launcher.poll(handle).state == "queued"


@pytest.mark.long
def test_a_job_that_waits_for_a_drained_node_or_was_requeued_says_so_and_begins_again(cluster, launcher, tmp_path):
    cluster.set_node("node2", "drain", "bad disk")
    handle = launcher.submit(job(tmp_path, "sleep"))
    says_while_it_waits(launcher, handle, "node2 is drained (bad disk); once mended, `scontrol update")
    cluster.set_node("node2", "resume")
    wait_for(lambda: starts(tmp_path) and starts(tmp_path, 1), seconds=60)

    name = launcher._name(KEY)
    for command in (["update", f"jobid={name}", "requeue=1"], ["requeue", name]):
        subprocess.run(["scontrol", *command], check=True)
    says_while_it_waits(launcher, handle, "it was requeued; it begins at")
    # Not in the second of the requeue: nodes refuse credentials that are no younger ("Job credential revoked").
    subprocess.run(["scontrol", "update", f"jobid={name}", "StartTime=now+2"], check=True)
    wait_for(lambda: len(starts(tmp_path)) == len(starts(tmp_path, 1)) == 2, seconds=60)
    wait_for(lambda: launcher.poll(handle).state == "running")
    with cluster.without_controller():
        assert [time.sleep(0.3) or launcher.poll(handle).state for _ in range(5)] == ["running"] * 5
    assert starts(tmp_path)[1][1:] == starts(tmp_path, 1)[1][1:], "ranks of one start"

    subprocess.run(["scancel", name], check=True)
    status = end_of(launcher, handle)
    assert (status.state, status.reason) == ("interrupted", "it was cancelled")
    started = [start for rank in (0, 1) for start in starts(tmp_path, rank)]
    assert not [start for start in started if is_alive(int(start[0]))], "whatever Slurm knew of them"

    subprocess.run(["scontrol", "update", "partition=debug", "AllowAccounts=team"], check=True)
    handle = launcher.submit(job(tmp_path, "succeed", queue=DEFAULT_QUEUE.model_copy(update={"account": "nobody"})))
    assert "set queue.account to one of team, and run again" in end_of(launcher, handle).reason


@pytest.mark.long
def test_a_node_that_answers_no_more_before_slurm_sees_it_is_a_lost_job(tmp_path):
    """With Slurm's own patience: it asks a node only every 100 s whether it lives."""
    if reason := missing_programs():
        pytest.skip(reason)
    launcher = ScheduledLauncher(tmp_path, Slurm(look_seconds=0.2))
    with slurm_cluster(tmp_path / "slurm", SlurmdTimeout="300") as cluster:
        handle = launcher.submit(job(tmp_path, "sleep"))
        wait_for(lambda: starts(tmp_path) and starts(tmp_path, 1), seconds=60)
        cluster.kill_node("node2")
        status = end_of(launcher, handle)
        assert (status.state, status.reason) == ("lost", "no sign of life of node2 (node 1)")
        launcher.submit(job(tmp_path, "succeed"))
        says_while_it_waits(launcher, handle, "node2 is completing and does not answer")
        cluster.start_node("node2", idle=False)
        assert end_of(launcher, handle).state == "succeeded"

        cluster.kill_node("node2")
        launcher.submit(job(tmp_path, "succeed"))
        wait_for(lambda: launcher.poll(handle).state == "running", seconds=60)
        log = Slurm().log_path(launcher._name(KEY), tmp_path / KEY)
        wait_for(lambda: log.exists() and "Task launch" in log.read_text(), seconds=60)
        cluster.start_node("node2", idle=False)
        status = end_of(launcher, handle)
        assert status.state == "lost" and status.reason.startswith("node2 did not start it (Communication connection")


@pytest.mark.long
def test_a_job_that_takes_more_memory_than_a_node_has_is_lost_and_the_fix_is_named(tmp_path):
    if reason := missing_programs() or ("" if limits_memory() else "control groups are not version 1, or not ours"):
        pytest.skip(reason)
    launcher = ScheduledLauncher(tmp_path, Slurm(look_seconds=0.2))
    with slurm_cluster(tmp_path / "slurm", **LIMITED_MEMORY):
        status = end_of(launcher, launcher.submit(replace(job(tmp_path, "fill memory", 1), num_nodes=1)))
    assert status.state == "lost" and status.reason.startswith("memory ran out: a rank needs less with a lower micro_")
