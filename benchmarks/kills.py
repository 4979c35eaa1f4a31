"""Random kill -9 over whole runs: python -m benchmarks.kills [--scale tiny] [--kills 100] [--mean-seconds 20]
[--seed S] [--keep DIRECTORY] [--write]

A run without kills comes first. Then the same run starts in an empty home, and a process of it, any one, gets kill -9
after an exponential time of the mean, and so on. Where the run ends by that it is run again in the same home; where it
ends promoted, the next one starts in another empty home, until all kills are spent. Every run must end in the digests
of the first, with no process and no unfinished work left, and `doctor --deep` content. A run that ends without
promotion though nothing of it was killed is an error.

`ours` is the share of kills that the run survived by itself, without being run again.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.results import WRITE_FLAG, report
from infra.code_digest import ROOT
from tests.support.pipeline import Finished, command, environment, glm46

POLL_SECONDS = 0.1
END_SECONDS = 20
"""In which the processes of an ended run are gone."""
RUN_SECONDS = 7200
MAX_MESSAGE_CHARS = 500
PROCESSES = {
    "main": "flows.cli.command",
    "rank": "tasks.training.worker",
    "supervisor": "infra.jobs.supervisor",
    "java": "org.apache.spark",
    "spark worker": "infra.machine.python_daemon",
    "prefect": "prefect.server",
    "mlflow": "mlflow.server",
    "model server": "infra.serving.model_server",
}
"""Text in the command line of each kind of process."""


def processes_of(home: Path, variable: str = "GLM46_HOME") -> list[psutil.Process]:
    """Every process of a run, detached ones too: those whose environment names its home, and has the variable."""
    processes = []
    for process in psutil.process_iter():
        try:
            known = process.environ()
            is_ours = known.get("GLM46_HOME") == str(home) and variable in known
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(processes, key=lambda process: process.pid)


class Trouble(Protocol):
    """What happens to a run while it works."""

    def attend(self, run: subprocess.Popen[bytes], home: Path) -> int:
        """Return how often it happened, once the run has ended and what it needs to be run again is there."""
        ...


@dataclass
class Killer:
    """Draws victims and times; what it killed, by kind of process."""

    mean_seconds: float
    left: int
    draw: random.Random
    killed: Counter[str] = field(default_factory=Counter)

    def attend(self, run: subprocess.Popen[bytes], home: Path) -> int:
        """Kill processes of a run until it ends; gives how many. Raises RuntimeError where it hangs."""
        kills, due, deadline = 0, self._next(), time.monotonic() + RUN_SECONDS
        while run.poll() is None:
            time.sleep(POLL_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run of {home} has not ended after {RUN_SECONDS} s")
            if self.left and time.monotonic() >= due:
                kills += self._kill(home)
                due = self._next()
        return kills

    def _next(self) -> float:
        return time.monotonic() + self.draw.expovariate(1 / self.mean_seconds)

    def _kill(self, home: Path) -> bool:
        """Whether there was one to kill."""
        processes = processes_of(home)
        if not processes:
            return False
        victim = self.draw.choice(processes)
        try:
            kind = kind_of(victim)
            victim.kill()
        except psutil.NoSuchProcess:
            return False
        self.left -= 1
        self.killed[kind] += 1
        print(f"  killed {kind} ({self.killed.total()})", flush=True)
        return True


def kind_of(process: psutil.Process) -> str:
    """Kind of a run's process; its program where it is of none."""
    line = " ".join(process.cmdline())
    return next((kind for kind, text in PROCESSES.items() if text in line), process.name())


def run_under_fire(
    scale: str, home: Path, trouble: Trouble, *options: str, **variables: str
) -> tuple[Finished, Counter[str]]:
    """The run that ended promoted, and how attempts ended before it: by exit code and message. `options` are of `glm46
    run`, `variables` of its environment."""
    ends: Counter[str] = Counter()
    while True:
        home.mkdir(exist_ok=True, parents=True)
        with open(home.with_suffix(".out"), "wb") as out, open(home.with_suffix(".err"), "wb") as err:
            words, env = command("run", scale, "--json", *options), environment(home, **variables)
            run = subprocess.Popen(words, env=env, stdout=out, stderr=err)
            num_troubles = trouble.attend(run, home)
        finished = Finished(run.returncode, home.with_suffix(".out").read_text(), home.with_suffix(".err").read_text())
        if finished.exit_code == 0:
            return finished, ends
        message = " ".join(_last_words(finished.stderr))[:MAX_MESSAGE_CHARS]
        print(f"  ended with {finished.exit_code}: {message}", flush=True)
        if not num_troubles:
            raise RuntimeError(f"nothing happened to this run, and it ended with {finished.exit_code}: {message}")
        ends[f"{finished.exit_code}: {message}"] += 1


def _last_words(stderr: str) -> list[str]:
    """What the command said at its end, without the lines of its stages."""
    lines = stderr.strip().splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("glm46: ")), len(lines))
    return lines[first:]


def check_whole(finished: Finished, undisturbed: Finished, home: Path, *options: str, **variables: str) -> None:
    """Asserts equal digests, nothing left behind and a store without damage. A stage may be absent: the comparison
    with the champion, where this release was the champion when its run was repeated. `options` and `variables` as of
    `run_under_fire`, for the doctor."""
    assert finished.outcome["promoted"] and finished.outcome["digest"] == undisturbed.outcome["digest"]
    ours, expected = finished.digests, undisturbed.digests
    shared = set(ours) & set(expected)
    assert len(shared) >= len(expected) - 1, set(expected) - shared
    different = [name for name in shared if ours[name] != expected[name]]
    assert not different, f"kills changed the result of {', '.join(sorted(different))}"
    deadline = time.monotonic() + END_SECONDS
    while processes_of(home) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    assert not processes_of(home), "a process of the run outlives it"
    assert os.listdir(home / "work") == [], "unfinished work is left"
    doctor = glm46("doctor", "--deep", *options, home=home, tree=ROOT, timeout=RUN_SECONDS, **variables)
    assert doctor.exit_code == 0, doctor.stderr


def measure(scale: str, directory: Path, killer: Killer) -> dict[str, Any]:
    """Runs under fire until all kills are spent."""
    started = time.monotonic()
    undisturbed = glm46("run", scale, "--json", home=directory / "calm", timeout=RUN_SECONDS)
    assert undisturbed.exit_code == 0, undisturbed.stderr
    print(f"without kills: {time.monotonic() - started:.0f} s", flush=True)
    ends, seconds, num_runs = Counter[str](), 0.0, 0
    while killer.left:
        num_runs, started = num_runs + 1, time.monotonic()
        home = directory / f"killed-{num_runs}"
        finished, own_ends = run_under_fire(scale, home, killer)
        check_whole(finished, undisturbed, home)
        ends += own_ends
        seconds += time.monotonic() - started
        print(f"run {num_runs}: promoted, equal digests, {killer.killed.total()} kills so far", flush=True)
    return {"num_runs": num_runs, "seconds": round(seconds), "ends": dict(ends.most_common())}


def main() -> None:
    """Run without and with kills, compare, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", default="tiny", help="a scale, or a YAML file of your own")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mean-seconds", type=float, default=20.0, help="between two kills")
    parser.add_argument("--seed", type=int, default=46, help="of times and victims")
    parser.add_argument("--keep", type=Path, help="directory of the homes, kept; without it a temporary one")
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/kills.json")
    given = parser.parse_args()
    killer = Killer(given.mean_seconds, given.kills, random.Random(given.seed))
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(given.scale, (given.keep or Path(temporary)).absolute(), killer)
    num_ended = sum(measured["ends"].values())
    report(
        "kills",
        ours=1 - num_ended / given.kills,
        peer=None,
        unit="share of kills that a run survived without being run again",
        scale=given.scale,
        kills=dict(killer.killed.most_common()),
        **measured,
        is_same_digest=True,
    )


if __name__ == "__main__":
    main()
