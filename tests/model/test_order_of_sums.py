"""No result depends on the order of a sum: the model with its columns, experts, heads and rows in another order
computes the same.

Every sum over them is then taken in another order, as another processor, library or number of threads would; float32
shows by how much that moves a result, and every expert and every greedy token stays the one that was chosen.
"""

import pytest
import torch
from torch import Tensor

from configs.schema import ModelRecipe
from model.architecture.transformer import Glm4Moe
from tests.support.model_recipes import AIR, GLM46, random_model
from tests.support.tolerances import CLOSE_FLOAT32

pytestmark = pytest.mark.usefixtures("clear_routing")
INTO = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "gate_proj",
    "gate_proj.weight",
    "up_proj",
    "up_proj.weight",
    "gate.weight",
    "lm_head.weight",
    "embed_tokens.weight",
    "layernorm.weight",
    "enorm.weight",
    "hnorm.weight",
    "model.norm.weight",
    "shared_head.norm.weight",
    "eh_proj.weight",
)
"""Endings of the names of parameters whose last axis is that of the hidden columns; eh_proj has them twice."""
OUT_OF = ("o_proj.weight", "down_proj", "down_proj.weight", "eh_proj.weight")
"""Endings where it is the axis before the last."""


def reordered(model: Glm4Moe, seed: int) -> tuple[Glm4Moe, dict[str, Tensor]]:
    """The same function with hidden columns, columns inside of the MLPs and experts drawn in another order; and, by
    parameter, the indices of its elements in the model's own (flattened)."""
    recipe, generator = model.recipe, torch.Generator().manual_seed(seed)
    hidden = torch.randperm(recipe.hidden_size, generator=generator)
    widths = (recipe.intermediate_size, recipe.moe_intermediate_size)
    inner = {width: torch.randperm(width, generator=generator) for width in widths}
    experts = torch.randperm(recipe.n_routed_experts, generator=generator)
    orders = {}
    for name, tensor in model.state_dict().items():
        order = torch.arange(tensor.numel()).view(tensor.shape)
        if name.endswith(INTO):
            columns = torch.cat([hidden, hidden + recipe.hidden_size]) if name.endswith("eh_proj.weight") else hidden
            order = order[..., columns]
        if name.endswith(OUT_OF):
            order = order[..., hidden, :]
        if ".mlp." in name and "_proj" in name:
            axis = -1 if "down_proj" in name else -2
            order = order.index_select(axis, inner[tensor.shape[axis]])
        if ".mlp.experts." in name or ".mlp.gate." in name:
            order = order[experts]
        orders[name] = order
    other = Glm4Moe(recipe)
    other.load_state_dict({name: tensor.flatten()[orders[name]] for name, tensor in model.state_dict().items()})
    return other, orders


@pytest.mark.parametrize(("recipe", "seed"), [(GLM46, 41), (AIR, 19)], ids=["glm46", "air"])
def test_logits_tokens_losses_and_gradients_stay(recipe: ModelRecipe, seed: int) -> None:
    model = random_model(recipe, seed, std=0.1)
    other, orders = reordered(model, seed=1)
    tokens = torch.randint(0, recipe.vocab_size, (4, 18), generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        logits, actual = model(tokens).logits_BTV, other(tokens[rows]).logits_BTV
    torch.testing.assert_close(actual, logits[rows], **CLOSE_FLOAT32)
    assert not actual.equal(logits[rows]), "no sum was taken in another order"
    two_best = logits.topk(2).values
    clear = (two_best[..., 0] - two_best[..., 1] > 1e-3)[rows]
    assert clear.float().mean() > 0.9 and actual.argmax(-1)[clear].equal(logits.argmax(-1)[rows][clear])
    outputs = [each(given, target_ids_BT=given) for each, given in ((model, tokens), (other, tokens[rows]))]
    for output in outputs:
        (output.losses.lm + output.losses.mtp + output.losses.balance).backward()
    for loss, expected in zip(outputs[1].losses, outputs[0].losses, strict=True):
        torch.testing.assert_close(loss, expected, **CLOSE_FLOAT32)
    assert outputs[1].expert_counts_LE.sort().values.equal(outputs[0].expert_counts_LE.sort().values)
    gradients = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        expected = gradients[name].grad.flatten()[orders[name]]
        torch.testing.assert_close(
            parameter.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE_FLOAT32
        )
