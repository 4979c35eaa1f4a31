"""The local launcher with a toy job: found again, never started twice, no rank outlives its supervisor, failures are
named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from configs.schema import PhaseQueue
from infra.jobs.build_ops import op_environment
from infra.jobs.launchers import (
    CPU_ENVIRONMENT,
    CUDA_ENVIRONMENT,
    LOOPBACK,
    Job,
    JobFailedError,
    JobHandle,
    JobLostError,
    JobStatus,
    LocalLauncher,
)
from infra.jobs.supervisor import read_job_file
from tests.conftest import ROOT
from tests.support.cluster.default_queue import DEFAULT_QUEUE

KEY = "0123abcd"


@pytest.fixture
def launcher(tmp_path):
    launcher = LocalLauncher(tmp_path)
    yield launcher
    if launcher.find(KEY):
        launcher.cancel(JobHandle(KEY), grace_seconds=0)


def toy(tmp_path, deed: str, num_ranks: int = 1) -> Job:
    return Job(KEY, "tests.support.toy_job", (str(tmp_path / KEY), deed), num_ranks, {"TOY": "1"})


def wait_for(condition, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def end_of(launcher: LocalLauncher, handle: JobHandle, seconds: float = 120.0) -> JobStatus:
    return wait_for(lambda: None if (status := launcher.poll(handle)).state == "running" else status, seconds)


def starts(tmp_path, rank: int = 0) -> list[list[str]]:
    path = tmp_path / KEY / f"started-{rank}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_job_runs_detached_and_is_found_by_its_key(launcher, tmp_path):
    assert launcher.find(KEY) is None
    handle = launcher.submit(toy(tmp_path, "succeed", num_ranks=2))
    assert launcher.find(KEY) == handle
    status = end_of(LocalLauncher(tmp_path), handle)
    assert (status.state, status.exit_code) == ("succeeded", 0)
    job = read_job_file(tmp_path / KEY)
    assert [starts(tmp_path, rank)[0][1:] for rank in (0, 1)] == [["1", "2", str(job.master_port)]] * 2


def test_a_queue_may_not_name_the_variables_that_ranks_are_given(launcher, tmp_path):
    """By what a rank has and this process does not, but for what readline sets."""
    job = replace(toy(tmp_path, "say all"), environment={"OMP_NUM_THREADS": "1"})
    assert end_of(launcher, launcher.submit(job)).state == "succeeded"
    *_, given = (tmp_path / KEY / "logs" / "rank-0.log").read_text().splitlines()
    others = {*os.environ, *LOOPBACK, "COLUMNS", "LINES"}
    names = {*given.split()} - others | {*CUDA_ENVIRONMENT, "PATH", "OMP_NUM_THREADS"}
    assert {"RANK", "MASTER_PORT", "GLM46_FENCING"} <= names
    fields = DEFAULT_QUEUE.model_dump()
    for name in names:
        with pytest.raises(ValidationError, match=f"environment names {name}, which the launcher sets itself"):
            PhaseQueue(**fields | {"environment": {name: "1"}})
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "NOT-A-NAME"):
        with pytest.raises(ValidationError, match=r"give the nodes credentials of their own|letters, digits and"):
            PhaseQueue(**fields | {"environment": {name: "1"}})
    allowed = {"HF_HOME": "/cache", "NCCL_IB_TC": "160", "TOKENIZERS_PARALLELISM": "false", "https_proxy": ""}
    assert PhaseQueue(**fields | {"environment": allowed}).environment == allowed


def test_a_running_job_is_attached_to_and_not_started_twice(launcher, tmp_path):
    launcher.submit(toy(tmp_path, "sleep"))
    wait_for(lambda: starts(tmp_path))
    threads = [
        threading.Thread(target=LocalLauncher(tmp_path).submit, args=(toy(tmp_path, "sleep"),)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launcher.poll(JobHandle(KEY)).state == "running" and len(starts(tmp_path)) == 1


def test_many_submit_at_once_and_one_starts(launcher, tmp_path):
    threads = [
        threading.Thread(target=LocalLauncher(tmp_path).submit, args=(toy(tmp_path, "sleep"),)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: starts(tmp_path))
    time.sleep(0.3)
    assert len(starts(tmp_path)) == 1


def test_a_killed_supervisor_is_recognised_takes_its_ranks_along_and_is_replaced(launcher, tmp_path):
    handle = launcher.submit(toy(tmp_path, "sleep", num_ranks=2))
    pids = [int(wait_for(lambda rank=rank: starts(tmp_path, rank))[0][0]) for rank in (0, 1)]
    os.kill(read_job_file(tmp_path / KEY).pid, signal.SIGKILL)
    assert end_of(launcher, handle).state == "lost"
    wait_for(lambda: not any(map(is_alive, pids)))
    launcher.submit(toy(tmp_path, "succeed", num_ranks=2))
    assert end_of(launcher, handle).state == "succeeded"
    assert [start[1] for start in starts(tmp_path)] == ["1", "2"]


def test_a_failing_rank_takes_the_others_along_and_is_named(launcher, tmp_path):
    handle = launcher.submit(toy(tmp_path, "fail", num_ranks=3))
    status = end_of(launcher, handle)
    assert (status.state, status.exit_code, status.failing_rank) == ("failed", 7, 1)
    wait_for(lambda: not any(is_alive(int(start[0])) for rank in range(3) for start in starts(tmp_path, rank)))
    message = str(JobFailedError("training", status))
    assert "rank 1 ended with exit code 7" in message and "the reason why" in message and "rank-1.log" in message


def test_a_killed_rank_is_a_lost_job_and_named_with_its_signal(launcher, tmp_path):
    handle = launcher.submit(toy(tmp_path, "sleep"))
    os.kill(int(wait_for(lambda: starts(tmp_path))[0][0]), signal.SIGKILL)
    status = end_of(launcher, handle)
    assert (status.state, status.exit_code) == ("lost", -9)
    message = str(JobLostError("training", status, 12))
    assert (
        "rank 0 was killed (SIGKILL)" in message
        and "rank-0.log; it continues from the checkpoint of step 12" in message
    )


def test_a_rank_that_dies_in_a_collective_is_named_and_not_the_one_that_waits_for_it(launcher, tmp_path):
    status = end_of(launcher, launcher.submit(toy(tmp_path, "lose a rank", num_ranks=2)), seconds=120)
    assert (status.state, status.exit_code, status.failing_rank) == ("lost", -signal.SIGKILL, 1)
    message = str(JobLostError("training of phase toy", status, 0))
    assert "rank 1 was killed (SIGKILL)" in message and "rank-1.log; it continues from its beginning" in message
    assert not any(is_alive(pid) for pid in read_job_file(tmp_path / KEY).rank_pids)


def test_cancel_lets_a_job_save_and_kills_one_that_will_not(launcher, tmp_path):
    handle = launcher.submit(toy(tmp_path, "stop on request"))
    wait_for(lambda: starts(tmp_path))
    time.sleep(0.2)
    launcher.cancel(handle, grace_seconds=20)
    assert launcher.poll(handle).state == "interrupted"
    launcher.submit(toy(tmp_path, "sleep"))
    wait_for(lambda: len(starts(tmp_path)) == 2)
    launcher.cancel(handle, grace_seconds=0)
    assert launcher.poll(handle).state in ("failed", "lost")


def test_settings_of_cpus_never_reach_the_ranks_of_a_job_on_gpus(launcher, tmp_path, monkeypatch):
    for name, value in CPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    on_cpu, on_gpu = toy(tmp_path, "sleep"), replace(toy(tmp_path, "sleep"), device="cuda")
    assert CPU_ENVIRONMENT.items() <= on_cpu.command({}).environment.items()
    launcher.submit(on_gpu)
    pid = wait_for(lambda: starts(tmp_path))[0][0]
    of_rank = dict(pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if pair)
    assert {name: of_rank.get(name, "") for name in CPU_ENVIRONMENT} == CUDA_ENVIRONMENT
    assert "OMP_WAIT_POLICY" not in of_rank, "libgomp knows no empty policy"
    assert (on_cpu.gpus_per_node, replace(on_gpu, num_ranks=16, num_nodes=2).gpus_per_node) == (0, 8)


def test_without_a_compiler_the_op_builder_says_what_to_install():
    finished = subprocess.run(
        [sys.executable, "-m", "infra.jobs.build_ops"],
        cwd=ROOT,
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == "no C++ compiler c++ on PATH: install one (Debian: apt-get install g++) or set CXX\n"


def test_the_op_is_found_where_launched_jobs_look_for_it():
    finished = subprocess.run(
        [sys.executable, "-m", "infra.jobs.build_ops"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0 and op_environment()["TORCH_EXTENSIONS_DIR"] in finished.stdout, finished.stderr
    assert list(Path(op_environment()["TORCH_EXTENSIONS_DIR"]).rglob("deepspeed_shm_comm.so"))
