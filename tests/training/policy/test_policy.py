"""GRPO in parts: advantages against a loop, gradients against the textbook surrogate, broken rewards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from configs.schema import EpisodeRecipe, ImportanceRecipe, MismatchRecipe, PolicyObjective, RewardRecipe
from model.architecture.losses import IGNORED
from model.architecture.transformer import Glm4Moe
from model.generation.generation import InProcessEngine, Sampling
from tasks.training.parallel.ranks import Axis
from tasks.training.policy.answer_rows import AnswerRows, RouteComparison, lay_out, target_log_probabilities
from tasks.training.policy.policy import (
    MISMATCH_METRICS,
    clipped_weights,
    group_advantages,
    importance_ratios,
    importance_weights,
    policy_updates,
    refuse_mismatch,
    surrogate_weights,
)
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rank_shares import share_batches
from tasks.training.policy.rewards import Reward, RewardError, refuse_broken_rewards
from tasks.training.policy.rollout_connection import EngineError
from tasks.training.policy.rollouts import Rollout, policy_model
from tests.support.model_recipes import GLM46, random_model, with_every_expert

pytestmark = pytest.mark.usefixtures("clear_routing")
CPU = torch.device("cpu")
OBJECTIVE = PolicyObjective(
    kind="grpo",
    samples_per_prompt=3,
    max_new_tokens=4,
    temperature=1.0,
    enable_thinking=False,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
    mismatch=MismatchRecipe(max_kl=0.1, max_route_difference=0.2),
    importance=ImportanceRecipe(kind="truncated", level="tokens", floor=0.0, cap=2.0),
    routes="ignore",
    max_refills=0,
    updates_per_rollout=1,
    loss_mean="tokens",
    rewards=RewardRecipe(verified=1.0, format=0.0, length=0.0, overlong_tokens=2, reward_model=0.0),
    difficulty=None,
    episodes=EpisodeRecipe(max_turns=1, max_turn_tokens=4, max_observation_chars=100, tool_seconds={"others": 60.0}),
    max_constant_steps=5,
    dynamic_temperature=None,
    rollouts="in_process",
    reward_model=None,
)
REWARDS = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
"""Three groups of three; the second has nothing to learn from."""


def clips(low: float, high: float) -> PolicyObjective:
    return OBJECTIVE.model_copy(update={"clip_low": low, "clip_high": high})


def prompt_named(identity: str) -> Prompt:
    return Prompt(identity, "synthetic", "exact", "", "[]", "")


def reward_of(total: float) -> Reward:
    return Reward(verified=total, format=0.0, length=0.0, has_verdict=True, reward_model=None, total=total)


def rollouts_of(model, rewards=REWARDS, temperature: float = 1.0, shift: float = 0.0) -> list[Rollout]:
    """Sampled answers of different lengths to prompts of different lengths; `shift` moves the log-probabilities up and
    down in turn."""
    prompts = [[7 + number // 3] * (2 + number // 3) for number in range(len(rewards))]
    engine = InProcessEngine(model, weights_version="0", batch_sequences=16)
    generation = engine.generate(prompts, Sampling(4, temperature, stop_token_ids=tuple(range(200, 320)), seed=3), "0")
    return [
        Rollout(
            prompt_named(str(number)),
            prompts[number],
            generation.token_ids[number],
            [
                value + shift * (-1) ** position
                for position, value in enumerate(generation.sampled_log_probabilities[number], start=number)
            ],
            "",
            reward_of(reward),
        )
        for number, reward in enumerate(rewards)
    ]


def updates_of(model, rollouts, objective, num_sequences: int = 16):
    updates = policy_updates(
        lambda rows: target_log_probabilities(model, rows, objective.temperature, num_sequences),
        rollouts,
        objective,
        num_sequences,
        CPU,
    )
    assert updates.critic == []
    return updates.policy, updates.metrics


def backward(model, batches, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients of an update, as the training step accumulates them."""
    num_targets = sum(batch.num_lm_targets for batch in batches)
    model.zero_grad()
    for batch in batches:
        output = model(
            batch.token_ids_BT,
            target_ids_BT=batch.target_ids_BT,
            target_weights_BT=batch.weights_BT,
            temperature=temperature,
        )
        (output.losses.lm * batch.num_lm_targets / num_targets).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def answer_log_probabilities(model, rollout) -> torch.Tensor:
    sequence = torch.tensor([rollout.prompt_ids + rollout.answer_ids])
    logits = model(sequence[:, :-1]).logits_BTV[0, len(rollout.prompt_ids) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.answer_ids)[:, None])[:, 0]


@pytest.mark.parametrize(("kind", "loss_mean"), [("grpo", "tokens"), ("grpo", "answers"), ("gspo", "answers")])
def test_the_second_update_on_a_rollout_has_the_gradient_of_the_clipped_surrogate(kind, loss_mean):
    """The first update moves the weights; the ratio of the second is against those before it, and some of it is
    clipped."""
    model = random_model(GLM46)
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    rollouts = rollouts_of(model, rewards)
    changes = {"kind": kind, "loss_mean": loss_mean, "updates_per_rollout": 2, "clip_low": 0.02, "clip_high": 0.02}
    objective = OBJECTIVE.model_copy(update=changes)
    updates, metrics = updates_of(model, rollouts, objective)
    assert len(updates) == 2, "three groups have something to learn from: two of them are in the first part"
    before = [answer_log_probabilities(model, rollout).detach() for rollout in rollouts]
    backward(model, updates[0]())
    assert metrics["clip_fraction"] == 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.02 * parameter.grad.sign()
    ours = backward(model, updates[1]())
    advantages = group_advantages(torch.tensor(rewards).view(-1, 3)).flatten().tolist()
    terms, num_clipped, num_tokens = [], 0, 0
    for number in (9, 10, 11):
        now = answer_log_probabilities(model, rollouts[number])
        difference = now - before[number]
        ratio = (difference.mean() if kind == "gspo" else difference).exp().expand(len(now))
        clipped = ratio.clamp(0.98, 1.02)
        term = -torch.minimum(ratio * advantages[number], clipped * advantages[number])
        num_clipped += int((term.detach() != -(ratio * advantages[number]).detach()).sum())
        num_tokens += len(now)
        rounding = (before[number] - torch.tensor(rollouts[number].log_probabilities)).exp()
        terms.append(rounding * term)
    model.zero_grad()
    (
        torch.cat(terms).mean() if loss_mean == "tokens" else torch.stack([term.mean() for term in terms]).mean()
    ).backward()
    assert 0 < num_clipped < num_tokens
    assert metrics["clip_fraction"] == pytest.approx(num_clipped / num_tokens / 3), "one of the three groups"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                ours[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
            )


def test_a_step_takes_no_more_updates_than_it_has_groups_to_learn_from():
    model = random_model(GLM46)
    many = OBJECTIVE.model_copy(update={"updates_per_rollout": 8})
    updates, _ = updates_of(model, rollouts_of(model), many)
    assert len(updates) == 2 and len(updates_of(model, rollouts_of(model, [1.0] * 9), many)[0]) == 0


def test_a_sequences_ratio_with_a_mean_over_tokens_is_refused():
    with pytest.raises(ValueError, match="set loss_mean to answers"):
        PolicyObjective(**OBJECTIVE.model_dump() | {"kind": "gspo"})


def test_advantages_equal_a_loop_over_groups():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    for row, advantages in zip(rewards.tolist(), group_advantages(rewards).tolist(), strict=True):
        mean = sum(row) / len(row)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in row) / len(row))
        assert advantages == pytest.approx([(reward - mean) / (std + 1e-6) for reward in row], abs=1e-5)
    assert group_advantages(rewards)[2].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("temperature", "shift"), [(1.0, 0.0), (1.0, 0.8), (1.6, 0.15)], ids=["on policy", "truncated", "tempered"]
)
def test_the_gradient_is_that_of_the_textbook_surrogate(temperature, shift):
    """min(ratio A, clip(ratio) A) over the weights before the update, each token weighted by min(trainer / rollout,
    cap)."""
    model = random_model(GLM46)
    rollouts = rollouts_of(model, temperature=temperature, shift=shift)
    objective = OBJECTIVE.model_copy(update={"temperature": temperature})
    (update,), metrics = updates_of(model, rollouts, objective, num_sequences=4)
    batches = update()
    num_targets = sum(batch.num_lm_targets for batch in batches)
    ours = backward(model, batches, temperature)
    model.zero_grad()
    advantages = group_advantages(torch.tensor(REWARDS).view(3, 3)).flatten().tolist()
    terms, log_ratios = [], []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        if advantage == 0:
            continue
        sequence = torch.tensor([rollout.prompt_ids + rollout.answer_ids])
        logits = model(sequence[:, :-1]).logits_BTV[0, len(rollout.prompt_ids) - 1 :] / temperature
        now = logits.log_softmax(-1).gather(1, torch.tensor(rollout.answer_ids)[:, None])[:, 0]
        ratio = (now - now.detach()).exp()
        clipped = ratio.clamp(1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high)
        log_ratios.append(now.detach() - torch.tensor(rollout.log_probabilities))
        terms.append(-log_ratios[-1].exp().clamp(max=2.0) * torch.minimum(ratio * advantage, clipped * advantage))
    log_ratio = torch.cat(log_ratios)
    assert num_targets == len(log_ratio), "a group of equal rewards counts in no mean"
    torch.cat(terms).mean().backward()
    assert metrics["truncated_fraction"] == pytest.approx(float((log_ratio.exp() > 2.0).float().mean()))
    assert metrics["rollout_log_ratio"] == pytest.approx(float(log_ratio.abs().mean()), abs=1e-5)
    assert (metrics["truncated_fraction"] > 0) == (shift > 0.7) and metrics["clip_fraction"] == 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                ours[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
            )


def test_weights_of_a_policy_that_has_moved_are_the_surrogates_gradient():
    """Dual-clip PPO (arXiv 1912.09729, eq. 5): max(min(ratio A, clip(ratio) A), c A) where A is negative."""
    draw = torch.Generator().manual_seed(4)
    trainer = -torch.rand(5, 7, generator=draw) * 3
    now = (trainer + torch.randn(5, 7, generator=draw) * 0.6).requires_grad_()
    advantages = torch.tensor([1.5, -0.5, 0.0, 2.0, -1.0])[:, None].expand(5, 7)
    ratio = (now - trainer).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    torch.where(advantages < 0, torch.maximum(surrogate, 1.5 * advantages), surrogate).sum().backward()
    rows = AnswerRows(torch.zeros(5, 7, dtype=torch.int64), torch.zeros(5, 7, dtype=torch.int64), trainer)
    dual = OBJECTIVE.model_copy(update={"dual_clip": 1.5})
    torch.testing.assert_close(surrogate_weights(now.detach(), trainer, rows, advantages, dual), now.grad)
    single = surrogate_weights(now.detach(), trainer, rows, advantages, OBJECTIVE)
    differ = single != now.grad
    assert int(differ.sum()) > 0 and bool((advantages[differ] < 0).all()), "the second bound has acted, on its own side"


@pytest.mark.parametrize("level", ["tokens", "answers"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_importance_weights_equal_a_loop_over_answers(kind, level):
    probabilities = {
        "trainer": [[0.5, 0.9, 0.2], [0.4, 0.3, 0.6], [0.1, 0.5, 0.9]],
        "rollout": [[0.5, 0.3, 0.4], [0.2, 0.4, 0.5], [0.9, 0.4, 0.9]],
    }
    num_tokens, floor, cap = [2, 3, 3], 0.25, 1.75
    expected = torch.zeros(3, 3)
    for row, size in enumerate(num_tokens):
        ratios = [probabilities["trainer"][row][t] / probabilities["rollout"][row][t] for t in range(size)]
        ratios = [math.prod(ratios)] * size if level == "answers" else ratios
        for position, ratio in enumerate(ratios):
            is_within = floor <= ratio <= cap
            bound = min(max(ratio, floor), cap) if kind == "truncated" else 0.0
            expected[row, position] = ratio if is_within else bound
    trainer, rollout = (torch.tensor(values).log() for values in probabilities.values())
    targets = torch.tensor([[5 if position < size else IGNORED for position in range(3)] for size in num_tokens])
    rows = AnswerRows(torch.zeros_like(targets), targets, rollout)
    recipe = ImportanceRecipe(kind=kind, level=level, floor=floor, cap=cap)
    weights = importance_weights(importance_ratios(trainer, rows, recipe), recipe) * rows.is_answer_BT
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("bounds", [{"floor": 0.0, "cap": 1.0}, {"floor": 1.0, "cap": 2.0}])
def test_a_mask_that_rounding_would_decide_is_refused(bounds):
    with pytest.raises(ValueError, match=r"rounding alone leaves out tokens .*Set cap to 1\.01 .*or kind to truncated"):
        ImportanceRecipe(kind="masked", level="tokens", **bounds)
    assert ImportanceRecipe(kind="truncated", level="tokens", **bounds).kind == "truncated"


def test_a_masked_answer_has_no_gradient_and_the_others_keep_theirs():
    """Two answers of one group: the one that the trainer finds 4 times as likely is left out, and counted."""
    model = random_model(GLM46)
    rollouts = rollouts_of(model, [1.0, 0.0, 0.0])
    first = rollouts[0]
    lowered = [first.log_probabilities[0] - math.log(4.0), *first.log_probabilities[1:]]
    rollouts[0] = replace(first, log_probabilities=lowered)
    masked = OBJECTIVE.model_copy(
        update={"importance": ImportanceRecipe(kind="masked", level="answers", floor=0.5, cap=2.0)}
    )
    (update,), metrics = updates_of(model, rollouts, masked)
    (batch,) = update()
    is_answer = batch.target_ids_BT != IGNORED
    assert not batch.weights_BT[0].any() and (batch.weights_BT[1:][is_answer[1:]] < 0).all()
    assert metrics["truncated_fraction"] == pytest.approx(float(is_answer[0].sum() / is_answer.sum()))
    assert metrics["clip_fraction"] == 0.0, "what is masked is not clipped"


def test_answers_of_other_weights_are_refused_beyond_the_bound_and_named():
    """What the weights themselves sampled passes; twice as likely in training is a KL of e^x - 1 - x at x = ln 2."""
    model = random_model(GLM46)
    own = rollouts_of(model, [1.0, 0.0, 0.0])
    others = [
        replace(each, log_probabilities=[value - math.log(2) for value in each.log_probabilities]) for each in own
    ]
    refuse_mismatch(updates_of(model, own, OBJECTIVE)[1], OBJECTIVE, step=7)
    metrics = updates_of(model, others, OBJECTIVE)[1]
    assert metrics["rollout_kl"] == pytest.approx(1 - math.log(2), abs=1e-3)
    with pytest.raises(EngineError, match=r"step 7: rollout_kl is 0.307, objective.mismatch.max_kl allows 0.1: .*"):
        refuse_mismatch(metrics, OBJECTIVE, step=7)
    refuse_mismatch({"route_difference": 0.2}, OBJECTIVE, step=7)
    with pytest.raises(EngineError, match=r"route_difference is 0.21, objective.mismatch.max_route_difference allows"):
        refuse_mismatch({"route_difference": 0.21}, OBJECTIVE, step=7)


def test_rounding_in_bfloat16_leaves_no_token_without_a_gradient():
    model = policy_model(random_model(with_every_expert(GLM46), std=0.1), "bfloat16")
    rollouts = rollouts_of(model, [1.0, 0.0, 0.0] * 12)
    narrow = OBJECTIVE.model_copy(update={"clip_low": 0.01, "clip_high": 0.01})
    (update,), metrics = updates_of(model, rollouts, narrow)
    batches = update()
    answers = torch.cat([batch.weights_BT[batch.target_ids_BT != IGNORED] for batch in batches])
    assert (answers != 0).all() and metrics["clip_fraction"] == 0.0 and 0 < metrics["rollout_log_ratio"] < 0.1
    rows = lay_out(rollouts, CPU)
    rounding_BT = target_log_probabilities(model, rows, 1.0, 16) - rows.rollout_log_probabilities_BT
    advantages_B1 = group_advantages(torch.tensor([1.0, 0.0, 0.0] * 12).view(-1, 3)).view(-1, 1)
    against_rollout = clipped_weights(rounding_BT, advantages_B1.expand_as(rounding_BT), clips(1e-4, 2e-4))[
        rows.is_answer_BT
    ]
    assert (against_rollout == 0).float().mean() > 0.2, "a clip against the rollout would have cut these"


@pytest.mark.parametrize("kind", ["grpo", "ppo", "gspo"])
def test_bounds_of_a_sequences_ratio_are_refused_for_a_tokens(kind):
    values = OBJECTIVE.model_dump() | {"kind": kind, "clip_low": 1e-4, "clip_high": 2e-4, "loss_mean": "answers"}
    if kind == "gspo":
        assert PolicyObjective(**values).clip_low == 1e-4
        return
    with pytest.raises(
        ValueError,
        match=rf"'clip_low': 0.0001, 'clip_high': 0.0002.* with kind {kind}: bounds below 0.01 .*Set kind gspo",
    ):
        PolicyObjective(**values)
    assert PolicyObjective(**values | {"clip_low": 0.01, "clip_high": 0.01}).kind == kind


def test_a_clipped_ratio_has_no_gradient_on_its_own_side_only():
    ratios = torch.tensor([[0.7, 0.9, 1.2, 1.4, 2.9, 3.1]]).log()
    raised, lowered = (clipped_weights(ratios, torch.full((1, 6), value), clips(0.2, 0.28))[0] for value in (2.0, -2.0))
    assert raised.tolist() == pytest.approx([1.4, 1.8, 2.4, 0.0, 0.0, 0.0])
    assert lowered.tolist() == pytest.approx([0.0, -1.8, -2.4, -2.8, -5.8, 0.0]), "up to the dual clip of 3"


def test_rows_hold_prompt_and_answer_and_train_the_stop_token():
    prompt, worth = prompt_named("p"), reward_of(0.0)
    long = Rollout(prompt, [5, 6, 7], [8, 200], [-1.0, -2.0], "", worth)
    rows = lay_out([long, Rollout(prompt, [5], [9], [-3.0], "", worth)], CPU)
    assert rows.token_ids_BT.tolist() == [[5, 6, 7, 8], [5, 0, 0, 0]]
    assert rows.target_ids_BT.tolist() == [[IGNORED, IGNORED, 8, 200], [9, IGNORED, IGNORED, IGNORED]]
    assert rows.rollout_log_probabilities_BT.tolist() == [[0, 0, -1, -2], [-3, 0, 0, 0]]
    assert rows.gaps_BT is not None and rows.gaps_BT.tolist() == [[False] * 4, [False, True, True, True]]


def test_gaps_of_shorter_answers_go_to_no_expert_and_change_no_probability():
    model = random_model(with_every_expert(GLM46))
    prompt = prompt_named("p")
    rollouts = [
        Rollout(prompt, [5, 6, 7], [8, 9, 200], [-1.0] * 3, "", reward_of(1.0)),
        Rollout(prompt, [5], [9], [-3.0], "", reward_of(0.0)),
    ]
    rows = lay_out(rollouts, CPU)
    batch = rows.micro_batch(is_filler=False)
    counts_LE = model(batch.token_ids_BT, **batch.model_arguments).expert_counts_LE
    num_tokens = sum(len(each.prompt_ids) + len(each.answer_ids) - 1 for each in rollouts)
    of_trunk_LE = counts_LE[:-1]
    assert of_trunk_LE.sum(1).unique().tolist() == [num_tokens * model.recipe.num_experts_per_tok]
    assert batch.attended[0] == num_tokens
    alone = target_log_probabilities(model, lay_out(rollouts[1:], CPU), 1.0, 1)
    torch.testing.assert_close(target_log_probabilities(model, rows, 1.0, 2)[1, :1], alone[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratios_are_one_where_the_weights_are_those_of_the_rollout(dtype):
    model = policy_model(random_model(with_every_expert(GLM46)), dtype)
    rollouts = rollouts_of(model)
    rows = lay_out(rollouts, CPU)
    now_BT = target_log_probabilities(model, rows, 1.0, num_sequences=2)
    tolerance = 1e-3 if dtype == "float32" else 0.2
    torch.testing.assert_close(now_BT, rows.rollout_log_probabilities_BT, rtol=0.0, atol=tolerance)


def test_differing_routes_are_counted_where_the_model_is():
    """NCCL refuses to add up what is in host memory; the device here holds no numbers."""
    comparison, chosen = RouteComparison(torch.device("meta")), torch.zeros(6, 2, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        layers = Glm4Moe(GLM46).trunk_layers
    comparison.add(layers, [chosen, chosen], torch.zeros(2, 2, 3, 2, dtype=torch.int16, device="meta"))
    assert comparison.counts.device.type == "meta"


def test_groups_of_equal_rewards_cost_no_pass_and_change_nothing():
    model = random_model(GLM46)
    updates, metrics = updates_of(model, rollouts_of(model, [1.0] * 3 + [0.0] * 3), OBJECTIVE, 4)
    assert (updates, metrics["informative_groups"], metrics["reward_mean"], metrics["pass_rate"]) == ([], 0, 0.5, 0.5)
    assert metrics["constant_group_share"] == 1.0
    assert {metrics[name] for name in MISMATCH_METRICS} == {0.0}
    rollouts = rollouts_of(model, [1.0] * 3 + [0.0, 0.0, 1.0])
    (update,), metrics = updates_of(model, rollouts, OBJECTIVE, 4)
    batches = update()
    (only,), _ = updates_of(model, rollouts[3:], OBJECTIVE, 4)
    alone = only()
    assert (len(batches), metrics["informative_groups"], metrics["reward_mean"]) == (1, 1, pytest.approx(4 / 6))
    assert all(
        torch.equal(getattr(batches[0], name), getattr(alone[0], name))
        for name in ("token_ids_BT", "target_ids_BT", "weights_BT")
    )


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_broken_reward_names_prompt_and_step(reward):
    refuse_broken_rewards([0.0, 1.0], "abc", 7)
    with pytest.raises(RewardError, match=rf"step 7: the reward of answer 1 to prompt abc is {reward}"):
        refuse_broken_rewards([0.0, reward], "abc", 7)


@pytest.mark.parametrize(("num_parts", "budget", "sizes"), [(1, 12, [1, 2, 3]), (4, 12, [1, 1, 1, 3]), (1, 5, [1] * 6)])
def test_a_token_budget_fills_micro_batches_with_rows_of_alike_lengths(num_parts, budget, sizes):
    """Rows of 12, 6, 6, 4, 4 and 2 tokens, each as long as its prompt, an answer and its end less one."""
    lengths = [4, 12, 6, 2, 6, 4]
    prompt, worth = prompt_named("p"), reward_of(1.0)
    rollouts = [Rollout(prompt, [5] * (length - 1), [9, 1], [-1.0, -1.0], "", worth) for length in lengths]
    rows = lay_out(rollouts, CPU, num_parts=num_parts, max_batch_tokens=budget)
    batches = rows.batches(torch.arange(len(lengths)), num_sequences=99)
    assert [len(numbers) for numbers in batches] == sizes
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    for numbers in batches:
        own = rows.batch(numbers)
        longest = max(lengths[number] for number in numbers)
        assert own.width == -(-longest // num_parts) * num_parts
        assert len(numbers) == 1 or own.token_ids_BT.numel() <= budget
        assert torch.equal(own.is_answer_BT.sum(1), torch.full((len(numbers),), 2)), "no answer is cut"


def test_ranks_with_a_token_budget_make_equally_many_passes():
    """One rank has three long rows, the other three short ones, which fit in one micro-batch: it adds two fillers."""
    prompt, worth = prompt_named("p"), reward_of(1.0)
    rollouts = [Rollout(prompt, [5] * size, [1], [-1.0], "", worth) for size in (9, 9, 9, 3, 3, 3)]
    rows = lay_out(rollouts, CPU, max_batch_tokens=9)
    shares = [share_batches(rows, torch.arange(6), 1, Axis(2, rank, (0, 1), None)) for rank in (0, 1)]
    assert [[is_filler for _, is_filler in share] for share in shares] == [[False] * 3, [False, True, True]]
    assert [numbers.tolist() for numbers, is_filler in shares[1] if not is_filler] == [[3, 4, 5]]
