"""Share of training's time that kills leave: python -m benchmarks.goodput [--tokens N] [--compression C] [--seed S]
[--write]

Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4), one in
11,135 s. Here they come C times as often: a rank or the supervisor, drawn by the seed, gets kill -9 after an
exponential time of mean 11,135 s / C, and so on until the phase ends. It is the first phase of micro with N tokens,
through `glm46 run` and the local launcher. The same phase without kills, from the same prepared data, runs first and
saves every SAVE_STEPS steps: both must have one digest. What its saves and measurements took, and the mean time between
kills, give the interval between saves with kills (tasks/training/plan/save_interval.py).

`ours` is the productive share of the phase's wall time (tasks/training/watch/effective_time.py). Each interruption is
broken down: `away` from the kill until the ranks of the next start count time again (noticing, the retry's delay,
imports, process group, reading the checkpoint), and `repeated`, seconds of steps that were taken again. `at_llama_rate`
is the share if an interruption that costs the same comes once in 11,135 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from infra.home import Home
from infra.jobs.supervisor import is_locked, read_job_file
from infra.step import Artifact
from infra.storage.local_store import LocalStore
from tasks.training.plan.save_interval import best_seconds_between_saves
from tasks.training.train_phase import train_phase
from tasks.training.watch.effective_time import TIME_FILE, EffectiveTime, Stretch, effective_time

SECONDS_BETWEEN_INTERRUPTIONS = 54 * 86_400 / 419
SAVE_STEPS = 20
LOG_STEPS = 4
LONG_ENOUGH = 1e6
"""Passes over the text and bounds of the gate: neither is measured here."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Kill:
    at: float
    """Seconds since the epoch."""
    victim: str


class Killer(threading.Thread):
    """Kills a process of the job that trains, at exponential times, until it is stopped."""

    def __init__(self, home: Home, mean_seconds: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.home, self.mean_seconds, self.draw = home, mean_seconds, random.Random(seed)
        self.kills: list[Kill] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        """Time counts only while the ranks train: a job that is not back yet is not killed again."""
        left = self.draw.expovariate(1 / self.mean_seconds)
        while not self.is_over.wait(POLL_SECONDS):
            work_dir = self._training()
            left -= POLL_SECONDS if work_dir is not None else 0
            if work_dir is not None and left <= 0:
                self._kill(work_dir)
                left = self.draw.expovariate(1 / self.mean_seconds)

    def _training(self) -> Path | None:
        """The work directory of a job whose ranks have taken a step since their start; None where there is none."""
        for path in self.home.work_root.glob(f"*/{TIME_FILE}"):
            job = read_job_file(path.parent)
            if job is not None and job.rank_pids and is_locked(path.parent) and path.stat().st_mtime > job.started_at:
                return path.parent
        return None

    def _kill(self, work_dir: Path) -> None:
        job = read_job_file(work_dir)
        assert job is not None, work_dir
        victim = self.draw.choice(("rank", "supervisor"))
        try:
            os.kill(job.pid if victim == "supervisor" else self.draw.choice(job.rank_pids), signal.SIGKILL)
        except ProcessLookupError:
            return  # the phase ended just now
        self.kills.append(Kill(time.time(), victim))
        print(f"killed the {victim} ({len(self.kills)})", flush=True)


def write_scale(path: Path, num_tokens: int, save_steps: int) -> str:
    """micro with a first phase of so many tokens; gives the name of that phase."""
    values = load_scale("micro").model_dump(mode="json")
    phase = values["phases"][0]
    interval = phase["recipe"]["validation"]["interval_tokens"] * num_tokens // phase["recipe"]["num_tokens"]
    phase["recipe"] |= {"num_tokens": num_tokens, "max_epochs": LONG_ENOUGH}
    phase["recipe"]["validation"]["interval_tokens"] = interval  # as many measurements as micro makes of the phase
    phase["resources"] |= {"save_interval_steps": save_steps, "log_interval_steps": LOG_STEPS}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return phase["name"]


def run(scale_file: Path, until: str, home: Home) -> dict[str, Any]:
    """The outcome of a run that ends after a stage, refused by its gate or not."""
    command = [str(Path(sys.executable).with_name("glm46")), "run", str(scale_file), "--until", until, "--json"]
    environment = os.environ | {"GLM46_HOME": str(home.root)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode} and no outcome; its messages are above")
    return json.loads(done.stdout.splitlines()[-1])


def train(scale_file: Path, phase: str, home: Home) -> Artifact[Any]:
    """The checkpoint of a run until this phase."""
    keys = {stage["name"]: stage["key"] for stage in run(scale_file, phase, home)["stages"]}
    checkpoint = LocalStore(home.store_dir, home).find(train_phase, keys[f"train {phase}"])
    assert checkpoint is not None, keys
    return checkpoint


def stretches_of(checkpoint: Artifact[Any]) -> tuple[EffectiveTime, list[Stretch]]:
    """Where the phase's time went."""
    data = checkpoint.path(TIME_FILE).read_bytes()
    measured = effective_time(data)
    assert measured is not None, data
    return measured, [Stretch(**each) for each in json.loads(data)["stretches"]]


def steps_between_saves(whole: Stretch, mean_seconds: float) -> int:
    """The best interval for kills after so many seconds, from a phase without any: its pauses count as those of saves,
    its few measurements too."""
    pause = whole.pause_seconds * SAVE_STEPS / whole.last_step
    seconds_per_step = (whole.seen_at - whole.opened_at - whole.pause_seconds) / whole.last_step
    return max(1, round(best_seconds_between_saves(pause, mean_seconds) / seconds_per_step))


def interruptions(kills: list[Kill], stretches: list[Stretch]) -> list[dict[str, Any]]:
    """What each kill cost, in seconds: until the next stretch opened, and in steps that it took again. A kill after
    the last counted step cost only a part of the phase's end: it is left out."""
    costs = []
    for kill in kills:
        before = max((each for each in stretches if each.opened_at <= kill.at), key=lambda each: each.opened_at)
        later = [each for each in stretches if each.opened_at > kill.at]
        if not later:
            continue
        after = min(later, key=lambda each: each.opened_at)
        num_steps = before.last_step - before.first_step
        repeated = before.last_step - after.first_step
        per_step = (before.seen_at - before.opened_at) / max(1, num_steps)
        # Steps after the last line were taken and are not in the log: they are lost too.
        lost = max(0.0, repeated * per_step) + kill.at - before.seen_at
        costs.append({"victim": kill.victim, "away": round(after.opened_at - kill.at, 2), "repeated": round(lost, 2)})
    return costs


def main() -> None:
    """Train without and with kills, compare digests, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4_096_000, help="of the phase; a multiple of its rows")
    parser.add_argument("--compression", type=float, default=40.0, help="how many times as often as Llama 3's")
    parser.add_argument("--seed", type=int, default=46, help="of the kills")
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/goodput.json")
    given = parser.parse_args()
    mean_seconds = SECONDS_BETWEEN_INTERRUPTIONS / given.compression
    with tempfile.TemporaryDirectory() as directory:
        calm, killed = Home(Path(directory) / "calm"), Home(Path(directory) / "killed")
        scale_file = Path(directory) / "goodput.yaml"
        phase = write_scale(scale_file, given.tokens, SAVE_STEPS)
        run(scale_file, "prepare_data", calm)
        shutil.copytree(calm.store_dir, killed.store_dir)
        undisturbed = train(scale_file, phase, calm)
        baseline, (whole,) = stretches_of(undisturbed)
        save_steps = steps_between_saves(whole, mean_seconds)
        write_scale(scale_file, given.tokens, save_steps)
        killer = Killer(killed, mean_seconds, given.seed)
        killer.start()
        checkpoint = train(scale_file, phase, killed)
        killer.is_over.set()
        assert checkpoint.digest == undisturbed.digest, "kills changed the result"
        measured, stretches = stretches_of(checkpoint)
    costs = interruptions(killer.kills, stretches)
    per_interruption = sum(cost["away"] + cost["repeated"] for cost in costs) / max(1, len(costs))
    report(
        "goodput",
        ours=measured.share,
        peer=None,
        unit="productive share of the wall time",
        undisturbed=round(baseline.share, 4),
        at_llama_rate=round(baseline.share * (1 - per_interruption / SECONDS_BETWEEN_INTERRUPTIONS), 4),
        seconds={
            name: round(getattr(measured, name), 1) for name in ("total", "productive", "paused", "waiting", "lost")
        },
        mean_seconds_between_kills=round(mean_seconds, 1),
        save_interval_steps=save_steps,
        num_kills=len(killer.kills),
        interruptions=costs,
        is_same_digest=True,
    )


if __name__ == "__main__":
    main()
