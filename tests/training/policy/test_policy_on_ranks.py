"""Policy phases on two data-parallel ranks against one process: the same answers, metrics and weights, also with
ZeRO, further prompts for groups without signal, fillers, and after an interruption."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from model.formats.hf_checkpoint import load_model
from tasks.training.parallel.ranks import Axis
from tasks.training.policy.rank_shares import gather
from tasks.training.state.job import METRICS_FILE, ROLLOUTS_FILE, TrainingJob
from tasks.training.train_phase import describe_job
from tests.configs.test_phase_graph import CRITIC
from tests.support.rank_processes import on_ranks
from tests.support.saved_states import whole_tensors
from tests.support.training_dynamics import AfterSteps, state_digest, trained, variant
from tests.support.training_inputs import RESOURCES, SEQUENCE_LENGTH, TrainingInputs, metrics_of
from tests.training.adapters.test_adapters import LORA
from tests.training.test_objectives import GRPO, course, rl_recipe, sft_recipe

NUM_RANKS, NUM_STEPS, GROUPS, GROUP_SIZE = 2, 2, 5, 3
SIZE = {"samples_per_prompt": GROUP_SIZE}
REFILLING = {"max_refills": 2, "updates_per_rollout": 2}
SEQUENCES = {"kind": "gspo", "loss_mean": "answers", "clip_low": 3e-4, "clip_high": 4e-4, "updates_per_rollout": 2}
PPO = GRPO | CRITIC | {"kind": "ppo", "updates_per_rollout": 2}
CASES = {
    "grpo": ({"objective": GRPO | REFILLING | SIZE}, {"zero_stage": 0}),
    "gspo": ({"objective": GRPO | SEQUENCES | SIZE}, {"zero_stage": 2}),
    "ppo": ({"objective": PPO | SIZE}, {"zero_stage": 1}),
    "adapted": ({"objective": GRPO | REFILLING | SIZE, "adapter": LORA}, {"zero_stage": 2}),
}
ANSWERS = ("0", "wrong", "1", "wrong")
"""Half of the prompts have no right answer: their groups have equal rewards."""


def run_cases(rank: int, num_ranks: int, jobs: dict[str, dict], zero_stages: dict[str, int]) -> dict:
    """Each job on these ranks; on several the first once more, with an interruption after a step."""
    digests = {}
    for name, described in jobs.items():
        job = TrainingJob.model_validate(described)
        changes = {"num_ranks": num_ranks, "ranks_per_node": num_ranks}
        changes["zero_stage"] = zero_stages[name] if num_ranks > 1 else 0
        job = variant(job, str(num_ranks), changes)
        model = trained(job).trainable.model
        digests[name] = state_digest(job)
        if name == "adapted":
            start = load_model(Path(job.start_weights_dir)).state_dict()
            frozen = [each for each in model.named_parameters() if not each[1].requires_grad]
            assert frozen and all(parameter.equal(start[key]) for key, parameter in frozen), "frozen weights moved"
    if num_ranks > 1:
        first = TrainingJob.model_validate(jobs["grpo"])
        again = variant(first, "again", {"num_ranks": num_ranks, "ranks_per_node": num_ranks})
        trained(again, AfterSteps(1))
        trained(again)
        assert state_digest(again) == digests["grpo"], "an interrupted phase ends as another"
    return digests


def gather_late(rank: int, num_ranks: int) -> dict:
    """The second rank has answers after the time-out of the data axis."""
    group = dist.new_group([*range(num_ranks)], timeout=timedelta(seconds=1))
    time.sleep(3 * rank)
    return {"answers": gather([rank, 10 * rank], Axis(num_ranks, rank, tuple(range(num_ranks)), group))}


def test_a_rank_waits_for_anothers_answers_longer_than_for_its_gradients(tmp_path):
    assert [result["answers"] for result in on_ranks(gather_late, 2, tmp_path)] == [[0, 0, 1, 10]] * 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the work directories of all cases are."""
    root = tmp_path_factory.mktemp("policy_ranks")
    inputs = TrainingInputs(root / "home")
    tuned = inputs.train(inputs.chat_arguments(sft_recipe()))
    resources = RESOURCES.model_copy(update={"micro_batch_sequences": 7, "bucket_elements": 20_000})
    jobs = {}
    for name, (changes, _) in CASES.items():
        num_tokens = NUM_STEPS * GROUPS * GROUP_SIZE * SEQUENCE_LENGTH
        tokens = {"num_tokens": num_tokens, "course_num_tokens": num_tokens}
        axis = course("rl_reasoning", 2e-3, GROUPS * GROUP_SIZE)
        recipe = rl_recipe(max_epochs=20.0, course=axis, **changes, **tokens)
        arguments = inputs.prompt_arguments(recipe, ANSWERS, resources, start=tuned)
        jobs[name] = describe_job(work_dir=root / name, **arguments).model_dump(mode="json")
    stages = {name: changes["zero_stage"] for name, (_, changes) in CASES.items()}
    for num_ranks in (1, NUM_RANKS):
        (root / f"logs-{num_ranks}").mkdir()
        results = on_ranks(run_cases, num_ranks, root / f"logs-{num_ranks}", jobs, stages)
        assert all(result == results[0] for result in results)
    return root


@pytest.mark.parametrize("name", CASES)
def test_several_ranks_sample_and_train_as_one_process_does(runs, name):
    """15 answers and micro-batches of 7: one rank has a micro-batch more than the other, which takes a filler."""
    alone, together = (runs / f"{name}-{num_ranks}" for num_ranks in (1, NUM_RANKS))
    assert metrics_of(together / ROLLOUTS_FILE) == metrics_of(alone / ROLLOUTS_FILE), "the same answers and rewards"
    lines = metrics_of(alone / METRICS_FILE)
    assert len(lines) == NUM_STEPS and any(line["grad_norm"] > 0 for line in lines)
    for ours, expected in zip(metrics_of(together / METRICS_FILE), lines, strict=True):
        for metric in ("lm", "grad_norm", "reward_mean", "informative_groups", "refilled_groups", "clip_fraction"):
            assert ours[metric] == pytest.approx(expected[metric], rel=2e-3, abs=1e-5), metric
        if name == "ppo":
            for metric in ("value_loss", "critic_grad_norm", "explained_variance", "reference_kl"):
                assert ours[metric] == pytest.approx(expected[metric], rel=5e-3, abs=1e-5), metric
    actual, expected = (whole_tensors(each / "checkpoints" / f"step-{NUM_STEPS:09d}") for each in (together, alone))
    assert actual.keys() == expected.keys() and ("critic-master score.weight" in actual) == (name == "ppo")
    for key, tensor in actual.items():
        if "master " in key:
            torch.testing.assert_close(tensor, expected[key], rtol=1e-2, atol=2e-3, msg=key)


def test_groups_without_signal_are_replaced_and_the_position_counts_them(runs):
    lines = metrics_of(runs / "grpo-1" / METRICS_FILE)
    assert sum(line["refilled_groups"] for line in lines) >= NUM_STEPS
    assert sum(line["informative_groups"] for line in lines) > NUM_STEPS * GROUPS / 2, (
        "half of the prompts teach nothing"
    )
    assert max(line["informative_groups"] for line in lines) <= GROUPS, (
        "a step trains on no more groups than it has rows"
    )
    state = json.loads((runs / "grpo-1" / "checkpoints" / f"step-{NUM_STEPS:09d}" / "state.json").read_text())
    assert state["policy"]["num_refilled"] == {"synthetic": sum(line["refilled_groups"] for line in lines)}
