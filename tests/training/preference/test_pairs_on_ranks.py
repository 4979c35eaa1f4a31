"""Phases on preference pairs on divided models against one process: losses, held-out losses, weights, what is exported,
and an interruption."""

from __future__ import annotations

import json
from pathlib import Path

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
"""Of three steps: 4 pairs, 4 pairs, 3 pairs, so that two ranks that share a step's pairs need a filler."""
CASES = {
    "pipeline": {"pipeline_parallel": 2},
    "experts": {"expert_parallel": 2, "zero_stage": 1},
    "zero 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel": 2, "zero_stage": 0},
    "context": {"context_parallel": 2, "zero_stage": 0},
}


def run_cases(rank: int, num_ranks: int, jobs: dict[str, dict], cases: dict[str, dict]) -> dict:
    for kind, described in jobs.items():
        for name, changes in cases.items():
            job = variant(
                TrainingJob.model_validate(described),
                name,
                {"num_ranks": num_ranks, "ranks_per_node": num_ranks, **changes},
            )
            import time
            started = time.time()
            trained(job)
            export_checkpoint(job)
            print("passed", kind, name, time.time() - started, flush=True)
    return {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the work directories of all cases are."""
    root = tmp_path_factory.mktemp("pairs_on_ranks")
    inputs = TrainingInputs(root / "home")
    tuned = inputs.train(inputs.chat_arguments(sft_recipe()))
    resources = RESOURCES.model_copy(update={"micro_batch_sequences": 2, "bucket_elements": 20_000})
    jobs = {}
    for kind in KINDS:
        tokens = dict.fromkeys(("num_tokens", "course_num_tokens"), NUM_ROWS * SEQUENCE_LENGTH)
        arguments = pair_arguments(inputs, pair_recipe(kind, **tokens), tuned, resources)
        jobs[kind] = describe_job(work_dir=root / kind, **arguments).model_dump(mode="json")
    for num_ranks, cases in ((1, {"alone": {"zero_stage": 0}}), (2, CASES)):
        (root / f"logs-{num_ranks}").mkdir()
        on_ranks(run_cases, num_ranks, root / f"logs-{num_ranks}", jobs, cases)
        print(open(root / f"logs-{num_ranks}/rank-0.log").read())
    return root


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs(runs, kind, name):
    alone, divided = (runs / f"{kind}-{each}" for each in ("alone", name))
    for ours, expected in zip(metrics_of(divided / METRICS_FILE), metrics_of(alone / METRICS_FILE), strict=True):
        for metric in ("lm", "grad_norm", "validation_pair_loss"):
            if metric in expected:
                print(metric, ours[metric], expected[metric], abs(ours[metric] / expected[metric] - 1))
    actual, expected = (load_file(each / "final/hf/model.safetensors") for each in (divided, alone))
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        print("weights", key, float((actual[key] - tensor).abs().max()))
