"""Share of the time for which training waits for its checkpoints: python -m benchmarks.training.checkpoint_pause
[--rounds 2] [--steps 10] [--interval 5] [--write]

A phase's own step and save on one CPU rank with one thread: 18.3 M parameters with AdamW (220 MB per checkpoint), steps
of 8 x 512 tokens. Ours writes a checkpoint to the node's disk, and uploads, verifies and commits it behind the
training. The peer is the same code that waits for the commit at each save. Both write to one disk, and the upload
copies, as it does between two. `ratio` is the peer's share over ours. The record also has seconds per save and per
step, as an upload takes processor time from steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.train_step import BATCH, LENGTH, RECIPE
from tests.support.rank_processes import on_ranks


def main() -> None:
    """Measure both in turn and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--interval", type=int, default=5, help="steps between two saves")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the result in benchmarks/results/")
    given = parser.parse_args()
    # Ranks import what they run, which a program's own module cannot be.
    from benchmarks.training.checkpoint_pause import measure

    model = RECIPE.model_dump()
    rounds = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as directory:
            arguments = (model, [BATCH, LENGTH], given.steps, given.interval, directory)
            rounds.append(
                {
                    name: on_ranks(measure, 1, Path(directory), *arguments, waits)[0]
                    for name, waits in (("ours", False), ("peer", True))
                }
            )
        print(json.dumps(rounds[-1]), flush=True)

    def median(who: str, figure: str) -> float:
        return statistics.median(each[who][figure] for each in rounds)

    report(
        "checkpoint_pause",
        ours=median("ours", "share"),
        peer=median("peer", "share"),
        unit="share of the wall time",
        lower_is_better=True,
        save_seconds={who: round(median(who, "save_seconds"), 3) for who in ("ours", "peer")},
        step_seconds={who: round(median(who, "step_seconds"), 3) for who in ("ours", "peer")},
        checkpoint_bytes=int(median("ours", "bytes")),
        steps_between_saves=given.interval,
        num_rounds=given.rounds,
        num_threads=1,
    )


def measure(
    rank: int,
    num_ranks: int,
    model: dict[str, Any],
    shape: list[int],
    num_steps: int,
    interval: int,
    directory: str,
    waits: bool,
) -> dict[str, float]:
    """What saves take of some steps; the last save is waited for, as at the end of a phase."""
    from tasks.training.loop.training_step import take_step
    from tasks.training.schedule.schedules import StepPlan
    from tasks.training.state.node_checkpoints import NodeCheckpoints
    from tests.support.parallel_steps import micro_batches
    from tests.support.training_inputs import small_recipe
    from tests.training.test_zero import position_after

    root = Path(directory) / f"waits-{waits}"
    recipe = small_recipe(model=model)
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"kind": "adamw"})})
    job, trainable = prepare(recipe, root)
    checkpoints, (batch, length), seconds, waited = NodeCheckpoints(job), shape, [], []
    rows = micro_batches(batch, length, is_segmented=False, seed=1)
    started = time.perf_counter()
    for step in range(1, num_steps + 1):
        began = time.perf_counter()
        take_step(trainable, recipe, StepPlan(0, batch, 0, batch * length), rows, step)
        seconds.append(time.perf_counter() - began)
        if step % interval == 0:
            began = time.perf_counter()
            checkpoints.save(trainable, position_after(step))
            if waits:
                checkpoints.finish()
            waited.append(time.perf_counter() - began)
    share = sum(waited) / (time.perf_counter() - started)
    checkpoints.finish()
    size = sum(path.stat().st_size for path in next((root / "job" / "checkpoints").glob("step-*")).iterdir())
    shutil.rmtree(root)
    return {
        "share": share,
        "save_seconds": statistics.median(waited),
        "step_seconds": statistics.median(seconds),
        "bytes": size,
    }


def prepare(recipe: Any, root: Path) -> tuple[Any, Any]:
    """A job with directories of its own, and what trains its model."""
    from model.architecture.transformer import Glm4Moe
    from model.formats.checkpoint_names import checkpoint_shapes
    from tasks.training.loop.build_model import build_trainable, materialize
    from tasks.training.parallel.ranks import connect_ranks
    from tasks.training.state import node_checkpoints
    from tasks.training.state.initial_weights import InitialWeights
    from tasks.training.state.job import TrainingJob
    from tasks.training.state.state import load_master
    from tests.support.parallel_steps import resources_of

    node_checkpoints.link_or_copy = shutil.copyfile
    resources = resources_of(num_ranks=1, zero_stage=0).model_copy(update={"node_dir": str(root / "disk")})
    job = TrainingJob(
        recipe=recipe,
        resources=resources,
        work_dir=str(root / "job"),
        packed=(),
        shards=(),
        validation=(),
        validation_domains={},
        prompts_path="",
        solved_path="",
        pairs_dir="",
        reference_dir="",
        reward_model_dir="",
        tokenizer_path="",
        start_dir="",
        start_weights_dir="",
        start_weights_sha256="",
        eos_token_ids=(),
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = Glm4Moe(recipe.model)
    shapes = checkpoint_shapes(model)
    materialize(model, torch.device("cpu"))
    trainable = build_trainable(model, recipe.optimizer, "float32", resources, connect_ranks(resources))
    load_master(trainable, InitialWeights(recipe.model, shapes, seed=1), "the initial weights")
    return job, trainable


if __name__ == "__main__":
    main()
