"""Muon and AdamW against torch's own, Newton-Schulz against the SVD, and which parameter goes where."""

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype
from torch import nn

from configs.schema import OptimizerRecipe
from model.architecture.transformer import Glm4Moe
from model.optimizer.newton_schulz import orthogonalize
from model.optimizer.optimizer import (
    batches,
    build_optimizer,
    is_decayed_matrix,
    is_router,
    largest_of,
    set_learning_rate,
)
from tests.support.model_recipes import GLM46

RECIPE = OptimizerRecipe(
    kind="muon",
    muon_momentum=0.95,
    muon_newton_schulz_steps=5,
    muon_update_rms=0.2,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=0.0,
    adam_rate_ratio=1.0,
    router_rate_ratio=1.0,
    state_dtype="float32",
)
LEARNING_RATE = 0.02
HAS_FLOAT16 = ns_compute_dtype("gram") == torch.float16
NEWTON_SCHULZ_TOLERANCE = {"rtol": 0.0, "atol": 2e-2 if HAS_FLOAT16 else 1e-4}
"""DeepSpeed iterates in float16 where the processor has it, else in float32."""


class Matrices(nn.Module):
    """Wide, tall and square matrices, a stack of experts, an embedding, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = nn.Linear(64, 16), nn.Linear(16, 64, bias=False)
        self.square = nn.Linear(32, 32, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 16, 32) * 0.1)
        self.embed_tokens = nn.Embedding(10, 8)
        self.norm = nn.RMSNorm(8)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_an_update_has_the_rms_that_the_report_asks_for():
    model = Matrices()
    optimizer = build_optimizer(model, RECIPE.model_copy(update={"weight_decay": 0.0}))
    set_learning_rate(optimizer, LEARNING_RATE)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_gradients(model, 0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        if is_decayed_matrix(name, parameter):
            for update in ((parameter - before[name]) / LEARNING_RATE).reshape(-1, *parameter.shape[-2:]):
                # An orthogonal (r, c) matrix scaled by 0.2 sqrt(max(r, c)) has RMS 0.2 sqrt(min / min): Newton-Schulz
                # leaves 0.7 to 1.2.
                assert 0.14 < update.square().mean().sqrt() < 0.24, name


def test_several_steps_equal_torchs_muon_and_adamw(monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "bfloat16", torch.Tensor.float
    )  # the reference then iterates in float32, so that equality shows
    torch.manual_seed(0)
    ours, reference = Matrices(), Matrices()
    reference.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, RECIPE)
    set_learning_rate(optimizer, LEARNING_RATE)
    matrices = [reference.wide.weight, reference.tall.weight, reference.square.weight]
    rest = [reference.wide.bias, reference.embed_tokens.weight, reference.norm.weight]
    muon = torch.optim.Muon(
        matrices,
        lr=LEARNING_RATE,
        momentum=0.95,
        weight_decay=0.1,
        ns_steps=5,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(reference, step)
        for each in (optimizer, muon, adam):
            each.step()
    for name, parameter in ours.named_parameters():
        if name != "experts":
            torch.testing.assert_close(parameter, reference.get_parameter(name), **NEWTON_SCHULZ_TOLERANCE)


def test_a_stack_of_experts_moves_like_its_experts_one_by_one():
    stacked, apart = nn.Module(), nn.Module()
    experts = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0))
    stacked.experts = nn.Parameter(experts.clone())
    for number, expert in enumerate(experts):
        apart.register_parameter(f"expert{number}", nn.Parameter(expert.clone()))
    optimizers = [build_optimizer(model, RECIPE) for model in (stacked, apart)]
    for step in range(3):
        gradients = torch.randn(experts.shape, generator=torch.Generator().manual_seed(step))
        gradients[1] *= 1e-3  # an expert with few tokens moves as far as the others
        stacked.experts.grad = gradients.clone()
        for parameter, gradient in zip(apart.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            set_learning_rate(optimizer, LEARNING_RATE)
            optimizer.step()
    torch.testing.assert_close(stacked.experts, torch.stack(list(apart.parameters())), **NEWTON_SCHULZ_TOLERANCE)


def quintic(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps in float64, as the formula has them."""
    x = matrix.double() / matrix.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_adamw_on_all_equals_torchs_and_decays_matrices_only():
    torch.manual_seed(0)
    ours, reference = Matrices(), Matrices()
    reference.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, RECIPE.model_copy(update={"kind": "adamw"}))
    set_learning_rate(optimizer, LEARNING_RATE)
    rest = [reference.wide.bias, reference.embed_tokens.weight, reference.norm.weight]
    matrices = [reference.wide.weight, reference.tall.weight, reference.square.weight, reference.experts]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(5):
        for model in (ours, reference):
            set_gradients(model, step)
        for each in (optimizer, adam):
            each.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), msg=lambda text, at=name: f"{at}: {text}")


def test_the_optimizer_equals_deepspeeds_muon_with_its_scale_and_decay_corrected():
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    torch.manual_seed(0)
    ours, theirs = Matrices(), Matrices()
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, RECIPE)
    set_learning_rate(optimizer, LEARNING_RATE)
    groups, rest = [], []
    for name, parameter in theirs.named_parameters():
        if not is_decayed_matrix(name, parameter):
            rest.append(parameter)
            continue
        scale = (
            0.2 * parameter.shape[-1] ** 0.5
        )  # DeepSpeed scales by sqrt(max(1, rows / cols)), the report by 0.2 sqrt(max(rows, cols))
        groups.append(
            {
                "params": [parameter],
                "use_muon": True,
                "lr": LEARNING_RATE * scale,
                "weight_decay": 0.1 / scale,
                "momentum": 0.95,
            }
        )
    groups.append(
        {"params": rest, "use_muon": False, "lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    )
    reference = MuonWithAuxAdam(groups)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), **NEWTON_SCHULZ_TOLERANCE)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32), (3, 16, 32)])
def test_newton_schulz_comes_near_the_svds_polar_factor(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    polar = left @ right
    ours = orthogonalize(matrix.clone(), 5)
    # The quintic leaves singular values between 0.7 and 1.2, so the direction agrees and the length only nearly.
    assert torch.linalg.svdvals(ours).min() > 0.5 and torch.linalg.svdvals(ours).max() < 1.3
    cosine = (ours * polar).flatten(-2).sum(-1) / (ours.flatten(-2).norm(dim=-1) * polar.flatten(-2).norm(dim=-1))
    assert cosine.min() > 0.97
    torch.testing.assert_close(ours, quintic(matrix).float(), **NEWTON_SCHULZ_TOLERANCE)


def test_muon_takes_every_matrix_but_the_embedding():
    model = Glm4Moe(GLM46)
    optimizer = build_optimizer(model, RECIPE)
    muon = {id(parameter) for group in optimizer.param_groups if group["is_muon"] for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in muon}
    everything = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert everything - names == {"model.embed_tokens.weight"}
    assert (
        "lm_head.weight" in names
        and "model.layers.1.mlp.gate.weight" in names
        and "model.layers.1.mlp.experts.gate_proj" in names
    )


def test_the_decay_of_matrices_is_the_recipes_and_the_rest_has_none():
    model = Matrices()
    optimizer = build_optimizer(model, RECIPE)
    set_learning_rate(optimizer, LEARNING_RATE)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1 - LEARNING_RATE * 0.1 if is_decayed_matrix(name, parameter) else 1.0
        torch.testing.assert_close(parameter, before[name] * kept)


def test_routers_and_what_is_no_matrix_have_rates_of_their_own():
    model = Glm4Moe(GLM46)
    optimizer = build_optimizer(model, RECIPE.model_copy(update={"adam_rate_ratio": 0.015, "router_rate_ratio": 0.0}))
    set_learning_rate(optimizer, LEARNING_RATE)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_gradients(model, 5)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_own = is_router(name) or not is_decayed_matrix(name, parameter)
        expected = (0.0 if is_router(name) else LEARNING_RATE * 0.015) if is_own else LEARNING_RATE
        assert rates[id(parameter)] == expected, name
        assert parameter.equal(before[name]) is is_router(name), name
    assert any(is_router(name) for name in before)


def test_an_accelerator_takes_lists_that_are_no_larger_than_the_largest_tensor_and_a_cpu_none():
    sizes = (3, 8, 2, 2, 5, 1)
    on_cpu = [torch.empty(size) for size in sizes]
    assert [len(batch) for batch in batches(on_cpu, largest_of(on_cpu))] == [1] * 6
    elsewhere = [torch.empty(size, device="meta") for size in sizes]
    taken = list(batches(elsewhere, largest_of(elsewhere)))
    assert [[tensor.numel() for tensor in batch] for batch in taken] == [[3], [8], [2, 2], [5, 1]]
    assert list(batches([], largest_of([]))) == []
