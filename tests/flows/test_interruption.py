"""Ctrl-C, SIGTERM and a closed terminal: a command says at once that it ends and what keeps running without it; jobs
are listed and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from flows.cli import jobs
from infra.jobs.launchers import Job, JobHandle, LocalLauncher
from infra.jobs.scheduled_jobs import NoAnswerError
from tests.conftest import ROOT
from tests.infra.test_launcher import wait_for
from tests.support.pipeline import command, environment, glm46

KEY = "0123456789abcdef" * 4
MAX_SECONDS = 10
"""Seconds from the signal to the end of the process, on a busy machine; the command promises two."""
BUSY = """
import hashlib, sys
from flows.cli.interruption import interruptible
from infra.home import open_home
with interruptible(open_home()):
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a call that no signal interrupts", b"", 10**9)
"""


@pytest.fixture(autouse=True)
def signals_reach_programs():
    """Also where the tests run under nohup or in a script's background: what a process ignores, its programs ignore
    too."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def training(home):
    """A job of this home that runs detached and saves when it is asked to."""
    launcher = LocalLauncher(home.work_root)
    work_dir = home.work_dir(KEY)
    work_dir.mkdir(parents=True)
    arguments = (str(work_dir), "stop on request")
    launcher.submit(Job(KEY, "tests.support.toy_job", arguments, 1, {}, name="train mid_reasoning"))
    wait_for(lambda: (work_dir / "started-0").exists())
    yield launcher
    launcher.cancel(JobHandle(KEY), grace_seconds=0)


def running_java(home_dir):
    """Processes of Spark that use the home."""
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "java" and str(home_dir) in " ".join(process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_ends_while_its_main_thread_is_inside_a_call(number, training, home):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        env=environment(home.root),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "busy\n"
    process.send_signal(number)
    sent = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - sent < MAX_SECONDS
    assert said.strip() == (
        f"glm46: interrupted; run again to continue. This keeps running detached: train mid_reasoning "
        f"({KEY[:12]}). `glm46 jobs list` shows it, `glm46 jobs stop` lets it save and end"
    )
    assert training.poll(JobHandle(KEY)).state == "running"


def test_ctrl_c_on_a_run_says_so_before_any_server_and_the_job_is_listed_and_stopped(training, home, tmp_path):
    """The whole process group gets the signal, as on a terminal."""
    with open(tmp_path / "log", "wb") as log:
        run = subprocess.Popen(
            command("run", "micro"),
            cwd=ROOT,
            env=environment(home.root),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(lambda: running_java(home.root) or run.poll() is not None, seconds=240)
        os.killpg(run.pid, signal.SIGINT)
        sent = time.monotonic()
        assert run.wait(timeout=60) == 1
        assert time.monotonic() - sent < MAX_SECONDS
    finally:
        run.kill()
    wait_for(lambda: not running_java(home.root), seconds=20)
    said = (tmp_path / "log").read_text()
    assert said.startswith(
        f"train mid_reasoning ({KEY[:12]}) of another run goes on: this run joins it if it needs the"
    )
    assert "glm46: interrupted; run again to continue. This keeps running detached: train mid_reasoning" in said
    assert not [word for word in ("EventsWorker", "server stopped", "Traceback") if word in said], said
    listed = glm46("jobs", "list", home=home.root)
    assert listed.exit_code == 0 and listed.stdout.split()[:4] == [KEY[:12], "train", "mid_reasoning", "running"]
    assert str(home.work_dir(KEY)) in listed.stdout
    stopped = glm46("jobs", "stop", KEY[:6], home=home.root)
    assert stopped.exit_code == 0 and stopped.stdout.split()[:4] == [KEY[:12], "train", "mid_reasoning", "interrupted"]
    refused = glm46("jobs", "stop", home=home.root)
    assert refused.exit_code == 2 and "no job runs" in refused.stderr


def test_a_scheduler_that_does_not_answer_hides_no_job_and_keeps_no_command(training, home, monkeypatch):
    """Neither one that is down nor one whose commands this machine does not have."""
    for problem in (NoAnswerError("Slurm does not answer"), FileNotFoundError("scontrol")):

        def poll(_handle, problem=problem):
            raise problem

        monkeypatch.setattr(jobs, "launcher_of", lambda key, root, poll=poll: SimpleNamespace(poll=poll))
        (job,) = jobs.running_jobs(home)
        assert (job.key, job.state, "unknown" in job.describe()) == (KEY, "unknown", True)
