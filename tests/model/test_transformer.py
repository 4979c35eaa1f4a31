"""The architecture against naive references and its own promises."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import ModelRecipe
from model.architecture.attention import Attention
from model.architecture.moe import MixtureOfExperts, Router, sequence_balance_loss, update_router_bias
from model.architecture.rotary import rotary_tables
from model.architecture.transformer import Glm4Moe
from tests.support.model_recipes import AIR, GLM46, random_model
from tests.support.tolerances import CLOSE_FLOAT32

pytestmark = pytest.mark.usefixtures("clear_routing")


def random_tokens(num_rows: int, num_positions: int, seed: int = 1) -> Tensor:
    return torch.randint(0, GLM46.vocab_size, (num_rows, num_positions), generator=torch.Generator().manual_seed(seed))


def naive_attention(attention: Attention, recipe: ModelRecipe, hidden_TD: Tensor) -> Tensor:
    cosine, sine = rotary_tables(torch.arange(len(hidden_TD)), recipe.rotary_dim, recipe.rope_theta)
    half = recipe.rotary_dim // 2
    outputs = []
    for head in range(recipe.num_attention_heads):
        group = head // (recipe.num_attention_heads // recipe.num_key_value_heads)
        vectors = []
        for projection, norm, number in (
            (attention.q_proj, attention.q_norm, head),
            (attention.k_proj, attention.k_norm, group),
        ):
            vector = norm(projection(hidden_TD)[:, number * recipe.head_dim : (number + 1) * recipe.head_dim])
            first, second = vector[:, :half], vector[:, half : 2 * half]
            turned = [
                first * cosine[:, :half] - second * sine[:, :half],
                second * cosine[:, :half] + first * sine[:, :half],
            ]
            vectors.append(torch.cat([*turned, vector[:, 2 * half :]], dim=1))
        value = attention.v_proj(hidden_TD)[:, group * recipe.head_dim : (group + 1) * recipe.head_dim]
        scores = vectors[0] @ vectors[1].T / recipe.head_dim**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        outputs.append(scores.softmax(-1) @ value)
    return attention.o_proj(torch.cat(outputs, dim=1))


@pytest.mark.parametrize("recipe", [GLM46, AIR], ids=["glm46", "air"])
def test_attention_equals_a_naive_one(recipe: ModelRecipe) -> None:
    attention = random_model(recipe).model.layers[0].self_attn
    hidden_BTD = torch.randn(2, 9, recipe.hidden_size)
    rotary = rotary_tables(torch.arange(9), recipe.rotary_dim, recipe.rope_theta)
    expected = torch.stack([naive_attention(attention, recipe, row) for row in hidden_BTD])
    torch.testing.assert_close(attention(hidden_BTD, rotary), expected, **CLOSE_FLOAT32)


def naive_experts(moe: MixtureOfExperts, recipe: ModelRecipe, tokens_TD: Tensor) -> Tensor:
    outputs = []
    for token in tokens_TD:
        scores = torch.sigmoid(moe.gate.weight @ token)
        chosen = (scores + moe.gate.e_score_correction_bias).topk(recipe.num_experts_per_tok).indices
        weights = scores[chosen] / (scores[chosen].sum() + 1e-20) * recipe.routed_scaling_factor
        out = moe.shared_experts(token[None, None])[0, 0]
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate, up, down = moe.experts.gate_proj[expert], moe.experts.up_proj[expert], moe.experts.down_proj[expert]
            out = out + weight * (down @ (F.silu(gate @ token) * (up @ token)))
        outputs.append(out)
    return torch.stack(outputs)


def test_experts_equal_a_loop_over_tokens_forward_and_backward() -> None:
    moe = random_model(GLM46).model.layers[1].mlp
    hidden_BTD = torch.randn(2, 7, GLM46.hidden_size, requires_grad=True)
    parameters = [hidden_BTD, *moe.parameters()]
    ours = moe(hidden_BTD).hidden_BTD
    naive = naive_experts(moe, GLM46, hidden_BTD.flatten(0, 1)).view_as(hidden_BTD)
    torch.testing.assert_close(ours, naive, **CLOSE_FLOAT32)
    direction = torch.randn_like(ours)
    ours_grads = torch.autograd.grad(ours, parameters, direction)
    naive_grads = torch.autograd.grad(naive, parameters, direction)
    for ours_grad, naive_grad in zip(ours_grads, naive_grads, strict=True):
        torch.testing.assert_close(ours_grad, naive_grad, **CLOSE_FLOAT32)


def test_expert_counts_cover_every_moe_layer_and_every_copy() -> None:
    tokens = random_tokens(2, 11, seed=2)
    output = random_model(GLM46)(tokens, target_ids_BT=tokens)
    assert output.expert_counts_LE.dtype == torch.int64
    assert output.expert_counts_LE.sum(-1).tolist() == [2 * 11 * 2, 2 * 11 * 2, 2 * 10 * 2]


def test_losses_equal_cross_entropy_over_logits_with_their_gradients() -> None:
    model = random_model(GLM46)
    tokens, targets = random_tokens(2, 12), random_tokens(2, 12, seed=2)
    targets[0, 3] = targets[1, 7:] = -100
    hidden = model.hidden_states(tokens)
    expected = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten())
    ours = model(tokens, target_ids_BT=targets).losses.lm
    torch.testing.assert_close(ours, expected, **CLOSE_FLOAT32)
    parameters = [
        *model.model.layers[: GLM46.num_hidden_layers].parameters(),
        model.lm_head.weight,
        model.model.embed_tokens.weight,
    ]
    for ours_grad, expected_grad in zip(
        torch.autograd.grad(ours, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours_grad, expected_grad, **CLOSE_FLOAT32)


def test_loss_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(GLM46)
    tokens = random_tokens(2, 12)
    whole = model(tokens, target_ids_BT=tokens).losses.lm
    monkeypatch.setattr("model.architecture.losses.logits_per_chunk", lambda device_type: 5 * GLM46.vocab_size)
    torch.testing.assert_close(model(tokens, target_ids_BT=tokens).losses.lm, whole, **CLOSE_FLOAT32)


def test_all_targets_ignored_is_zero_loss_with_finite_gradients() -> None:
    model = random_model(GLM46)
    tokens = random_tokens(1, 6)
    losses = model(tokens, target_ids_BT=torch.full_like(tokens, -100)).losses
    (losses.lm + losses.mtp).backward()
    assert losses.lm.item() == losses.mtp.item() == 0.0
    assert all(
        bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters() if parameter.grad is not None
    )


def test_mtp_loss_of_packed_documents_equals_the_documents_apart() -> None:
    model = random_model(GLM46)
    first, second = random_tokens(1, 8, seed=3), random_tokens(1, 9, seed=4)
    row = torch.cat([first, second], dim=1)
    segments = torch.tensor([[0] * 8 + [1] * 9])
    targets = torch.roll(row, -1, dims=1)
    targets[0, 7] = targets[0, 16] = -100
    packed = model(row, target_ids_BT=targets, segment_ids_BT=segments).losses
    apart = [model(tokens, target_ids_BT=targets_of(tokens)).losses for tokens in (first, second)]
    torch.testing.assert_close(packed.lm * 15, apart[0].lm * 7 + apart[1].lm * 8, **CLOSE_FLOAT32)
    torch.testing.assert_close(packed.mtp * 13, apart[0].mtp * 6 + apart[1].mtp * 7, **CLOSE_FLOAT32)


def targets_of(tokens: Tensor) -> Tensor:
    targets = torch.roll(tokens, -1, dims=1)
    targets[:, -1] = -100
    return targets


def test_mtp_targets_of_another_document_carry_no_loss_even_when_attention_crosses() -> None:
    model = random_model(GLM46)
    row = random_tokens(1, 10)
    segments = torch.tensor([[0] * 5 + [1] * 5])
    targets = targets_of(row)
    changed = targets.clone()
    changed[0, [4, 5]] = (
        targets[0, [4, 5]] + 1
    ) % GLM46.vocab_size  # positions 3 and 4 predict tokens of document 1 by MTP
    plain, other = (model(row, target_ids_BT=ids).losses.mtp for ids in (targets, changed))
    masked, other_masked = (
        model(row, target_ids_BT=ids, mtp_segment_ids_BT=segments).losses.mtp for ids in (targets, changed)
    )
    assert plain != other
    assert masked == other_masked


def test_attention_stays_inside_documents_with_segments() -> None:
    model = random_model(GLM46)
    row = random_tokens(1, 10)
    segments = torch.tensor([[0] * 5 + [1] * 5])
    packed = model(row, segment_ids_BT=segments).logits_BTV
    torch.testing.assert_close(packed[:, 5:], model(row[:, 5:]).logits_BTV, **CLOSE_FLOAT32)


def test_router_bias_and_positions_stay_exact_after_a_cast() -> None:
    model = random_model(GLM46)
    before = [module.e_score_correction_bias.clone() for module in model.modules() if isinstance(module, Router)]
    model.bfloat16()
    after = [module.e_score_correction_bias for module in model.modules() if isinstance(module, Router)]
    assert all(torch.equal(old, new) and new.dtype == torch.float32 for old, new in zip(before, after, strict=True))
    assert model._rotary(4, 0, torch.device("cpu"))[0].dtype == torch.float32
    assert bool(torch.isfinite(model(random_tokens(1, 6), target_ids_BT=random_tokens(1, 6)).losses.lm))


def test_router_bias_selects_but_does_not_weigh() -> None:
    router = random_model(GLM46).model.layers[1].mlp.gate
    tokens_TD = torch.randn(6, GLM46.hidden_size)
    router.e_score_correction_bias.copy_(torch.tensor([9.0, 8.0] + [0.0] * 6))
    expert_ids_TK, weights_TK, scores_TE = router(tokens_TD)
    assert expert_ids_TK.sort(-1).values.tolist() == [[0, 1]] * 6
    chosen = scores_TE.gather(1, expert_ids_TK)
    torch.testing.assert_close(weights_TK, 2.5 * chosen / chosen.sum(-1, keepdim=True))


def test_bias_update_moves_by_rate_towards_the_mean_and_is_exact_for_large_counts() -> None:
    model = Glm4Moe(GLM46)
    counts = torch.full((3, 8), 2**53, dtype=torch.int64)
    counts[0, 0] += 8
    counts[1] = torch.tensor([0, 2, 1, 1, 1, 1, 1, 1])
    update_router_bias(model, counts, 0.001)
    biases = [module.e_score_correction_bias for module in model.modules() if isinstance(module, Router)]
    torch.testing.assert_close(biases[0], torch.tensor([-0.001] + [0.001] * 7))
    torch.testing.assert_close(biases[1], torch.tensor([0.001, -0.001] + [0.0] * 6))
    assert not biases[2].any()


def test_balance_loss_is_one_when_even_and_higher_when_one_expert_gets_all() -> None:
    even_BTE = torch.eye(4).repeat(1, 2, 1) + 0.1
    collapsed_BTE = torch.tensor([1.0, 0.1, 0.1, 0.1]).expand(1, 8, 4)
    assert sequence_balance_loss(even_BTE.requires_grad_(), 1).item() == pytest.approx(1.0)
    assert sequence_balance_loss(collapsed_BTE, 1).item() == pytest.approx(4 / 1.3)


def test_initialisation_depends_only_on_the_generator() -> None:
    first, second, third = Glm4Moe(GLM46), Glm4Moe(GLM46), Glm4Moe(GLM46)
    first.init_weights(torch.Generator().manual_seed(5))
    second.init_weights(torch.Generator().manual_seed(5))
    third.init_weights(torch.Generator().manual_seed(6))
    names = dict(first.named_parameters())
    assert all(torch.equal(parameter, names[name]) for name, parameter in second.named_parameters())
    assert not torch.equal(third.lm_head.weight, first.lm_head.weight)
    assert first.lm_head.weight.std().item() == pytest.approx(GLM46.initializer_range, rel=0.05)


def test_rope_theta_of_a_phase_overrides_the_recipe() -> None:
    model = random_model(GLM46)
    other = Glm4Moe(GLM46, rope_theta=10_000.0)
    other.load_state_dict(model.state_dict())
    tokens = random_tokens(1, 30)
    assert not torch.allclose(model(tokens).logits_BTV, other(tokens).logits_BTV, **CLOSE_FLOAT32)


def test_another_documents_tokens_change_nothing_in_a_packed_row() -> None:
    model = random_model(GLM46)
    row = random_tokens(1, 24)
    segments = torch.tensor([[0] * 9 + [1] * 8 + [2] * 7])
    own = segments[0] == 1
    changed = torch.where(own, row, (row + 7) % GLM46.vocab_size)
    seen = []
    for tokens in (row, changed):
        # Only the middle document is trained: every loss and gradient must be its own.
        targets = targets_of(tokens).masked_fill(~own, -100)
        targets[0, 16] = -100
        model.zero_grad()
        logits = model(tokens, segment_ids_BT=segments).logits_BTV[0, own]
        losses = model(tokens, target_ids_BT=targets, segment_ids_BT=segments).losses
        (losses.lm + losses.mtp).backward()
        gradients = [
            parameter.grad
            for name, parameter in model.named_parameters()
            if "embed_tokens" not in name and "gate." not in name
        ]
        outside = torch.ones(GLM46.vocab_size, dtype=torch.bool)
        outside[row[0, own]] = False
        assert not model.model.embed_tokens.weight.grad[outside].any()
        seen.append([logits, losses.lm, losses.mtp, *gradients])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
