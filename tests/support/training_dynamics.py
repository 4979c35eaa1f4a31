"""What test_training_dynamics.py runs on ranks: whole phases of a few steps in one process, and a plain loop to hold
them against."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from model.formats.checkpoint_names import to_checkpoint_tensors
from tasks.training import worker
from tasks.training.loop.prepare_training import prepare_training
from tasks.training.loop.rank_process import Interruption
from tasks.training.loop.training_step import take_step
from tasks.training.schedule.schedules import plan_step
from tasks.training.state.checkpoints import checkpoint_dir_of, find_checkpoint
from tasks.training.state.job import TrainingJob
from tasks.training.state.spikes import TooManySpikesError
from tasks.training.worker import Training, train_to_end
from tests.support.saved_states import flip_a_bit, whole_tensors
from tests.support.training_inputs import files_in

POISON = 300
"""A token that no document holds."""
POISONED_STEP, SECOND_POISONED_STEP = 3, 5


class Never(Interruption):
    def __init__(self) -> None:
        self.is_asked = False


class AfterSteps(Interruption):
    """Asks to stop when it is looked at for the n-th time."""

    def __init__(self, num_looks: int) -> None:
        self.is_asked, self.num_looks = False, num_looks

    def on_any_rank(self, device: torch.device) -> bool:
        self.num_looks -= 1
        self.is_asked = self.num_looks < 0
        return self.is_asked


def trained(job: TrainingJob, interruption: Interruption | None = None) -> Training:
    Path(job.work_dir).mkdir(parents=True, exist_ok=True)
    training = train_to_end(job, interruption or Never())
    dist.barrier()
    return training


def variant(job: TrainingJob, name: str, resources: dict[str, Any] | None = None, **recipe: Any) -> TrainingJob:
    """The job in a work directory of its own, with other resources or another recipe."""
    return job.model_copy(
        update={
            "work_dir": f"{job.work_dir}-{name}",
            "resources": job.resources.model_copy(update=resources or {}),
            "recipe": job.recipe.model_copy(update=recipe),
        }
    )


def state_digest(job: TrainingJob) -> str:
    """Of every file of the last checkpoint, state.json and index included."""
    checkpoint_dir, problems = find_checkpoint(Path(job.work_dir))
    assert checkpoint_dir is not None and not problems, problems
    files = sorted(checkpoint_dir.iterdir())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def weights_of(checkpoint_dir: Path) -> dict[str, torch.Tensor]:
    """Whole tensors by name."""
    kinds = {key: tensor for key, tensor in whole_tensors(checkpoint_dir).items() if key.startswith("master ")}
    return {key.removeprefix("master "): tensor for key, tensor in kinds.items()}


def newest(job: TrainingJob) -> Path:
    return Path(job.work_dir) / "checkpoints" / (Path(job.work_dir) / "checkpoints" / "latest").read_text()


def metrics(job: TrainingJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.work_dir) / "metrics.jsonl").read_text().splitlines()]


def spikes(job: TrainingJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.work_dir) / "spikes.jsonl").read_text().splitlines()]


def poisoned(job: TrainingJob, directory: Path) -> TrainingJob:
    """The job on shards in which one token of the poisoned steps is POISON, from weights whose row for it is not
    finite."""
    rows_per_step = job.recipe.course.peak_batch_tokens // job.recipe.sequence_length
    shards, start = directory / "shards", directory / "start"
    if dist.get_rank() == 0:
        shutil.copytree(job.shards[0].directory, shards)
        tokens = np.memmap(shards / "toy.bin", dtype="<u2", mode="r+")
        for step, row in ((POISONED_STEP, 1), (SECOND_POISONED_STEP, 2)):
            tokens[((step - 1) * rows_per_step + row) * job.recipe.sequence_length + 5] = POISON
        tokens.flush()
        start.mkdir()
        master = weights_of(newest(job))
        master["model.embed_tokens.weight"][POISON] = torch.inf
        save_file(master, start / "master-00001.safetensors")
        state = json.loads((newest(job) / "state.json").read_text()) | {"course": "another"}
        (start / "state.json").write_text(json.dumps(state))
    dist.barrier()
    return job.model_copy(
        update={"shards": tuple(files_in(shards)), "start_dir": str(start), "work_dir": f"{job.work_dir}-poisoned"}
    )


def plain_loop(job: TrainingJob, steps: list[int]) -> dict[str, torch.Tensor]:
    """Weights after these steps of the phase, taken one after the other."""
    torch.manual_seed(job.recipe.seed)
    trainable, position = prepare_training(job)
    data, num_tokens = worker.open_phase_data(job, trainable), position.num_tokens
    for step in range(1, max(steps) + 1):
        plan = plan_step(job.recipe, num_tokens)
        num_tokens += plan.end_tokens - plan.start_tokens
        if step in steps:
            take_step(trainable, job.recipe, plan, data.read(plan, step).micro_batches, step)
    data.close()
    return {name: parameter.detach().clone() for name, parameter in trainable.model.named_parameters()}


def is_equal(checkpoint_dir: Path, weights: dict[str, torch.Tensor]) -> bool:
    """Whether a checkpoint holds these weights, bit for bit."""
    saved = weights_of(checkpoint_dir)
    return all(
        torch.equal(saved[name].nan_to_num(), tensor.nan_to_num())
        for name, tensor in to_checkpoint_tensors(weights).items()
    )


def spikes_and_measurements(rank: int, num_ranks: int, described: dict[str, Any], directory: str) -> dict[str, Any]:
    """All scenarios of one process; every value is True or a figure to compare."""
    job = TrainingJob.model_validate(described)
    result: dict[str, Any] = {}
    plain = variant(job, "plain")
    trained(plain)
    bad = poisoned(plain, Path(directory))

    every = variant(bad, "every", {"save_interval_steps": 1, "num_kept_checkpoints": 1})
    trained(every)
    result["left_out"] = [[line["first_skipped_step"], line["step"]] for line in spikes(every)]
    result["evidence"] = spikes(every)[0]
    result["metric_steps"] = [line["step"] for line in metrics(every) if "loss" in line]
    result["num_skipped"] = sum(line["skipped_steps"] for line in metrics(every))
    result["equals_a_run_without_the_steps"] = is_equal(newest(every), plain_loop(bad, [1, 2, 4, 6]))

    two = variant(
        bad,
        "two",
        {"save_interval_steps": 1, "num_kept_checkpoints": 1},
        spikes=bad.recipe.spikes.model_copy(update={"skip_steps": 2}),
    )
    trained(two)
    result["two_left_out"] = is_equal(newest(two), plain_loop(bad, [1, 6]))

    seldom = variant(bad, "seldom", {"save_interval_steps": 100})
    trained(seldom)
    result["save_interval_does_not_matter"] = state_digest(seldom) == state_digest(every)

    killed = variant(bad, "killed", {"save_interval_steps": 2})
    for num_looks in (1, 2, 3, 1):
        trained(killed, AfterSteps(num_looks))
    result["killed_at_steps"] = json.loads((newest(killed) / "state.json").read_text())["step"]
    trained(killed)
    result["interruptions_do_not_matter"] = state_digest(killed) == state_digest(every)

    limited = variant(bad, "limited", spikes=bad.recipe.spikes.model_copy(update={"max_rollbacks": 1}))
    for start in ("first", "again"):
        try:
            trained(limited)
        except TooManySpikesError as error:
            result[f"stopped_{start}"] = str(error)
    result["limited_lines"] = [line["rolled_back"] for line in spikes(limited)]
    result |= thresholds(plain)
    return result


def poisoned_beside_plain(rank: int, num_ranks: int, described: dict[str, Any], directory: str) -> dict[str, Any]:
    """A job whose rows spike in two steps, and the weights of a loop on one process that leaves these steps out."""
    plain = TrainingJob.model_validate(described)
    trained(plain)
    job = variant(poisoned(plain, Path(directory)), "disturbed", {"save_interval_steps": 1})
    weights = to_checkpoint_tensors(plain_loop(job, [1, 2, 4, 6]))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, Path(directory) / "plain.safetensors")
    return {"job": job.model_dump(mode="json")}


def continued(
    rank: int, num_ranks: int, described: dict[str, Any], topology: dict[str, Any], num_looks: int
) -> dict[str, Any]:
    """The job goes on from its newest checkpoint on these ranks, and is interrupted after so many steps."""
    job = TrainingJob.model_validate(described)
    job = job.model_copy(update={"resources": job.resources.model_copy(update={"num_ranks": num_ranks, **topology})})
    training = trained(job, AfterSteps(num_looks))
    return {"step": training.position.step, "left_out": [each.first_step for each in training.position.skipped]}


def thresholds(plain: TrainingJob) -> dict[str, Any]:
    """The step whose loss is most deviations above the median, with a bound just above and just below it."""
    window = 3
    losses = [line["loss"] for line in metrics(plain)]
    distances = {}
    for step in range(window + 1, len(losses) + 1):
        before = np.array(losses[step - 1 - window : step - 1])
        deviation = 1.4826 * np.median(np.abs(before - np.median(before)))
        distances[step] = float((losses[step - 1] - np.median(before)) / deviation)
    step = max(distances, key=lambda step: distances[step])
    results = {}
    for name, shift in (("above", -1e-6), ("below", 1e-6)):
        scaled = plain.recipe.spikes.model_copy(
            update={
                "window_steps": window,
                "max_loss_deviations": distances[step] + shift,  # below 0 where every loss falls
                "min_loss_ratio": 0.0,
                "max_grad_norm_ratio": 1e9,
                "max_rollbacks": 9,
            }
        )
        job = variant(plain, name, spikes=scaled)
        trained(job)
        results[f"{name}_is_a_spike"] = (Path(job.work_dir) / "spikes.jsonl").exists() and spikes(job)[0][
            "step"
        ] == step
    return results


def keeping_the_best(rank: int, num_ranks: int, described: dict[str, Any], directory: str) -> dict[str, Any]:
    """A held-out shard that gets worse while the phase trains."""
    job = TrainingJob.model_validate(described)
    last = variant(job, "last", {"save_interval_steps": 100})
    trained(last)
    measured = {line["step"]: line for line in metrics(last) if "validation_bits_per_byte" in line}
    best_step = min(measured, key=lambda step: measured[step]["validation_bits_per_byte"])
    result: dict[str, Any] = {
        "measured_steps": sorted(measured),
        "best_step": best_step,
        "line": measured[best_step],
        "measuring_changes_nothing": is_equal(newest(last), plain_loop(job, list(range(1, 7)))),
    }
    best = variant(
        job,
        "best",
        {"save_interval_steps": 1, "num_kept_checkpoints": 1},
        validation=job.recipe.validation.model_copy(update={"keep": "best"}),
    )
    trained(best)
    position = json.loads((newest(best) / "state.json").read_text())
    result["position"] = [
        position["step"],
        position["num_tokens"],
        position["weights_step"],
        position["optimizer_steps"],
    ]
    result["kept_dirs"] = sorted(path.name for path in (Path(best.work_dir) / "checkpoints").glob("step-*"))
    result["best_weights"] = is_equal(newest(best), plain_loop(job, list(range(1, best_step + 1))))

    lost = variant(
        job, "lost", {"save_interval_steps": 100}, validation=job.recipe.validation.model_copy(update={"keep": "best"})
    )
    trained(lost, AfterSteps(best_step + 1))
    damaged = checkpoint_dir_of(Path(lost.work_dir), best_step) / "rank-00000.bin"
    if rank == 0:
        flip_a_bit(damaged)
    dist.barrier()
    trained(lost)
    result["a_lost_best_is_trained_again"] = state_digest(lost) == state_digest(best)
    return result
