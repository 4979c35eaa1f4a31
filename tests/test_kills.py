"""Long: kill -9 of a random process of a micro run inside named windows; run again, it ends in the same digests. And tiny twice.

Run by `make test-long`. The seed of the kill points is printed; GLM46_KILL_SEED and GLM46_NUM_KILLS set other ones.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.pipeline import command, environment, glm46

SEED = int(os.environ.get("GLM46_KILL_SEED", "46"))
NUM_KILLS = int(os.environ.get("GLM46_NUM_KILLS", "10"))
MAX_OCCURRENCE = {"before a commit": 20, "after a commit": 20, "in a save": 6, "before an alias move": 1, "after an alias move": 1}
pytestmark = pytest.mark.long


def kill_points() -> list[tuple[str, int]]:
    """Windows in turn, so that each is met, with an occurrence drawn from the seed."""
    draw = random.Random(SEED)
    windows = list(MAX_OCCURRENCE)
    return [
        (windows[number % len(windows)], draw.randint(0, MAX_OCCURRENCE[windows[number % len(windows)]])) for number in range(NUM_KILLS)
    ]


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process of a run, detached ones too: those whose environment names its home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GLM46_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found, key=lambda process: process.pid)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Digests of a micro run that nobody disturbs."""
    finished = glm46("run", "micro", "--json", home=tmp_path_factory.mktemp("undisturbed") / "home")
    assert finished.exit_code == 0, finished.stderr
    return finished


@pytest.mark.parametrize(("window", "occurrence"), kill_points())
def test_a_killed_run_ends_in_the_same_digests(window, occurrence, undisturbed, tmp_path):
    home, kill_dir = tmp_path / "home", tmp_path / "kill"
    kill_dir.mkdir()
    (kill_dir / "plan.json").write_text(json.dumps({"window": window, "occurrence": occurrence}))
    started = time.monotonic()
    with open(tmp_path / "first.log", "wb") as log:
        run = subprocess.Popen(
            command("run", "micro", "--json"), cwd=ROOT, stdout=log, stderr=log,
            env=environment(home, PYTHONPATH=str(ROOT / "tests" / "kill_windows"), GLM46_KILL_DIR=str(kill_dir)),
        )  # fmt: skip
        while not (kill_dir / "reached").exists() and run.poll() is None and time.monotonic() - started < 600:
            time.sleep(0.02)
        assert (kill_dir / "reached").exists(), (
            f"seed {SEED}: no passage {occurrence} through {window}:\n{(tmp_path / 'first.log').read_text()}"
        )
        victims = processes_of(home)
        victim = random.Random(f"{SEED} {window} {occurrence}").choice(victims)
        what = " ".join(victim.cmdline())[:100]
        victim.kill()
        (kill_dir / "reached").unlink()
        run.wait(timeout=600)
    print(
        f"\nseed {SEED}: {window}, passage {occurrence}: killed one of {len(victims)} ({what}), the run ended with {run.returncode}",
        flush=True,
    )

    again = glm46("run", "micro", "--json", home=home)
    assert again.exit_code == 0, again.stderr
    assert again.outcome["promoted"]
    assert again.outcome["digest"] == undisturbed.outcome["digest"]
    shared = set(again.digests) & set(undisturbed.digests)
    assert len(shared) >= len(undisturbed.digests) - 1, set(undisturbed.digests) - shared
    assert {name: again.digests[name] for name in shared} == {name: undisturbed.digests[name] for name in shared}
    assert glm46("doctor", "--deep", home=home).exit_code == 0
    deadline = time.monotonic() + 20
    while processes_of(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(home), "nothing of a run outlives it"


def test_the_tiny_run_twice_has_equal_digests(tmp_path):
    first = glm46("run", "tiny", "--json", home=tmp_path / "first", timeout=1800)
    assert first.exit_code == 0, first.stderr
    second = glm46("run", "tiny", "--json", home=tmp_path / "second", timeout=1800)
    assert second.exit_code == 0, second.stderr
    assert first.outcome["promoted"] and second.outcome["promoted"]
    assert first.digests == second.digests
    cached = glm46("run", "tiny", "--json", home=tmp_path / "first")
    print(
        f"\ntiny: {first.outcome['seconds']} s, again elsewhere {second.outcome['seconds']} s, cached {cached.outcome['seconds']} s",
        flush=True,
    )
    assert cached.computed == []
