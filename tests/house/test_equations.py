"""The formulas of docs/equations.md compute what the code computes: each block is run on random numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from configs.load import load_scale
from configs.schema import ImportanceRecipe
from model.architecture.losses import IGNORED, LanguageHead
from model.architecture.moe import Router, sequence_balance_loss, update_router_bias
from model.architecture.mtp import MtpLayer, mtp_targets
from model.architecture.preferences import Preference, ScoreHead, direct_preference_loss, scored_preference_loss
from model.architecture.values import ValueTargets, clipped_value_loss
from model.optimizer.optimizer import build_optimizer, set_learning_rate
from tasks.evaluation.intervals import pass_at_k, share_interval, t_quantile
from tasks.training.policy.answer_rows import AnswerRows
from tasks.training.policy.critic import generalized_advantages, token_rewards
from tasks.training.policy.policy import group_advantages, importance_weights, surrogate_weights
from tasks.training.policy.rewards import overlong_punishment
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
MICRO = load_scale("micro")
EQUATIONS: dict = {"torch": torch, "math": math}
for block in re.findall(r"```python\n(.+?)```", PAGE, re.S):
    exec(block, EQUATIONS)  # the page is ours


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(46)


def page(name: str, *arguments, **named):
    return EQUATIONS[name](*arguments, **named)


def drawn(head):
    torch.nn.init.normal_(head.weight)
    return head


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-4, atol=1e-5)


def test_router_bias_and_balance():
    recipe = MICRO.model.recipe
    router = drawn(Router(recipe))
    router.e_score_correction_bias.normal_(std=0.3)
    tokens_TD = torch.randn(40, recipe.hidden_size) / 8
    ids_TK, weights_TK, scores_TE = router(tokens_TD)
    K = recipe.num_experts_per_tok
    expected = page(
        "route", tokens_TD @ router.weight.t(), router.e_score_correction_bias, K, router.routed_scaling_factor
    )
    close(
        torch.zeros_like(scores_TE).scatter(1, expected[0], expected[1]),
        torch.zeros_like(scores_TE).scatter(1, ids_TK, weights_TK),
    )
    counts_E = torch.bincount(ids_TK.flatten(), minlength=recipe.n_routed_experts)
    after = page("next_bias", router.e_score_correction_bias.clone(), counts_E, 0.001)
    update_router_bias(router, counts_E[None], 0.001)
    assert torch.equal(after, router.e_score_correction_bias)
    close(page("balance_loss", scores_TE, K), sequence_balance_loss(scores_TE[None], K))


def test_mtp_and_the_loss_of_a_step():
    recipe = MICRO.model.recipe
    layer, tokens = MtpLayer(recipe), torch.arange(12)
    embedding, hidden = torch.randn(2, 3, 12, recipe.hidden_size).unbind()
    joined = page("mtp_input", embedding, hidden, layer.enorm, layer.hnorm, layer.eh_proj)
    seen = []
    layer.eh_proj.register_forward_hook(lambda module, given, result: seen.append(result))
    head_dim = round(recipe.head_dim * recipe.partial_rotary_factor)
    rotary = (torch.ones(12, head_dim), torch.zeros(12, head_dim))
    layer(embedding, hidden, rotary)
    close(joined, seen[0])
    assert torch.equal(mtp_targets(tokens[None, 1:], None)[0], page("mtp_targets_of", tokens))
    assert page("step_loss", 2.0, 3.0, 1.0, 0.3, 1e-4) == 2.0 + 0.9 + 1e-4


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 24)])
def test_muon(shape):
    recipe = MICRO.phases[0].recipe.optimizer.model_copy(update={"kind": "muon", "state_dtype": "float32"})
    model = torch.nn.Linear(shape[1], shape[0], bias=False)
    optimizer = build_optimizer(model, recipe)
    set_learning_rate(optimizer, 0.01)
    weight, momentum = model.weight.detach().clone(), torch.zeros(shape)
    for _ in range(2):
        gradient = torch.randn(shape)
        model.weight.grad = gradient.clone()
        optimizer.step()
        weight, momentum = page(
            "muon_step",
            *(weight, gradient, momentum, 0.01, recipe.muon_momentum, recipe.weight_decay, recipe.muon_update_rms),
            steps=recipe.muon_newton_schulz_steps,
        )
    torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("kind", "loss_mean"), [("grpo", "tokens"), ("grpo", "answers"), ("gspo", "answers")])
def test_the_gradient_of_the_clipped_objective_is_what_training_weighs(kind, loss_mean):
    mask = torch.arange(7)[None] < torch.tensor([[7], [4], [5], [1], [3], [6]])
    targets = torch.where(mask, 1, IGNORED)
    rows = AnswerRows(targets.clamp(min=0), targets, torch.zeros(6, 7))
    old, now = torch.randn(6, 7) * 0.1, torch.randn(6, 7)
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-2.0], [2.0], [-0.1]]).expand(6, 7)
    own = MICRO.phases[-1].recipe.objective.model_copy(update={"kind": kind, "loss_mean": loss_mean, "dual_clip": 1.5})
    weights = surrogate_weights(now, old, rows, advantages, own)
    now = now.requires_grad_()
    page(
        "objective", *(kind, loss_mean, now, old, mask.float(), advantages, own.clip_low, own.clip_high, own.dual_clip)
    ).backward()
    close(now.grad, weights * mask / mask.sum())
    assert 0 < int((weights[mask] == 0).sum()) < int(mask.sum()), "some are clipped"


def test_advantages_importance_and_rewards():
    rewards_GS = torch.randn(5, 4)
    close(page("advantages_of_groups", rewards_GS), group_advantages(rewards_GS))
    trainer, rollout = torch.randn(2, 50)
    for kind in ("truncated", "masked"):
        recipe = ImportanceRecipe(kind=kind, level="tokens", floor=0.5, cap=2.0)
        close(
            page("importance", trainer, rollout, 0.5, 2.0, kind), importance_weights((trainer - rollout).exp(), recipe)
        )
    for length in (10, 80, 90, 100, 110):
        assert page("overlong", length, 100, 20) == overlong_punishment(length, 100, 20)


def test_ppo():
    values_T, log_ratio_T = torch.randn(2, 8)
    is_answer = torch.ones(1, 8, dtype=torch.bool)
    paid = token_rewards(torch.tensor([1.5]), log_ratio_T[None], is_answer, 0.02)
    close(
        page("advantages_with_critic", 1.5, log_ratio_T, values_T, 0.02, 0.99, 0.95),
        generalized_advantages(paid, values_T[None], is_answer, 0.99, 0.95)[0],
    )
    head, hidden_BTD, before = drawn(ScoreHead(4)), torch.randn(1, 8, 4), torch.randn(1, 8)
    targets = ValueTargets(torch.randn(1, 8), before, 0.2)
    close(
        page("critic_loss", head.values(hidden_BTD)[0], before[0], targets.returns_BT[0], 0.2),
        clipped_value_loss(head, hidden_BTD, torch.ones(1, 8, dtype=torch.long), targets),
    )


def test_pairs():
    hidden_BTD, targets = torch.randn(4, 6, 8), torch.randint(0, 10, (4, 6))
    preference = Preference(torch.tensor([5, 3, 4, 5]), torch.randn(4), 0.1)
    score, head = drawn(ScoreHead(8)), drawn(LanguageHead(8, 10))
    scores = score(hidden_BTD, preference.last_B)
    close(page("reward_loss", scores[0::2], scores[1::2]), scored_preference_loss(score, hidden_BTD, preference))
    own, ref = head.log_probabilities(hidden_BTD, targets).sum(1), preference.reference_B
    close(
        page("dpo_loss", own[0::2], own[1::2], ref[0::2], ref[1::2], 0.1),
        direct_preference_loss(head, hidden_BTD, targets, preference),
    )


def test_intervals():
    right = [1] * 30 + [0] * 10
    p, n = 0.75, 40
    error = math.sqrt(n / (n - 1) * n * p * (1 - p)) / n
    close(page("wilson", p, p * (1 - p) / error**2, t_quantile(n - 1)), share_interval(right, [1] * n))
    assert page("pass_at", 3, 10, 4) == pass_at_k(10, 4, 3)


def test_every_equation_is_compared_and_every_file_of_the_page_exists():
    defined = set(re.findall(r"^def (\w+)\(", PAGE, re.M))
    compared = set(re.findall(r"page\(\s*\"(\w+)\"", Path(__file__).read_text(encoding="utf-8")))
    assert len(defined) >= 17 and defined == compared
    for path in re.findall(r"(?:model|tasks|tests)/[\w/]+\.py", PAGE):
        assert (ROOT / path).is_file(), path
