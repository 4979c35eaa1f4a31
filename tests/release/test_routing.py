"""Which experts two checkpoints choose, against a comparison token by token."""

from functools import partial

import torch

from model.architecture.moe import Router
from tasks.release.routing import chosen_experts, routing_agreement
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint

ROWS = torch.randint(0, GLM46.vocab_size, (3, 20), generator=torch.Generator().manual_seed(2)).tolist()


def note(seen, _router, _inputs, found):
    seen.append(found[0].tolist())


def test_agreement_is_the_share_of_positions_and_layers_with_the_same_set(tmp_path):
    num_routers = GLM46.num_hidden_layers - GLM46.first_k_dense_replace
    change = torch.randn(GLM46.n_routed_experts, GLM46.hidden_size, generator=torch.Generator().manual_seed(1))
    chosen: dict[str, list[torch.Tensor]] = {}
    seen: dict[str, list[list[list[int]]]] = {"one": [], "other": []}
    for name in seen:
        model = random_model(GLM46)
        routers = [module for module in model.modules() if isinstance(module, Router)][:num_routers]
        if name == "other":
            with torch.no_grad():
                routers[-1].weight.add_(change)
        save_checkpoint(
            model, tmp_path / name, eos_token_ids=[1], pad_token_id=0, dtype=torch.float32, max_shard_bytes=10**9
        )
        chosen[name] = chosen_experts(tmp_path / name, ROWS, "cpu")
        for router in routers:
            router.register_forward_hook(partial(note, seen[name]))
        with torch.no_grad():
            for row in ROWS:
                model(torch.tensor([row]))
    pairs = [
        set(first) == set(second)
        for one, other in zip(seen["one"], seen["other"], strict=True)
        for first, second in zip(one, other, strict=True)
    ]
    agreement = routing_agreement(chosen["one"], chosen["other"])
    assert agreement is not None and agreement == round(sum(pairs) / len(pairs), 6) and 0.1 < agreement < 1
    assert routing_agreement(chosen["one"], chosen["one"]) == 1
    assert routing_agreement([], []) is None
