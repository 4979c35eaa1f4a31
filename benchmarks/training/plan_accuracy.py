"""Planned against measured time and memory, before and after calibration: python -m benchmarks.training.plan_accuracy
[--scale micro] [--keep DIRECTORY] [--write]

A scale is run up to its last phase with one seed, then with another in the same home: the data are prepared once, and
every phase is trained twice. The plan of the second run is made from what the first measured, and compared with what
the second measured. Time is that of steps, measurements and saves of all phases, without start; memory is the peak of
rank 0. `ours` is the relative error of the time; the plan without a run is beside it, as `assumed`.

With --keep a home whose runs are finished is read again in seconds. `micro` takes about two runs of its training; other
load on the machine between the two runs is an error of the plan here.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.phases import FIRST_SEED, run_phases, write_scale
from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from infra.home import Home
from infra.storage.local_store import LocalStore
from tasks.training.measured_phases import measured_phases
from tasks.training.plan.measured import MeasuredPhase
from tasks.training.plan.plan_training import plan_training

COLUMNS = "{:<26} {:>10} {:>10} {:>10} {:>12} {:>12}"


def measure(home_dir: Path, scale: str, seed: int) -> dict[str, MeasuredPhase]:
    """By phase, of a run with this seed."""
    scale_file, last = home_dir / f"{Path(scale).stem}_{seed}.yaml", load_scale(scale).phases[-1].name
    write_scale(scale_file, scale, seed)
    outcome, home = run_phases(scale_file, last, home_dir), Home(home_dir)
    keys = {stage["key"] for stage in outcome["stages"]}
    return {
        each.recipe["phase"]: each
        for each in measured_phases(LocalStore(home.store_dir, home), print)
        if each.key in keys
    }


def main() -> None:
    """Run twice, plan from the first run, compare with the second."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", default="micro", help="a scale that trains on this machine, or a YAML file")
    parser.add_argument("--keep", type=Path, help="home directory that is kept; without it a temporary one")
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/plan_accuracy.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home_dir = (given.keep or Path(temporary)).absolute()
        home_dir.mkdir(parents=True, exist_ok=True)
        first, second = (measure(home_dir, given.scale, FIRST_SEED + number) for number in (0, 1))
    scale = load_scale(given.scale)
    planned = {phase.name: phase for phase in plan_training(scale, measured=list(first.values())).phases}
    assumed = {phase.name: phase.hours * 3600 for phase in plan_training(scale).phases}
    rows = {
        name: {
            "planned_seconds": round(planned[name].hours * 3600, 2),
            "assumed_seconds": round(assumed[name], 2),
            "measured_seconds": round(second[name].seconds, 2),
            "planned_memory": planned[name].measured_memory,
            "measured_memory": second[name].memory_bytes,
        }
        for name in planned
    }
    print(COLUMNS.format("phase", "planned s", "assumed s", "measured s", "planned MB", "measured MB"))
    for name, row in rows.items():
        seconds = [f"{row[column]:,.1f}" for column in ("planned_seconds", "assumed_seconds", "measured_seconds")]
        memory = [f"{row[column] / 1e6:,.0f}" for column in ("planned_memory", "measured_memory")]
        print(COLUMNS.format(name, *seconds, *memory))
    total = {column: sum(row[column] for row in rows.values()) for column in next(iter(rows.values()))}
    report(
        "plan_accuracy",
        ours=abs(total["planned_seconds"] / total["measured_seconds"] - 1),
        peer=None,
        unit="relative error of the time of all phases",
        lower_is_better=True,
        assumed=round(abs(total["assumed_seconds"] / total["measured_seconds"] - 1), 4),
        memory=round(max(abs(row["planned_memory"] / row["measured_memory"] - 1) for row in rows.values()), 4),
        scale=given.scale,
        phases=rows,
    )


if __name__ == "__main__":
    main()
