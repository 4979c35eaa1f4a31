"""The MTP layer while its loss weighs nothing: whatever gradients an engine gives it, its weights stay as they are."""

from __future__ import annotations

from pathlib import Path

from model.formats.hf_checkpoint import ROUTER_BIAS
from tasks.training.state.checkpoints import checkpoint_dir_of
from tasks.training.state.job import TrainingJob
from tasks.training.train_phase import describe_job
from tests.support.rank_processes import on_ranks
from tests.support.training_dynamics import trained, variant, weights_of
from tests.support.training_inputs import NUM_STEPS, RESOURCES, TrainingInputs, small_recipe

CASES = {
    "no gradient": (0.0, "float32", 0),
    "a gradient of zeros": (0.0, "float32", 1),
    "a gradient of zeros in bfloat16": (0.0, "bfloat16", 1),
    "momentum of steps that trained it": (0.3, "float32", 0),
}
"""Weight of the MTP loss in the first half of the steps, 0 in the second; dtype and zero_stage."""


def train_cases(rank: int, num_ranks: int, jobs: dict[str, dict]) -> dict[str, bool]:
    """Per case and tensor whether the steps after the half of them changed it."""
    changed = {}
    for name, described in jobs.items():
        job = variant(TrainingJob.model_validate(described), name, {"zero_stage": CASES[name][2]})
        trained(job)
        before, after = (weights_of(checkpoint_dir_of(Path(job.work_dir), step)) for step in (NUM_STEPS - 2, NUM_STEPS))
        changed |= {f"{name}: {key}": not tensor.equal(after[key]) for key, tensor in before.items()}
    return changed


def test_the_weights_of_an_mtp_layer_whose_loss_weighs_nothing_stay_as_they_are(tmp_path):
    inputs, recipe, jobs = TrainingInputs(tmp_path / "home"), small_recipe(), {}
    for name, (weight, dtype, _) in CASES.items():
        waypoints = [{"until_share": 0.5, "value": weight}, {"until_share": 1.0, "value": 0.0}]
        course = recipe.course.model_dump() | {"mtp_loss_weight": waypoints}
        optimizer = recipe.optimizer.model_dump() | {"weight_decay": 0.1}
        arguments = inputs.arguments(small_recipe(course=course, optimizer=optimizer, dtype=dtype), RESOURCES)
        jobs[name] = describe_job(work_dir=tmp_path / "work", **arguments).model_dump(mode="json")
    (changed,) = on_ranks(train_cases, 1, tmp_path, jobs)
    mtp = f"model.layers.{recipe.model.num_hidden_layers}."
    assert not [name for name, is_changed in changed.items() if mtp in name and is_changed and ROUTER_BIAS not in name]
    assert all(changed[f"{name}: lm_head.weight"] for name in CASES)
    assert sum(mtp in name for name in changed) > 10 * len(CASES)
