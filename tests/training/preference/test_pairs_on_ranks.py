"""Pair phases on two ranks that divide the model or its rows, against one process: losses, held-out losses, exported
weights, also in bfloat16 and after an interruption."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tasks.training.state.export import export_checkpoint
from tasks.training.state.job import METRICS_FILE, TrainingJob
from tasks.training.train_phase import describe_job
from tests.support.rank_processes import on_ranks
from tests.support.training_dynamics import AfterSteps, state_digest, trained, variant
from tests.support.training_inputs import RESOURCES, SEQUENCE_LENGTH, TrainingInputs, metrics_of
from tests.training.preference.test_pair_phases import KINDS, pair_arguments, pair_recipe
from tests.training.test_objectives import sft_recipe

NUM_ROWS = 22
"""Steps of 4, 4 and 3 pairs, one per micro-batch: ranks that share the last step need a filler, as for the held-out
pairs."""
ROUNDED = "reward in bfloat16"
CASES = {
    "pipeline": {"pipeline_parallel": 2, "zero_stage": 1},
    "experts": {"expert_parallel": 2, "zero_stage": 3},
    "tensor": {"tensor_parallel": 2, "zero_stage": 0},
    "context": {"context_parallel": 2, "zero_stage": 1},
}
ON_TWO = {**dict.fromkeys(KINDS, CASES), ROUNDED: {"tensor": CASES["tensor"] | {"zero_stage": 1}}}
ALONE = {kind: {"alone": {"zero_stage": 0}} for kind in ON_TWO}


def run_cases(rank: int, num_ranks: int, jobs: dict[str, dict], cases: dict[str, dict[str, dict]]) -> dict:
    """Train and export each job in each of its topologies; that of a pipeline once more, with an interruption."""
    world = {"num_ranks": num_ranks, "ranks_per_node": num_ranks}
    for kind, described in jobs.items():
        for name, changes in cases[kind].items():
            job = variant(TrainingJob.model_validate(described), name, world | changes)
            trained(job)
            export_checkpoint(job)
            if name == "pipeline":
                again = variant(job, "again")
                trained(again, AfterSteps(1))
                trained(again)
                assert state_digest(again) == state_digest(job), "an interrupted phase ends as another"
    return {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the work directories of all cases are."""
    root = tmp_path_factory.mktemp("pairs_on_ranks")
    inputs = TrainingInputs(root / "home")
    tuned = inputs.train(inputs.chat_arguments(sft_recipe()))
    resources = RESOURCES.model_copy(update={"micro_batch_sequences": 2, "bucket_elements": 20_000})
    tokens = dict.fromkeys(("num_tokens", "course_num_tokens"), NUM_ROWS * SEQUENCE_LENGTH)
    recipes = {kind: pair_recipe(kind, **tokens) for kind in KINDS}
    jobs = {}
    for name, recipe in (recipes | {ROUNDED: pair_recipe("reward", dtype="bfloat16", **tokens)}).items():
        arguments = pair_arguments(inputs, recipe, tuned, resources)
        jobs[name] = describe_job(work_dir=root / name, **arguments).model_dump(mode="json")
    for num_ranks, cases in ((1, ALONE), (2, ON_TWO)):
        (root / f"logs-{num_ranks}").mkdir()
        on_ranks(run_cases, num_ranks, root / f"logs-{num_ranks}", jobs, cases)
    return root


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_divide_the_model_train_measure_and_export_as_one_process_does(runs, kind, name):
    alone, together = (runs / f"{kind}-{each}" for each in ("alone", name))
    measured = 0
    for ours, expected in zip(metrics_of(together / METRICS_FILE), metrics_of(alone / METRICS_FILE), strict=True):
        metrics = [metric for metric in ("lm", "grad_norm", "validation_pair_loss") if metric in expected]
        assert [ours[metric] for metric in metrics] == pytest.approx([expected[metric] for metric in metrics], rel=1e-5)
        measured += "validation_pair_loss" in metrics
    assert measured, "held-out pairs were measured"
    actual, exported = (load_file(each / "final" / "hf" / "model.safetensors") for each in (together, alone))
    assert actual.keys() == exported.keys() and ("score.weight" in actual) == (kind == "reward")
    for key, tensor in exported.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-3, atol=2e-5, msg=key)


def test_tensor_ranks_step_in_bfloat16_with_zero(runs):
    """Rounding comes in another order: only the first step's figures are near those of one process."""
    ours, expected = (metrics_of(runs / f"{ROUNDED}-{name}" / METRICS_FILE) for name in ("tensor", "alone"))
    assert len(ours) == len(expected)
    assert ours[0]["lm"] == pytest.approx(expected[0]["lm"], rel=5e-3)
    assert ours[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.05)
