"""What each phase of a scale is trained for, before and after it, over seeds: python -m benchmarks.phases
[--seeds 5] [--scale tiny] [--keep DIRECTORY] [--controls] [--write]

Runs the whole pipeline up to its last phase once per seed, in a home of its own: every phase gets the seed, which
decides initial weights, the order of documents and prompts, and the sampled answers. Data are prepared once. A phase
whose gate refuses ends its run, as it does for a user.

With --controls each phase is also trained in another way, from the same start on as many tokens: a phase of pre- or
mid-training reads what the phase before it read, SFT reads no conversation. What the phase's figure is better by than
its control's is the phase's own doing, and not that of more training. Phases of reinforcement learning have no control.

The last line is JSON: `ours` is the share of phases and seeds with a figure of their own that became better beyond
the 95 % interval, among all that were due; `figures` holds every one with its interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from infra.home import Home
from infra.step import Artifact
from infra.storage.local_store import LocalStore
from tasks.evaluation.comparisons import compare
from tasks.evaluation.decide_gate import GateDecision, decide_gate
from tasks.evaluation.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from tasks.evaluation.items import read_items

FIRST_SEED = 46
FIGURE_COLUMNS = "{:>5} {:<26} {:<34} {:>8} {:>8}  {}"


READING = ("mixture", "bucket_weights", "fim_rate", "packing", "sequence_length")
"""What a phase of pre- or mid-training reads, and how."""


def write_scale(path: Path, scale: str, seed: int, controlled: str = "") -> None:
    """The scale with another seed in every phase; `controlled` names a phase that its control takes the place of."""
    values = load_scale(scale).model_dump(mode="json")
    for phase in values["phases"]:
        phase["recipe"]["seed"] = seed
        if phase["name"] == controlled:
            phase["recipe"] |= control_of(scale, controlled)
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def control_of(scale: str, name: str) -> dict[str, Any]:
    """The settings in which a phase's control differs from it; none where it has no control."""
    loaded = load_scale(scale)
    (phase,) = (phase for phase in loaded.phases if phase.name == name)
    before, recipe = loaded.start_of(phase), phase.recipe.model_dump(mode="json")
    if phase.recipe.objective.kind == "sft":
        return {"mixture": {domain: weight for domain, weight in recipe["mixture"].items() if domain != "chat"}}
    if phase.recipe.objective.kind != "pretrain" or before is None:
        return {}
    return before.recipe.model_dump(mode="json", include=set(READING))


def run_phases(scale_file: Path, last_phase: str, home_dir: Path) -> dict[str, Any]:
    """The outcome of a run that ends after its last phase, or at the gate that refuses."""
    program = str(Path(sys.executable).with_name("glm46"))
    command = [program, "run", str(scale_file), "--until", last_phase, "--json"]
    done = subprocess.run(command, env=os.environ | {"GLM46_HOME": str(home_dir)}, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if not lines:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode} and no outcome; its own messages are above"
        )
    return json.loads(lines[-1])


def own_figures(decision: GateDecision, evaluation: Evaluation) -> list[dict[str, Any]]:
    """What the phase is trained for, before and after it, with the interval of the difference."""
    rows = []
    for bound in (bound for bound in decision.bounds if bound.is_own):
        name, _, domain = bound.figure.partition(" of domain ")
        after = evaluation.bits_per_byte_by_domain[domain] if domain else getattr(evaluation, name)
        assert bound.value is not None and bound.interval is not None, bound
        sign = -1 if "bits_per_byte" in name else 1
        rows.append(
            {
                "figure": bound.figure,
                "before": round(after - bound.value, 4),
                "after": round(after, 4),
                "interval": [round(end, 4) for end in bound.interval],
                "is_better": min(sign * end for end in bound.interval) > 0,
            }
        )
    return rows


def beyond_control(figure: str, evaluation: Artifact[Evaluation], control: Artifact[Evaluation]) -> dict[str, Any]:
    """What a phase's figure differs by from its control's, on the same items."""
    ours, theirs = (read_items(each.path("items.parquet")) for each in (evaluation, control))
    whole = figure.partition(" of domain ")[0]
    (compared,) = (each for each in compare(whole, ours, theirs) if each.figure == figure)
    difference = compared.difference
    shown = [round(end, 4) for end in difference.interval]
    return {"beyond_control": round(difference.value, 4), "control_interval": shown, "is_its_own": difference.is_better}


def measure_control(home_dir: Path, scale: str, seed: int, phase: str) -> Artifact[Evaluation]:
    """The evaluation of a phase's control; the phases before it come from the store."""
    scale_file = home_dir / f"{Path(scale).stem}_{seed}_{phase}.yaml"
    write_scale(scale_file, scale, seed, controlled=phase)
    keys = {stage["name"]: stage["key"] for stage in run_phases(scale_file, phase, home_dir)["stages"]}
    home = Home(home_dir)
    control = LocalStore(home.store_dir, home).find(evaluate_checkpoint, keys[f"evaluate {phase}"])
    assert control is not None, keys
    return control


def measure(home_dir: Path, scale: str, seeds: range, with_controls: bool = False) -> list[dict[str, Any]]:
    """One row per seed, phase and figure of its own, printed as soon as the seed's run has ended."""
    phases = [phase.name for phase in load_scale(scale).phases]
    home = Home(home_dir)
    rows = []
    print(FIGURE_COLUMNS.format("seed", "phase", "trained for", "before", "after", "95 % interval of the difference"))
    for seed in seeds:
        started = time.monotonic()
        scale_file = home_dir / f"{Path(scale).stem}_{seed}.yaml"
        write_scale(scale_file, scale, seed)
        outcome = run_phases(scale_file, phases[-1], home_dir)
        store = LocalStore(home.store_dir, home)
        keys = {stage["name"]: stage["key"] for stage in outcome["stages"]}
        # A reward model is judged by pairs, not by items before and after it.
        for phase in (phase for phase in phases if {f"gate {phase}", f"evaluate {phase}"} <= keys.keys()):
            decision = store.find(decide_gate, keys[f"gate {phase}"])
            evaluation = store.find(evaluate_checkpoint, keys[f"evaluate {phase}"])
            assert decision is not None and evaluation is not None, keys
            figures = own_figures(decision.record, evaluation.record)
            if with_controls and figures and control_of(scale, phase):
                control = measure_control(home_dir, scale, seed, phase)
                figures = [row | beyond_control(row["figure"], evaluation, control) for row in figures]
            for row in figures:
                rows.append({"seed": seed, "phase": phase, **row})
                shown = f"[{row['interval'][0]:+.4f}, {row['interval'][1]:+.4f}]"
                if "beyond_control" in row:
                    shown += "  beyond its control {:+.4f} [{:+.4f}, {:+.4f}]".format(
                        row["beyond_control"], *row["control_interval"]
                    )
                print(FIGURE_COLUMNS.format(seed, phase, row["figure"], row["before"], row["after"], shown), flush=True)
        print(f"seed {seed}: {time.monotonic() - started:.0f} s", *outcome["reasons"], sep="\n  refused: ", flush=True)
    return rows


def main() -> None:
    """Run every seed, print its figures, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--scale", default="tiny", help="a scale, or a YAML file of your own")
    parser.add_argument("--keep", type=Path, help="home directory that is kept; without it a temporary one")
    parser.add_argument("--controls", action="store_true", help="also train each phase's control")
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/phases.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home_dir = (given.keep or Path(temporary)).absolute()
        home_dir.mkdir(parents=True, exist_ok=True)
        rows = measure(home_dir, given.scale, range(FIRST_SEED, FIRST_SEED + given.seeds), given.controls)
    num_due = given.seeds * sum(phase.recipe.gate.own_figure != "none" for phase in load_scale(given.scale).phases)
    report(
        "phases",
        ours=sum(row["is_better"] for row in rows) / num_due,
        peer=None,
        unit="share of phases and seeds whose own figure is better beyond the interval",
        figures=rows,
    )


if __name__ == "__main__":
    main()
