"""Long: kill -9 of each kind of process of a run through seven phases inside named windows; run again, it ends in the
same digests. An S3 store that fails at one request in ten.

Run by `make test-long`. The seed of the kill points is printed; GLM46_KILL_SEED sets another one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.kills import PROCESSES, processes_of
from tests.conftest import ROOT
from tests.support.faulty_s3 import KINDS, faulty, one_in
from tests.support.pipeline import Finished, command, environment, glm46
from tests.support.seven_phases import write_seven_phases

SEED = int(os.environ.get("GLM46_KILL_SEED", "46"))
KILLS = (
    ("main", "before a commit", 40, False),
    ("java", "before a commit", 8, False),
    ("spark worker", "after a commit", 8, False),
    ("main", "after a commit", 50, True),
    ("main", "before an alias move", 6, True),
    ("main", "after an alias move", 7, True),
    ("rank", "in a save", 30, True),
    ("supervisor", "in a save", 30, True),
    ("prefect", "before a commit", 50, True),
    ("mlflow", "after a commit", 50, True),
    ("mlflow", "before an alias move", 6, True),
    ("model server", "in a served request", 99, True),
)
"""Process, window, the highest passage through it that is drawn (every window has as many), and whether the data is
there already."""
HEALED_WITHIN_THE_RUN = {"rank", "supervisor"}
FAULTY_ONE_IN = 10
RUN_SECONDS = 1800
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def scale(tmp_path_factory):
    return str(write_seven_phases(tmp_path_factory.mktemp("scale") / "seven.yaml"))


@dataclass(frozen=True)
class Undisturbed:
    """A run without kills, and a copy of its store after the data was prepared."""

    finished: Finished
    prepared: Path


@pytest.fixture(scope="module")
def undisturbed(scale, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    home = directory / "home"
    data = glm46("run", scale, "--until", "prepare_data", home=home, timeout=RUN_SECONDS)
    assert data.exit_code == 0, data.stderr
    shutil.copytree(home / "store", directory / "prepared")
    finished = glm46("run", scale, "--json", home=home, timeout=RUN_SECONDS)
    assert finished.exit_code == 0, finished.stderr
    assert finished.outcome["promoted"]
    return Undisturbed(finished, directory / "prepared")


def run_and_kill(victim: str, window: str, passage: int, scale: str, home: Path, directory: Path) -> int:
    """Exit code of a run in which one process was killed inside a passage through a window."""
    (directory / "plan.json").write_text(json.dumps({"window": window, "occurrence": passage}))
    reached = directory / "reached"
    with open(directory / "first.log", "wb") as log:
        run = subprocess.Popen(
            command("run", scale, "--json"),
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=environment(
                home, PYTHONPATH=str(ROOT / "tests" / "support" / "kill_windows"), GLM46_KILL_DIR=str(directory)
            ),
        )
        started = time.monotonic()
        while not reached.exists() and run.poll() is None and time.monotonic() - started < RUN_SECONDS:
            time.sleep(0.02)
        assert reached.exists(), (
            f"seed {SEED}: no passage {passage} through {window}:\n{(directory / 'first.log').read_text()}"
        )
        victims = [process for process in processes_of(home) if PROCESSES[victim] in " ".join(process.cmdline())]
        assert victims, f"seed {SEED}: no {victim} runs at passage {passage} through {window}"
        random.Random(f"{SEED} {victim} {window}").choice(victims).kill()
        reached.unlink()
        return run.wait(timeout=RUN_SECONDS)


@pytest.mark.parametrize(("victim", "window", "last", "has_data"), KILLS)
def test_a_killed_run_ends_in_the_same_digests(victim, window, last, has_data, scale, undisturbed, tmp_path):
    home, passage = tmp_path / "home", random.Random(f"{SEED} {victim} {window}").randint(0, last)
    if has_data:
        shutil.copytree(undisturbed.prepared, home / "store")
    code = run_and_kill(victim, window, passage, scale, home, tmp_path)
    print(f"\nseed {SEED}: {window}, passage {passage}: {victim} killed, the run ended with {code}", flush=True)
    assert code == 0 or victim not in HEALED_WITHIN_THE_RUN

    again = glm46("run", scale, "--json", home=home, timeout=RUN_SECONDS)
    assert again.exit_code == 0, again.stderr
    assert again.outcome["promoted"]
    expected = undisturbed.finished
    assert again.outcome["digest"] == expected.outcome["digest"]
    shared = set(again.digests) & set(expected.digests)
    assert len(shared) >= len(expected.digests) - 1, set(expected.digests) - shared
    assert {name: again.digests[name] for name in shared} == {name: expected.digests[name] for name in shared}
    assert glm46("doctor", "--deep", home=home).exit_code == 0
    assert_nothing_is_left(home)


def assert_nothing_is_left(home: Path) -> None:
    """After the end of a run no process, no lock and no unfinished work remains."""
    deadline = time.monotonic() + 20
    while processes_of(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(home), "nothing of a run outlives it"
    assert os.listdir(home / "work") == []


def test_a_store_that_fails_at_one_request_in_ten_ends_in_the_same_digests(scale, undisturbed, s3_server, tmp_path):
    home, uri = tmp_path / "home", f"s3://glm46/{tmp_path.name}"
    with faulty(s3_server, one_in(FAULTY_ONE_IN, SEED)) as server:
        finished = glm46(
            "run", scale, "--json", "--store", uri, home=home, timeout=RUN_SECONDS, AWS_ENDPOINT_URL_S3=server.url
        )
    kinds = {kind: sum(fault.startswith(kind) for fault in server.faults) for kind in KINDS}
    print(f"\nseed {SEED}: faults of the store: {kinds}", flush=True)
    assert finished.exit_code == 0, finished.stderr
    assert min(kinds.values()) > 0
    assert finished.digests == undisturbed.finished.digests and finished.outcome["promoted"]
    assert glm46("doctor", "--deep", "--store", uri, home=home).exit_code == 0
    assert_nothing_is_left(home)
