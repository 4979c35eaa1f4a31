"""Leases between machines: real processes that are killed and paused, clocks apart, answers that are lost, servers that
cannot write on a condition."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError

from infra.home import Home
from infra.step import Progress
from infra.storage import lease
from infra.storage.lease import LeaseLostError, acquire_lease, lease_name, read_lease
from infra.storage.open_store import open_store
from infra.storage.s3_store import MAX_ATTEMPTS, S3Store
from infra.storage.store import Store, step_key
from tests.conftest import ROOT
from tests.support.faulty_s3 import Request, faulty
from tests.support.toy_steps import Numbers, write_numbers

NUM_CLIENT_TRIES = MAX_ATTEMPTS + 1
"""After which botocore gives up: it does not count the first."""
SHORT_SECONDS = 1.5
FIRST_KEY = step_key({"step": "write_numbers", "recipe": None, "inputs": {}, "code": "", "distributions": {}})


@pytest.fixture(params=["local", "s3"])
def uri(request, tmp_path) -> str:
    """Of an empty store."""
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return f"s3://glm46/leases-{tmp_path.name}"
    return str(tmp_path / "store")


@pytest.fixture
def run(uri, tmp_path):
    """Starts the toy program in a home of its own; what runs at the end is killed."""
    processes = []

    def start(home: str, **environment: str) -> subprocess.Popen[str]:
        values = {"GLM46_HOME": str(tmp_path / home), "PYTHONPATH": str(ROOT), "TOY_LEASE_SECONDS": str(SHORT_SECONDS)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.toy_steps", uri],
                env={**os.environ, **values, **environment},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_computing(store: Store, home: Path) -> bool:
    """Whether a run of a home holds the first step's lease and has begun to write."""
    record = read_lease(store, FIRST_KEY)
    return record is not None and record.home == str(home) and (home / "work" / FIRST_KEY / "attempt").exists()


def test_two_homes_compute_a_step_once(uri, run, tmp_path):
    store = open_store(uri, Home(tmp_path / "watching"))
    first = run("one", TOY_GATE=str(tmp_path / "gate"), TOY_MACHINE="one")
    wait_until(lambda: is_computing(store, tmp_path / "one"))
    second = run("two", TOY_MACHINE="two")
    said = second.stderr.readline()
    assert re.search(rf"another run computes this \(host \S+, process {first.pid}, since .* UTC\); waiting", said)
    (tmp_path / "gate").touch()
    outputs = [process.communicate(timeout=120) for process in (first, second)]
    assert outputs[0][0] == outputs[1][0] != ""
    computed = re.findall(r"'(\w+)'", "".join(re.findall(r"computed \[.*\]", outputs[0][1] + outputs[1][1])))
    assert sorted(computed) == ["sum_numbers", "write_numbers"]
    assert {manifest.fence for manifest in store.iterate_manifests()} <= {1, 2}


@pytest.mark.parametrize("machine", ["", "another"])
def test_of_a_killed_holder_another_home_takes_the_work_over(machine, uri, run, tmp_path):
    """On the same machine at once: a lease of an hour that nobody renews would else be waited for."""
    store = open_store(uri, Home(tmp_path / "watching"))
    seconds = str(SHORT_SECONDS) if machine else "3600"
    killed = run("one", TOY_GATE=str(tmp_path / "gate"), TOY_MACHINE=machine, TOY_LEASE_SECONDS=seconds)
    wait_until(lambda: is_computing(store, tmp_path / "one"))
    killed.kill()
    killed.wait()
    other, errors = run("two").communicate(timeout=120)
    assert "computed ['write_numbers', 'sum_numbers']" in errors
    assert ("no longer renews its lease: its work is taken over" in errors) == bool(machine)
    again, errors = run("one").communicate(timeout=120)
    assert again == other != "" and "computed []" in errors
    assert store.load(FIRST_KEY, Numbers).manifest.fence == 2


def test_a_paused_holder_neither_commits_nor_removes_what_the_next_one_left(uri, run, tmp_path):
    store = open_store(uri, Home(tmp_path / "watching"))
    paused = run("one", TOY_GATE=str(tmp_path / "gate"), TOY_MACHINE="one")
    wait_until(lambda: is_computing(store, tmp_path / "one"))
    paused.send_signal(signal.SIGSTOP)
    digest, errors = run("two").communicate(timeout=120)
    assert "computed ['write_numbers', 'sum_numbers']" in errors
    (tmp_path / "gate").touch()
    paused.send_signal(signal.SIGCONT)
    nothing, errors = paused.communicate(timeout=120)
    assert nothing == "" and paused.returncode != 0
    assert re.search(r"LeaseLostError: .*another run \(host .*\) has taken over the work.*run again", errors)
    manifests = list(store.iterate_manifests())
    assert [manifest.generation for manifest in manifests] == [0, 0]
    assert store.load(FIRST_KEY, Numbers).manifest.fence == 2
    assert not [name for manifest in manifests for name in store.broken_files(manifest, deep=True)]
    again, errors = run("one").communicate(timeout=120)
    assert again == digest and "computed []" in errors


@pytest.fixture
def store(uri, tmp_path, monkeypatch) -> Store:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.6)
    return open_store(uri, Home(tmp_path / "home"))


def silence(held: lease.Lease) -> None:
    """End the renewals as a power cut does: the lease is not released."""
    held._try_to_write = lambda record: None
    held._released.set()
    held._thread.join()


@pytest.mark.parametrize("minutes", [-10, 10])
def test_clocks_that_are_minutes_apart_change_nothing(minutes, store, tmp_path, monkeypatch):
    after = lease._after
    monkeypatch.setattr(lease, "_after", lambda seconds: after(seconds + 60 * minutes))
    held = acquire_lease(store, "key", tmp_path, lambda message: None)
    taken, said = [], []
    waiter = threading.Thread(target=lambda: taken.append(acquire_lease(store, "key", tmp_path, said.append)))
    waiter.start()
    wait_until(lambda: held._record.num_renewals >= 6)
    assert not taken and len(said) == 1, "it was renewed: nobody takes it"
    silence(held)
    waiter.join()
    assert taken[0].fence == held.fence + 1 and "no longer renews" in said[-1]
    with pytest.raises(LeaseLostError):
        held.confirm()
    taken[0].release()


def test_a_lease_that_cannot_be_read_is_taken_when_nobody_changes_it(store, tmp_path):
    store.replace_version(lease_name("key"), b'{"fence":', None)
    said: list[str] = []
    acquire_lease(store, "key", tmp_path, said.append).release()
    assert "its lease cannot be read" in said[0] and "taken over" in said[1]


def test_a_step_whose_lease_is_lost_stops_at_its_next_report(store, tmp_path):
    """It asks no teacher for the rest of what another run asks for."""
    asked = []

    def ask(**arguments):
        silence(store._leases[key])
        acquire_lease(store, key, tmp_path, lambda message: None).release()
        for question in range(3):
            arguments["output"].report(Progress(question, 3, "questions"))
            asked.append(question)
        raise AssertionError("asked all")

    toy = type(write_numbers)(ask, ("numbers/*",), (), (), (), ())
    identity = {"step": "ask", "recipe": None, "inputs": {}, "code": "", "distributions": {}}
    key = step_key(identity)
    with pytest.raises(LeaseLostError, match="run again"):
        store.find_or_compute(
            toy, identity, lambda output: toy(output=output), lambda progress: None, lambda message: None
        )
    assert asked == [] and store.manifest_names() == []


def test_of_many_who_replace_one_version_one_succeeds(tmp_path):
    store = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    won: list[str | None] = []

    def replace(version: str | None, data: bytes) -> None:
        won.append(store.replace_version(lease_name("key"), data, version))

    for _ in range(20):
        won.clear()
        version = store.replace_version(lease_name("key"), b"first", None)
        threads = [threading.Thread(target=replace, args=(version, str(n).encode())) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = filter(None, won)
        found = store.read_version(lease_name("key"))
        assert found is not None and found[1] == winner and version is not None
        assert not store.delete_version(lease_name("key"), version) and store.delete_version(lease_name("key"), winner)


def test_a_lease_whose_answers_are_lost_is_held(home, s3_server, monkeypatch, tmp_path):
    """The server has written it; asked again, it refuses, since the version has changed."""
    lost = [True, False, True, False]

    def at_leases(request: Request) -> str:
        is_lease = request.method == "PUT" and "/leases/" in request.path
        return "lost" if is_lease and lost and lost.pop(0) else ""

    with faulty(s3_server, at_leases) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        held = acquire_lease(S3Store(f"s3://glm46/lost-{tmp_path.name}", home), "key", home.root, lambda message: None)
        held.confirm()
        assert len(server.faults) == 2
        monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001)
        lost += [True] * NUM_CLIENT_TRIES
        with pytest.raises(BotoCoreError):
            held.confirm()
        held.confirm()
        held.release()
    assert len(server.faults) == 2 + NUM_CLIENT_TRIES


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_writes_without_looking_is_refused(header, home, s3_server, tmp_path):
    store = S3Store(f"s3://glm46/careless-{tmp_path.name}", home)
    store.delete_objects(["conditional-create"])

    def ignore_the_condition(params, **_):
        params["headers"].pop(header, None)

    store.client.meta.events.register("before-call.s3.PutObject", ignore_the_condition)
    with pytest.raises(ValueError, match=f"ignores {header}, on which .*name another store, or update it"):
        store._refuse_overwriting()


def test_a_directory_without_locks_or_links_is_refused(home, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ValueError, match=r"no hard links or no locks \(Operation not supported\).*another file system"):
        open_store(str(tmp_path / "shared"), home)
