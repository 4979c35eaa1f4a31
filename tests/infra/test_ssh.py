"""The ssh launcher: hostfiles and refusals by themselves; jobs on two sshd of this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.code_digest import ROOT
from infra.jobs.launchers import Job, JobFailedError, JobLostError
from infra.jobs.open_launcher import launcher_of
from infra.jobs.scheduled_jobs import ScheduledLauncher
from infra.jobs.ssh_jobs import Host, Ssh, read_hostfile, refusal
from infra.jobs.supervisor import read_job_file
from tests.infra.test_launcher import is_alive, starts, wait_for
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.cluster.ssh_hosts import SshHosts, missing_programs, ssh_hosts

KEY = "0123abcd"
FLOW = """
import sys, time, pathlib
from tests.infra import test_ssh
root, hostfile = map(pathlib.Path, sys.argv[1:])
test_ssh.ScheduledLauncher(root, test_ssh.Ssh()).submit(test_ssh.job(root, "stop on request", hostfile))
time.sleep(600)
"""


@pytest.fixture
def hosts(tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    with ssh_hosts(tmp_path / "hosts") as started:
        yield started


@pytest.fixture
def launcher(tmp_path):
    return ScheduledLauncher(tmp_path, Ssh())


def job(tmp_path: Path, deed: str, hostfile: Path, num_ranks: int = 2, num_nodes: int = 2) -> Job:
    queue = DEFAULT_QUEUE.model_copy(update={"hostfile": str(hostfile)})
    arguments = (str(tmp_path / KEY), deed)
    return Job(KEY, "tests.support.toy_job", arguments, num_ranks, {"TOY": "1"}, num_nodes, queue)


def end_of(launcher, handle):
    return wait_for(lambda: None if (status := launcher.poll(handle)).state == "running" else status, seconds=120)


def test_a_hostfile_has_a_host_per_line_and_says_which_line_is_none(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# nodes\nalpha slots=8\n\nuser@beta  # no limit\nssh://gamma:2222\n")
    assert read_hostfile(path) == [Host("alpha", 8), Host("user@beta", None), Host("ssh://gamma:2222", None)]
    path.write_text("alpha slots=8 max_slots=8  # as OpenMPI writes it\nbeta max-slots=4\nfe80::1\n")
    assert read_hostfile(path) == [Host("alpha", 8), Host("beta", None), Host("fe80::1", None)]
    for text, why in [
        ("alpha slots=8\nbeta slots=none\n", "line 2: 'beta slots=none' is not"),
        ("alpha:8\n", "line 1: write `alpha slots=8`, or `ssh://alpha:8` for a port"),
        ("-oProxyCommand=x\n", "line 1"),
        ("alpha\nbeta\nalpha\n", "names alpha twice"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_hostfile(path)
    with pytest.raises(ValueError, match=r"resources.queue.hostfile: there is no file 'nowhere'"):
        read_hostfile(Path("nowhere"))


@pytest.mark.parametrize(
    ("exit_code", "said", "sentence"),
    [
        (0, "", ""),
        (255, "ssh: Could not resolve hostname alpha: Name or service not known", "alpha has no address"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "another key"),
        (255, "ssh: connect to host alpha port 22: No route to host", "does not answer .*No route to host"),
        (127, "exec: no such shell", "does not start the job: exec: no such shell"),
    ],
)
def test_what_ssh_says_becomes_one_sentence_with_the_fix(exit_code, said, sentence):
    assert re.search(sentence, refusal("alpha", Path("hosts"), Path("work"), exit_code, said)) or not sentence


def test_jobs_run_fail_stop_and_are_found_again_on_two_hosts(hosts: SshHosts, launcher, tmp_path):
    handle = launcher.submit(job(tmp_path, "succeed", hosts.hostfile))
    assert launcher_of(KEY, tmp_path).find(KEY) == handle
    assert end_of(launcher, handle).state == "succeeded"
    port = read_job_file(tmp_path / KEY).master_port
    assert [starts(tmp_path, rank)[0][1:] for rank in (0, 1)] == [["1", "2", str(port)]] * 2

    status = end_of(launcher, launcher.submit(job(tmp_path, "fail", hosts.hostfile)))
    assert (status.state, status.exit_code, status.failing_rank) == ("failed", 7, 1)
    assert status.log_tail[-1] == "the reason why"
    assert "rank 1 ended with exit code 7" in str(JobFailedError("training", status))
    assert not any(is_alive(int(start[0])) for rank in range(2) for start in starts(tmp_path, rank))

    before = len(starts(tmp_path))
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(tmp_path), str(hosts.hostfile)], cwd=ROOT)
    wait_for(lambda: len(starts(tmp_path)) == before + 1 and len(starts(tmp_path, 1)) == before + 1)
    flow.kill()
    flow.wait()
    again = ScheduledLauncher(tmp_path, Ssh())
    assert again.submit(job(tmp_path, "stop on request", hosts.hostfile)) == handle, "a running job is attached to"
    name = again._name(KEY)
    (tmp_path / KEY / "submission.json").unlink()
    again.submit(job(tmp_path, "stop on request", hosts.hostfile))
    assert again._name(KEY) == name, "also by a flow that died before it could note the job"
    again.cancel(handle, grace_seconds=60)
    assert launcher.poll(handle).state == "interrupted"
    assert len(starts(tmp_path)) == before + 1

    launcher.submit(job(tmp_path, "sleep", hosts.hostfile))
    wait_for(lambda: len(starts(tmp_path, 1)) == before + 2)
    launcher.cancel(handle, grace_seconds=0)
    assert launcher.poll(handle).state == "interrupted"
    assert not any(is_alive(int(start[0])) for rank in range(2) for start in starts(tmp_path, rank))


@contextmanager
def changed(path: Path, text: str):
    before = path.read_text()
    path.write_text(text)
    yield
    path.write_text(before)


def behind_walls(key: str, walls: str) -> str:
    """A key whose commands see another file system."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bwrap (apt-get install bubblewrap)")
    return f'command="exec bwrap --dev-bind / / {walls} /bin/sh -c \\"$SSH_ORIGINAL_COMMAND\\"" {key}'


def test_hosts_that_cannot_run_a_job_say_why_and_spare_ones_take_their_place(hosts: SshHosts, launcher, tmp_path):
    both, one = hosts.hostfile, tmp_path / "one"
    one.write_text("node1\n")
    with pytest.raises(ValueError, match=r"has 1 usable hosts with 1 slots or more, the job needs 2 \(num_ranks 2"):
        launcher.submit(job(tmp_path, "succeed", one))
    with pytest.raises(ValueError, match=r"has 0 usable hosts with 4 slots"):
        launcher.submit(job(tmp_path, "succeed", both, num_ranks=8))
    known, keys = hosts.root / "known_hosts", hosts.root / "authorized_keys"
    with changed(known, ""), pytest.raises(ValueError, match=r"key of host node1 is not known here: .*`ssh node1`"):
        launcher.submit(job(tmp_path, "succeed", both))
    with changed(keys, ""), pytest.raises(ValueError, match=r"node1 does not let this user in .*ssh-copy-id node1"):
        launcher.submit(job(tmp_path, "succeed", both))
    for walls, why in [
        (f"--tmpfs {tmp_path}", "host node1 does not see .*: put GLM46_HOME on a directory"),
        (f"--ro-bind {tmp_path} {tmp_path}", "host node1 may not write into"),
        (f"--tmpfs {Path(sys.executable).parent}", "host node1 has no Python at"),
        (f"--tmpfs {ROOT}", "host node1 has no Python at"),
        (f"--tmpfs {ROOT / 'infra'}", "host node1 cannot import the project"),
        (f"--ro-bind /dev/null {ROOT / 'tests/support/toy_job.py'}", "host node1 has other code of the project"),
    ]:
        with changed(keys, behind_walls(keys.read_text(), walls)), pytest.raises(ValueError, match=why):
            launcher.submit(job(tmp_path, "succeed", both))
    os.kill(int((hosts.root / "node1" / "sshd.pid").read_text()), signal.SIGKILL)
    with pytest.raises(ValueError, match=r"host node1 does not answer \(.*Connection refused\)"):
        launcher.submit(job(tmp_path, "succeed", both))
    handle = launcher.submit(job(tmp_path, "succeed", both, num_ranks=1, num_nodes=1))
    assert end_of(launcher, handle).state == "succeeded", "on the host that is left"


@pytest.mark.long
@pytest.mark.parametrize("name", ["node1", "node2"])
def test_a_host_that_goes_down_is_a_lost_job_which_runs_again_when_it_is_back(name, hosts, launcher, tmp_path):
    handle = launcher.submit(job(tmp_path, "sleep", hosts.hostfile))
    pids = [int(wait_for(lambda rank=rank: starts(tmp_path, rank))[0][0]) for rank in (0, 1)]
    hosts.kill_node(name)
    status = end_of(launcher, handle)
    assert (status.state, status.failing_rank) == ("lost", None)
    message = str(JobLostError("training", status, 12))
    assert f"was lost: no sign of life of {name} (node " in message and "checkpoint of step 12" in message
    wait_for(lambda: not any(map(is_alive, pids)), seconds=60)
    with pytest.raises(ValueError, match=f"has 1 usable hosts .*; host {name} does not answer"):
        launcher.submit(job(tmp_path, "succeed", hosts.hostfile))
    launcher.submit(job(tmp_path, "succeed", hosts.hostfile, num_ranks=1, num_nodes=1))
    assert end_of(launcher, handle).state == "succeeded", "on the host that is left"
    hosts.start_node(name)
    launcher.submit(job(tmp_path, "succeed", hosts.hostfile))
    assert end_of(launcher, handle).state == "succeeded"
