"""Training step on a CPU, ours beside transformers' Glm4MoeForCausalLM: python -m benchmarks.train_step [--rounds 3] [--steps 2]

Both get the same 18.3 M parameter architecture, the same batch of 8 x 512 tokens, float32 and torch's AdamW, and are timed in turn, round
by round; the optimizer step is included. The MTP layer and the router's balancing, which transformers does not have, are left out of
ours. The last line is JSON; `ratio` is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from configs.schema import ModelRecipe

BATCH, LENGTH = 8, 512
RECIPE = ModelRecipe(
    vocab_size=8192, hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=6, first_k_dense_replace=1,
    n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=2, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1,
    topk_group=1, num_attention_heads=8, num_key_value_heads=2, head_dim=32, attention_bias=True, use_qk_norm=True,
    partial_rotary_factor=0.5, rope_theta=10_000.0, max_position_embeddings=2048, rms_norm_eps=1e-5, initializer_range=0.02,
    tie_word_embeddings=False, num_nextn_predict_layers=0,
)  # fmt: skip


def our_step(token_ids: torch.Tensor) -> Callable[[], None]:
    """One optimizer step of our model."""
    from model.transformer import Glm4Moe

    model = Glm4Moe(RECIPE)
    model.init_weights(torch.Generator().manual_seed(46))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        losses = model(token_ids[:, :-1], target_ids_BT=token_ids[:, 1:]).losses
        optimizer.zero_grad(set_to_none=True)
        losses.lm.backward()
        optimizer.step()

    return step


def their_step(token_ids: torch.Tensor) -> Callable[[], None]:
    """One optimizer step of transformers' model, with its fastest attention and experts on a CPU."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {name: value for name, value in RECIPE.model_dump().items() if name != "num_nextn_predict_layers"}
    torch.manual_seed(46)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**fields, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = model(input_ids=token_ids[:, :-1], labels=token_ids[:, :-1], shift_labels=token_ids[:, 1:].contiguous()).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    """Time both in turn and print the result."""
    import transformers

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    token_ids = torch.randint(0, RECIPE.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(46))
    steps = {"ours": our_step(token_ids), "peer": their_step(token_ids)}
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(given.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(given.steps):
                step()
            speeds[name].append(given.steps * BATCH * LENGTH / (time.perf_counter() - started))
        print(f"round {number + 1}: ours {speeds['ours'][-1]:,.0f}, transformers {speeds['peer'][-1]:,.0f} tokens/s", flush=True)
    ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["peer"], strict=True)]
    result = {
        "ours": round(statistics.median(speeds["ours"]), 1), "peer": round(statistics.median(speeds["peer"]), 1),
        "ratio": round(statistics.median(ratios), 3), "unit": "tokens/s", "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
