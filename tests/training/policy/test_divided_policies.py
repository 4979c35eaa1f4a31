"""Policy phases whose model is divided among ranks and whose answers a server samples, against one process: the same
answers, metrics and weights, of a critic too; after an update the server has the weights in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.architecture.transformer import Glm4Moe
from tasks.training.state.job import METRICS_FILE, ROLLOUTS_FILE, TrainingJob
from tasks.training.train_phase import describe_job
from tests.configs.test_phase_graph import CRITIC
from tests.support.engines.engine_servers import SglangServer
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.rank_processes import on_ranks
from tests.support.saved_models import save_checkpoint
from tests.support.saved_states import whole_tensors
from tests.support.training_dynamics import trained, variant
from tests.support.training_inputs import RESOURCES, SEQUENCE_LENGTH, TrainingInputs, metrics_of
from tests.training.adapters.test_adapters import LORA
from tests.training.test_objectives import GRPO, MODEL, course, rl_recipe, sft_recipe

NUM_STEPS, GROUPS, GROUP_SIZE = 2, 4, 4
ANSWERS = ("0", "1", "0", "1")
JUDGE = with_every_expert(
    GLM46.model_copy(update={"hidden_size": 32, "num_hidden_layers": 2, "num_nextn_predict_layers": 0})
)
"""A reward model smaller than the policy."""
SCORED = {"rewards": GRPO["rewards"] | {"reward_model": 0.5}, "reward_model": "reward_model"}
PPO = {"kind": "ppo", "updates_per_rollout": 2}
SERVED = GRPO | {"rollouts": "sglang", "routes": "ignore"}
REPLAYED = {"routes": "replay", "mismatch": {"max_kl": 1e3, "max_route_difference": 1.0}}
"""Of routes that the server names falsely: one that is replayed to another token, or not at all, changes the step."""
RECIPES = {
    "tokens": {"objective": SERVED | {"updates_per_rollout": 2}},
    "answers": {"objective": SERVED | {"kind": "gspo", "loss_mean": "answers", "clip_low": 3e-4, "clip_high": 4e-4}},
    "adapted": {"objective": SERVED, "adapter": LORA},
    "critic": {"objective": SERVED | SCORED | CRITIC | PPO, "scorer": JUDGE.model_dump()},
    "bare critic": {"objective": SERVED | CRITIC | PPO, "adapter": LORA},
    "scores": {"objective": SERVED | SCORED, "scorer": JUDGE.model_dump()},
    "routed": {"objective": SERVED | REPLAYED, "model": MODEL | {"num_experts_per_tok": 2}},
}
TOPOLOGIES = {
    "pipeline": ("tokens", {"pipeline_parallel": 2}),
    "context": ("answers", {"context_parallel": 2, "zero_stage": 1, "micro_batch_tokens": 15}),
    "experts": ("tokens", {"expert_parallel": 2, "zero_stage": 2, "micro_batch_tokens": 30}),
    "weights": ("answers", {"zero_stage": 3}),
    "adapter": ("adapted", {"tensor_parallel": 2}),
    "rows": ("answers", {"zero_stage": 2, "micro_batch_tokens": 45}),
    "critic in stages": ("critic", {"pipeline_parallel": 2, "zero_stage": 1}),
    "critic's matrices": ("critic", {"tensor_parallel": 2}),
    "critic's positions": ("critic", {"context_parallel": 2, "zero_stage": 1, "micro_batch_tokens": 15}),
    "critic's experts": ("critic", {"expert_parallel": 2, "zero_stage": 2, "micro_batch_tokens": 30}),
    "critic's weights": ("critic", {"zero_stage": 3}),
    "critic's experts and weights": ("critic", {"expert_parallel": 2, "zero_stage": 3}),
    "critic of an adapter": ("bare critic", {"tensor_parallel": 2, "zero_stage": 1}),
    "scores in stages": ("scores", {"pipeline_parallel": 2}),
    "scores of shares": ("scores", {"zero_stage": 1, "micro_batch_tokens": 45}),
    "routes in stages": ("routed", {"pipeline_parallel": 2}),
    "routes of slices": ("routed", {"tensor_parallel": 2}),
    "routes of positions": ("routed", {"context_parallel": 2, "zero_stage": 1, "micro_batch_tokens": 15}),
    "routes to experts": ("routed", {"expert_parallel": 2, "zero_stage": 2, "micro_batch_tokens": 30}),
}
"""By what is divided."""
METRICS = {"lm", "grad_norm", "reward_mean", "reward_score", "informative_groups", "clip_fraction", "value_loss"}
METRICS |= {"critic_grad_norm", "explained_variance", "reference_kl", "route_difference"}
JUDGED = ("critic", "scores")
ALL_WAYS = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}


def run_cases(rank: int, num_ranks: int, jobs: dict[str, dict], cases: list[list]) -> dict:
    """Each case: [recipe, name, resources]."""
    for recipe, name, resources in cases:
        ranks = {"num_ranks": num_ranks, "ranks_per_node": num_ranks}
        trained(variant(TrainingJob.model_validate(jobs[recipe]), name, ranks | resources))
    return {}


def save_judge(hf_dir: Path) -> None:
    """Of random weights whose scores differ by more than rounding."""
    judge = Glm4Moe(JUDGE, is_scored=True)
    judge.init_weights(torch.Generator().manual_seed(3))
    with torch.no_grad():
        judge.score.weight.mul_(20)
    hf_dir.mkdir()
    ends = {"eos_token_ids": [0], "pad_token_id": 0}
    save_checkpoint(judge, hf_dir, **ends, dtype=torch.float32, max_shard_bytes=1 << 30)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains cases on so many ranks and returns where their work directories are, beside those of one process."""
    root = tmp_path_factory.mktemp("divided_policies")
    inputs = TrainingInputs(root / "home")
    tuned = inputs.train(inputs.chat_arguments(sft_recipe()))
    server = SglangServer(tuned.path("hf/config.json").parent)
    server.turned_by = 1
    save_judge(root / "judge")
    resources = {"micro_batch_sequences": 5, "rollout_server": server.url, "save_interval_steps": 1}
    num_tokens = NUM_STEPS * GROUPS * GROUP_SIZE * SEQUENCE_LENGTH
    budget = {"num_tokens": num_tokens, "course_num_tokens": num_tokens}
    axis = course("rl_reasoning", 2e-3, GROUPS * GROUP_SIZE)
    jobs = {}
    for name, changes in RECIPES.items():
        recipe = rl_recipe(max_epochs=20.0, course=axis, **budget, **changes)
        arguments = inputs.prompt_arguments(recipe, ANSWERS, RESOURCES.model_copy(update=resources), start=tuned)
        job = describe_job(work_dir=root / name, **arguments)
        if recipe.scorer is not None:
            job = job.model_copy(update={"reward_model_dir": str(root / "judge")})
        jobs[name] = job.model_dump(mode="json")

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
    for metric in METRICS & expected.keys():
        assert lines[0][metric] == pytest.approx(expected[metric], rel=2e-3, abs=1e-5), metric
    assert ("value_loss" in expected) == ("critic" in recipe) and ("reward_score" in expected) == (recipe in JUDGED)
    actual, wanted = (whole_tensors(each / "checkpoints" / "step-000000001") for each in (together, alone))
    assert actual.keys() == wanted.keys()
    assert ("critic-master score.weight" in actual) == ("critic" in recipe)
    for key in (key for key in actual if "master " in key):
        torch.testing.assert_close(actual[key], wanted[key], rtol=1e-4, atol=1e-5, msg=key)
    # The second step's answers are those of updated weights: else the trainer's log-probabilities would be others.
    ratios = [line["rollout_log_ratio"] for line in lines]
    assert len(ratios) == NUM_STEPS and all((ratio < 1e-5) == (recipe != "routed") for ratio in ratios)
    assert recipe != "routed" or 0.5 < expected["route_difference"] < 1


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_divided_policy_trains_as_one_process_does(root, name):
    check_against_one_process(root, TOPOLOGIES[name][0], name)


@pytest.mark.long
def test_a_policy_that_is_divided_in_three_ways_trains_as_one_process_does(run):
    root = run(4, [(recipe, "all", ALL_WAYS) for recipe in ("tokens", "critic")])
    for recipe in ("tokens", "critic"):
        check_against_one_process(root, recipe, "all")
