"""Policy phases whose model is divided among ranks and whose answers a server samples, against one process: the same
answers, metrics and weights; after an update the server has the weights in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.training.state.job import METRICS_FILE, ROLLOUTS_FILE, TrainingJob
from tasks.training.train_phase import describe_job
from tests.support.engines.engine_servers import SglangServer
from tests.support.rank_processes import on_ranks
from tests.support.saved_states import whole_tensors
from tests.support.training_dynamics import trained, variant
from tests.support.training_inputs import RESOURCES, SEQUENCE_LENGTH, TrainingInputs, metrics_of
from tests.training.adapters.test_adapters import LORA
from tests.training.test_objectives import GRPO, course, rl_recipe, sft_recipe

NUM_STEPS, GROUPS, GROUP_SIZE = 2, 4, 4
ANSWERS = ("0", "1", "0", "1")
SERVED = GRPO | {"rollouts": "sglang", "routes": "ignore"}
RECIPES = {
    "tokens": {"objective": SERVED | {"updates_per_rollout": 2}},
    "answers": {"objective": SERVED | {"kind": "gspo", "loss_mean": "answers", "clip_low": 3e-4, "clip_high": 4e-4}},
    "adapted": {"objective": SERVED, "adapter": LORA},
}
TOPOLOGIES = {
    "pipeline": ("tokens", {"pipeline_parallel": 2}),
    "context": ("answers", {"context_parallel": 2, "zero_stage": 1, "micro_batch_tokens": 15}),
    "experts": ("tokens", {"expert_parallel": 2, "zero_stage": 2, "micro_batch_tokens": 30}),
    "weights": ("answers", {"zero_stage": 3}),
    "adapter": ("adapted", {"tensor_parallel": 2}),
    "rows": ("answers", {"zero_stage": 2, "micro_batch_tokens": 45}),
}
"""By what is divided."""
ALL_WAYS = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}


def run_cases(rank: int, num_ranks: int, jobs: dict[str, dict], cases: list[list]) -> dict:
    """Each case: [recipe, name, resources]."""
    for recipe, name, resources in cases:
        ranks = {"num_ranks": num_ranks, "ranks_per_node": num_ranks}
        trained(variant(TrainingJob.model_validate(jobs[recipe]), name, ranks | resources))
    return {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains cases on so many ranks and returns where their work directories are, beside those of one process."""
    root = tmp_path_factory.mktemp("divided_policies")
    inputs = TrainingInputs(root / "home")
    tuned = inputs.train(inputs.chat_arguments(sft_recipe()))
    server = SglangServer(tuned.path("hf/config.json").parent)
    resources = {"micro_batch_sequences": 5, "rollout_server": server.url, "save_interval_steps": 1}
    num_tokens = NUM_STEPS * GROUPS * GROUP_SIZE * SEQUENCE_LENGTH
    budget = {"num_tokens": num_tokens, "course_num_tokens": num_tokens}
    axis = course("rl_reasoning", 2e-3, GROUPS * GROUP_SIZE)
    jobs = {}
    for name, changes in RECIPES.items():
        recipe = rl_recipe(max_epochs=20.0, course=axis, **budget, **changes)
        arguments = inputs.prompt_arguments(recipe, ANSWERS, RESOURCES.model_copy(update=resources), start=tuned)
        jobs[name] = describe_job(work_dir=root / name, **arguments).model_dump(mode="json")

    def run_on(num_ranks: int, cases: list) -> Path:
        (root / f"logs-{num_ranks}").mkdir()
        on_ranks(run_cases, num_ranks, root / f"logs-{num_ranks}", jobs, cases)
        return root

    run_on(1, [(name, "alone", {}) for name in RECIPES])
    yield run_on
    server.stop()


@pytest.fixture(scope="module")
def root(run):
    return run(2, [(recipe, name, resources) for name, (recipe, resources) in TOPOLOGIES.items()])


def check_against_one_process(root: Path, recipe: str, name: str) -> None:
    together, alone = root / f"{recipe}-{name}", root / f"{recipe}-alone"
    samples = [
        [line["samples"] for line in metrics_of(each / ROLLOUTS_FILE) if line["step"] == 1]
        for each in (together, alone)
    ]
    assert samples[0] == samples[1]
    lines, expected = metrics_of(together / METRICS_FILE), metrics_of(alone / METRICS_FILE)[0]
    assert expected["grad_norm"] > 1e-3, "a step that moves nothing"
    for metric in ("lm", "grad_norm", "reward_mean", "informative_groups", "clip_fraction"):
        assert lines[0][metric] == pytest.approx(expected[metric], rel=2e-3, abs=1e-5), metric
    actual, wanted = (whole_tensors(each / "checkpoints" / "step-000000001") for each in (together, alone))
    assert actual.keys() == wanted.keys()
    for key in (key for key in actual if "master " in key):
        torch.testing.assert_close(actual[key], wanted[key], rtol=1e-4, atol=1e-5, msg=key)
    # The second step's answers are those of updated weights: else the trainer's log-probabilities would be others.
    assert len(lines) == NUM_STEPS and all(line["rollout_log_ratio"] < 1e-5 for line in lines)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_divided_policy_trains_as_one_process_does(root, name):
    check_against_one_process(root, TOPOLOGIES[name][0], name)


@pytest.mark.long
def test_a_policy_that_is_divided_in_three_ways_trains_as_one_process_does(run):
    check_against_one_process(run(4, [("tokens", "all", ALL_WAYS)]), "tokens", "all")
