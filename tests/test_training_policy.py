"""GRPO in parts: advantages against a loop, gradients against the textbook surrogate, rewards, the order of prompts."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.schema import PolicyObjective
from model.generation import InProcessEngine, Sampling
from model.losses import IGNORED
from tasks.training.policy import clipped_weights, group_advantages, lay_out, policy_batches, target_log_probabilities
from tasks.training.rewards import RewardError, refuse_broken_rewards, reward_answer
from tasks.training.rollouts import Prompt, PromptOrder, Rollout, policy_model
from tests.model_recipes import GLM46, random_model, with_every_expert

pytestmark = pytest.mark.usefixtures("clear_routing")
CPU = torch.device("cpu")
OBJECTIVE = PolicyObjective(
    kind="grpo", samples_per_prompt=3, max_new_tokens=4, temperature=1.0, enable_thinking=False, clip_low=0.2, clip_high=0.28,
    max_constant_steps=5,
)  # fmt: skip
REWARDS = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
"""Three groups of three; the second has nothing to learn from."""


def rollouts_of(model, rewards=REWARDS, temperature: float = 1.0, shift: float = 0.0) -> list[Rollout]:
    """Sampled answers of different lengths to prompts of different lengths; `shift` moves the log-probabilities up and down in turn."""
    prompts = [[7 + number // 3] * (2 + number // 3) for number in range(len(rewards))]
    engine = InProcessEngine(model, weights_version="0", batch_sequences=16)
    generation = engine.generate(prompts, Sampling(4, temperature, stop_token_ids=tuple(range(200, 320)), seed=3), "0")
    return [
        Rollout(
            Prompt(str(number), "", ""), prompts[number], generation.token_ids[number],
            [value + shift * (-1) ** place for place, value in enumerate(generation.sampled_log_probabilities[number], start=number)],
            "", reward,
        )
        for number, reward in enumerate(rewards)
    ]  # fmt: skip


def test_advantages_equal_a_loop_over_groups():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    for row, advantages in zip(rewards.tolist(), group_advantages(rewards).tolist(), strict=True):
        mean = sum(row) / len(row)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in row) / len(row))
        assert advantages == pytest.approx([(reward - mean) / (std + 1e-6) for reward in row], abs=1e-5)
    assert group_advantages(rewards)[2].tolist() == [0.0] * 4


@pytest.mark.parametrize(("temperature", "shift"), [(1.0, 0.0), (1.0, 0.4), (1.6, 0.15)], ids=["on policy", "clipped", "tempered"])
def test_the_gradient_is_that_of_the_textbook_surrogate(temperature, shift):
    model = random_model(GLM46)
    rollouts = rollouts_of(model, temperature=temperature, shift=shift)
    objective = OBJECTIVE.model_copy(update={"temperature": temperature})
    batches, metrics = policy_batches(model, rollouts, objective, num_sequences=4, device=CPU)
    num_targets = sum(batch.num_lm_targets for batch in batches)
    assert num_targets == sum(len(rollout.answer_ids) for rollout in rollouts)
    for batch in batches:
        output = model(batch.token_ids_BT, target_ids_BT=batch.target_ids_BT, target_weights_BT=batch.weights_BT, temperature=temperature)
        (output.losses.lm * batch.num_lm_targets / num_targets).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    advantages = group_advantages(torch.tensor(REWARDS).view(3, 3)).flatten().tolist()
    terms, num_clipped, num_weighted = [], 0, 0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        sequence = torch.tensor([rollout.prompt_ids + rollout.answer_ids])
        logits = model(sequence[:, :-1]).logits_BTV[0, len(rollout.prompt_ids) - 1 :] / temperature
        now = logits.log_softmax(-1).gather(1, torch.tensor(rollout.answer_ids)[:, None])[:, 0]
        ratio = (now - torch.tensor(rollout.log_probabilities)).exp()
        clipped = ratio.clamp(1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high)
        terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
        num_clipped += int((clipped * advantage < ratio * advantage).sum())
        num_weighted += len(ratio) * (advantage != 0)
    torch.cat(terms).mean().backward()
    assert metrics["clip_fraction"] == pytest.approx(num_clipped / num_weighted)
    assert (num_clipped > 0) == (shift > 0.3)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def test_a_clipped_ratio_has_no_gradient_on_its_own_side_only():
    ratios = torch.tensor([[0.7, 0.9, 1.2, 1.4]]).log()
    assert clipped_weights(ratios, torch.tensor([2.0]), 0.2, 0.28)[0].tolist() == pytest.approx([1.4, 1.8, 2.4, 0.0])
    assert clipped_weights(ratios, torch.tensor([-2.0]), 0.2, 0.28)[0].tolist() == pytest.approx([0.0, -1.8, -2.4, -2.8])


def test_rows_hold_prompt_and_answer_and_train_the_stop_token():
    prompt = Prompt("p", "", "")
    rows = lay_out([Rollout(prompt, [5, 6, 7], [8, 200], [-1.0, -2.0], "", 0.0), Rollout(prompt, [5], [9], [-3.0], "", 0.0)], CPU)
    assert rows.token_ids_BT.tolist() == [[5, 6, 7, 8], [5, 0, 0, 0]]
    assert rows.target_ids_BT.tolist() == [[IGNORED, IGNORED, 8, 200], [9, IGNORED, IGNORED, IGNORED]]
    assert rows.rollout_log_probabilities_BT.tolist() == [[0, 0, -1, -2], [-3, 0, 0, 0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratios_are_one_where_the_weights_are_those_of_the_rollout(dtype):
    model = policy_model(random_model(with_every_expert(GLM46)), dtype)
    rollouts = rollouts_of(model)
    rows = lay_out(rollouts, CPU)
    now_BT = target_log_probabilities(model, rows, 1.0, num_sequences=2)
    tolerance = 1e-3 if dtype == "float32" else 0.2
    torch.testing.assert_close(now_BT, rows.rollout_log_probabilities_BT, rtol=0.0, atol=tolerance)


def test_a_step_without_an_informative_group_has_no_batches():
    model = random_model(GLM46)
    batches, metrics = policy_batches(model, rollouts_of(model, [1.0] * 3 + [0.0] * 3), OBJECTIVE, 4, CPU)
    assert (batches, metrics["informative_groups"], metrics["reward_mean"], metrics["pass_rate"]) == ([], 0, 0.5, 0.5)
    batches, metrics = policy_batches(model, rollouts_of(model, [1.0] * 3 + [0.0, 0.0, 1.0]), OBJECTIVE, 4, CPU)
    assert (len(batches), metrics["informative_groups"]) == (2, 1)


@pytest.mark.parametrize(
    ("text", "answer", "is_finished", "reward"),
    [
        ("\n19<|user|>", "19", True, 1.0),
        ("\n19<|user|>", " 19", True, 1.0),
        ("\n19<|observation|>", "19", True, 1.0),
        ("\n<think>12 + 7 = 20</think>\n19<|user|>", "19", True, 1.0),
        ("\n19", "19", False, 0.0),
        ("\n191<|user|>", "19", True, 0.0),
        ("\n19.<|user|>", "19", True, 0.0),
        ("\n-19<|user|>", "19", True, 0.0),
        ("\n<think>19<|user|>", "19", True, 0.0),
        ("<|user|>", "19", True, 0.0),
    ],
)
def test_only_the_verified_answer_that_ends_is_rewarded(text, answer, is_finished, reward):
    assert reward_answer(text, answer, is_finished) == reward


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_broken_reward_names_prompt_and_step(reward):
    refuse_broken_rewards([0.0, 1.0], "abc", 7)
    with pytest.raises(RewardError, match=rf"step 7: the reward of answer 1 to prompt abc is {reward}"):
        refuse_broken_rewards([0.0, reward], "abc", 7)


def test_an_epoch_asks_every_prompt_once_in_an_order_of_its_own(tmp_path):
    rows = [{"id": f"{number:02}", "prompt": f"What is {number}?", "answer": str(number)} for number in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    order = PromptOrder(tmp_path / "prompts.parquet", 46)
    epochs = [[prompt.id for prompt in order.groups(start, start + 11)] for start in (0, 11, 22)]
    assert all(sorted(epoch) == [row["id"] for row in rows] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [prompt.id for prompt in order.groups(9, 13)] == [*epochs[0][9:], *epochs[1][:2]]
    assert [prompt.id for prompt in PromptOrder(tmp_path / "prompts.parquet", 47).groups(0, 11)] != epochs[0]
