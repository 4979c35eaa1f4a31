"""PPO in parts: advantages, values and losses against plain references; the gradients of a step against those of both
surrogates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from configs.schema import PpoObjective
from model.architecture.preferences import ScoreHead
from model.architecture.values import ValueTargets, clipped_value_loss
from tasks.training.policy.answer_rows import target_log_probabilities
from tasks.training.policy.critic import (
    estimate_advantages,
    explained_variance,
    generalized_advantages,
    normalized,
    token_rewards,
    token_values,
)
from tasks.training.policy.policy import policy_updates
from tests.support.model_recipes import GLM46, random_model
from tests.training.policy.test_policy import CPU, OBJECTIVE, answer_log_probabilities, backward, rollouts_of
from tests.training.preference.test_pair_losses import reward_model

pytestmark = pytest.mark.usefixtures("clear_routing")
PPO = PpoObjective(
    **OBJECTIVE.model_dump() | {"kind": "ppo", "clip_low": 0.02, "clip_high": 0.02, "updates_per_rollout": 2},
    discount=0.9,
    gae_lambda=0.8,
    kl_coefficient=0.3,
    value_clip=0.05,
    critic_rate_ratio=1.0,
    reference=None,
)
REWARDS = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
"""Four groups of three, of which two have equal rewards: PPO learns from those too."""


def plain_advantages(rewards: list[float], values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """Equation 16 of arXiv 1506.02438, term by term."""
    errors = [
        reward + discount * following - value
        for reward, value, following in zip(rewards, values, [*values[1:], 0.0], strict=True)
    ]
    return [
        sum((discount * gae_lambda) ** ahead * error for ahead, error in enumerate(errors[start:]))
        for start in range(len(errors))
    ]


def test_advantages_have_the_known_values_and_equal_the_sum_over_errors():
    """One answer of three tokens after one position of prompt, one of one token; a padded position at the end."""
    is_answer = torch.tensor([[False, True, True, True, False], [False, True, False, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0]])
    values = torch.tensor([[9.0, 0.5, 0.25, 0.5, 9.0], [9.0, 0.5, 9.0, 9.0, 9.0]])
    advantages = generalized_advantages(rewards, values, is_answer, discount=1.0, gae_lambda=0.5)
    # Errors of the first: 0.25 - 0.5, 0.5 - 0.25, 1 - 0.5.
    assert advantages.tolist() == [[0.0, -0.25 + 0.125 + 0.125, 0.25 + 0.25, 0.5, 0.0], [0.0, -1.5, 0.0, 0.0, 0.0]]
    for discount, gae_lambda in ((0.9, 0.8), (1.0, 1.0), (0.7, 0.0)):
        ours = generalized_advantages(rewards, values, is_answer, discount, gae_lambda)
        for row in range(2):
            own = is_answer[row]
            expected = plain_advantages(rewards[row, own].tolist(), values[row, own].tolist(), discount, gae_lambda)
            assert ours[row, own].tolist() == pytest.approx(expected) and not ours[row, ~own].any()


def test_the_reward_is_paid_with_the_last_token_and_the_kl_with_each():
    is_answer = torch.tensor([[False, True, True], [True, False, False]])
    log_ratio = torch.tensor([[7.0, 0.5, -0.25], [2.0, 7.0, 7.0]])
    paid = token_rewards(torch.tensor([1.0, -2.0]), log_ratio, is_answer, kl_coefficient=0.5)
    assert paid.tolist() == [[0.0, -0.25, 1.125], [-3.0, 0.0, 0.0]]


def test_advantages_are_normalized_over_the_tokens_of_answers():
    is_answer = torch.tensor([[True, True, False], [True, False, False]])
    scaled = normalized(torch.tensor([[1.0, 3.0, 50.0], [5.0, 50.0, 50.0]]), is_answer)
    assert scaled[is_answer].tolist() == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)])
    everywhere_alike = torch.full((40, 31), 0.3)
    assert not scaled[~is_answer].any() and not normalized(everywhere_alike, everywhere_alike > 0).any()


def test_the_explained_variance_is_one_for_the_returns_and_below_zero_for_worse_than_their_mean():
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns, returns + 3.0) == 1.0
    assert explained_variance(returns, torch.ones(4)) == 0.0 > explained_variance(returns, -returns)
    assert explained_variance(torch.ones(4), returns) == 0.0


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_returns_that_differ_only_by_rounding_have_no_explained_variance(reward):
    """Without discount every return is the reward, up to the rounding of 40 values."""
    values, is_answer = torch.randn(8, 40) * 0.3, torch.ones(8, 40, dtype=torch.bool)
    rewards = token_rewards(torch.full((8,), reward), torch.zeros(8, 40), is_answer, 0.0)
    returns = generalized_advantages(rewards, values, is_answer, 1.0, 1.0) + values
    assert returns.var() > 0, "nothing was rounded: this shows nothing"
    assert explained_variance(returns[is_answer], values[is_answer]) == 0.0
    returns[0] += 1e-3
    assert explained_variance(returns[is_answer], values[is_answer]) < 0.0


def test_a_value_beyond_the_clip_has_a_gradient_only_where_it_moves_back():
    """Values 0.5, 0.5, -0.5 from 0 with returns 1, 0 and 1, clipped at 0.2: the first has come nearer, and is as far as
    it may go."""
    head, hidden = ScoreHead(1), torch.tensor([[[0.5], [0.5], [-0.5], [9.0]]], requires_grad=True)
    torch.nn.init.ones_(head.weight)
    values = ValueTargets(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.zeros(1, 4), clip=0.2)
    loss = clipped_value_loss(head, hidden, torch.tensor([[3, 4, 5, -100]]), values)
    loss.backward()
    assert loss.item() == pytest.approx((0.8**2 + 0.5**2 + 1.5**2) / 3 / 2)
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == pytest.approx([0.0, 0.5 / 3, -1.5 / 3, 0.0])


def plain_estimates(policy, reference, critic, rollouts) -> tuple[list[torch.Tensor], list[torch.Tensor], list]:
    """Advantages, returns and values of each answer's tokens, one answer at a time."""
    advantages, returns, values = [], [], []
    for rollout, reward in zip(rollouts, REWARDS, strict=True):
        sequence = torch.tensor([rollout.prompt_ids + rollout.answer_ids])
        hidden = critic.hidden_states(sequence[:, :-1])[0, len(rollout.prompt_ids) - 1 :]
        own = (hidden @ critic.score.weight[0]).tolist()
        log_ratio = answer_log_probabilities(policy, rollout) - answer_log_probabilities(reference, rollout)
        paid = (-PPO.kl_coefficient * log_ratio).tolist()
        paid[-1] += reward
        gained = plain_advantages(paid, own, PPO.discount, PPO.gae_lambda)
        advantages.append(torch.tensor(gained))
        returns.append(torch.tensor(gained) + torch.tensor(own))
        values.append(torch.tensor(own))
    whole = torch.cat(advantages)
    return [(each - whole.mean()) / whole.std(correction=0) for each in advantages], returns, values


def moved(model) -> None:
    """A step against the gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.02 * parameter.grad.sign()


def backward_critic(critic, batches) -> None:
    num_targets = sum(batch.num_lm_targets for batch in batches)
    critic.zero_grad()
    for batch in batches:
        output = critic(batch.token_ids_BT, **batch.model_arguments)
        (output.losses.lm * batch.num_lm_targets / num_targets).backward()


def assert_gradients(model, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(expected[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_second_update_has_the_gradients_of_the_plain_losses():
    """Policy and critic, after the first update has moved both: clips of ratios and of values act."""
    model, reference, critic = random_model(GLM46), random_model(GLM46, 1), reward_model(2)
    rollouts = rollouts_of(model, REWARDS)
    with torch.no_grad():
        advantages, returns, values = plain_estimates(model, reference, critic, rollouts)
        before = [answer_log_probabilities(model, rollout) for rollout in rollouts]

    def critique(rows, trainer, rewards):
        others = target_log_probabilities(reference, rows, 1.0, 5)
        return estimate_advantages(rows, rewards, token_values(critic, rows, 5), trainer, others, PPO)

    updates = policy_updates(
        lambda rows: target_log_probabilities(model, rows, 1.0, 5), rollouts, PPO, 5, CPU, critique
    )
    assert len(updates.policy) == len(updates.critic) == 2 and updates.metrics["informative_groups"] == 2
    backward(model, updates.policy[0]())
    backward_critic(critic, updates.critic[0])
    moved(model)
    moved(critic)
    ours = backward(model, updates.policy[1]())
    backward_critic(critic, updates.critic[1])
    of_critic = {name: each.grad.clone() for name, each in critic.named_parameters() if each.grad is not None}
    terms, errors, num_clipped = [], [], 0
    for number in range(6, 12):
        now = answer_log_probabilities(model, rollouts[number])
        ratio = (now - before[number]).exp()
        surrogate = torch.minimum(ratio * advantages[number], ratio.clamp(0.98, 1.02) * advantages[number])
        bounded = torch.maximum(surrogate, PPO.dual_clip * advantages[number])
        surrogate = torch.where(advantages[number] < 0, bounded, surrogate)
        rounding = (before[number] - torch.tensor(rollouts[number].log_probabilities)).exp()
        terms.append(-rounding * surrogate)
        sequence = torch.tensor([rollouts[number].prompt_ids + rollouts[number].answer_ids])
        hidden = critic.hidden_states(sequence[:, :-1])[0, len(rollouts[number].prompt_ids) - 1 :]
        value, old = hidden @ critic.score.weight[0], values[number]
        near = torch.clamp(value, old - PPO.value_clip, old + PPO.value_clip)
        worse = torch.maximum((value - returns[number]) ** 2, (near - returns[number]) ** 2)
        num_clipped += int((worse > (value - returns[number]) ** 2).sum())
        errors.append(worse / 2)
    model.zero_grad()
    torch.cat(terms).mean().backward()
    assert_gradients(model, ours)
    critic.zero_grad()
    torch.cat(errors).mean().backward()
    assert_gradients(critic, of_critic)
    assert updates.metrics["clip_fraction"] > 0 and num_clipped > 0, "both clips have acted"
    assert updates.metrics["reference_kl"] > 0


def test_advantages_that_are_all_zero_clip_nothing():
    model, critic = random_model(GLM46), reward_model(2)

    def critique(rows, trainer, rewards):
        estimates = estimate_advantages(rows, rewards, token_values(critic, rows, 16), trainer, trainer, PPO)
        return replace(estimates, advantages_BT=torch.zeros_like(estimates.advantages_BT))

    rollouts = rollouts_of(model, REWARDS)
    updates = policy_updates(
        lambda rows: target_log_probabilities(model, rows, 1.0, 16), rollouts, PPO, 16, CPU, critique
    )
    assert updates.policy[0]() and updates.metrics["clip_fraction"] == 0.0


def test_a_policy_that_is_its_reference_has_no_kl():
    model, critic = random_model(GLM46), reward_model(2)

    def critique(rows, trainer, rewards):
        others = target_log_probabilities(model, rows, 1.0, 16)
        return estimate_advantages(rows, rewards, token_values(critic, rows, 16), trainer, others, PPO)

    rollouts = rollouts_of(model, REWARDS)
    updates = policy_updates(
        lambda rows: target_log_probabilities(model, rows, 1.0, 16), rollouts, PPO, 16, CPU, critique
    )
    assert updates.metrics["reference_kl"] == 0.0
