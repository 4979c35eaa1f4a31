"""Training step on a CPU, ours beside transformers' Glm4MoeForCausalLM: python -m benchmarks.train_step [--rounds 3] [--steps 2] [--write]

Both get the same 18.3 M parameter architecture, the same batch of 8 x 512 tokens and torch's fused AdamW, and are timed in turn, round by
round; the optimizer step is included. The peer runs in float32 and in bfloat16 autocast, and the better of its medians counts. The MTP
layer and the router's balancing, which transformers does not have, are left out of ours. The last line is JSON; `ratio` is the median over
the rounds of ours over that peer, so a machine whose speed drifts does not decide.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.results import WRITE_FLAG, report
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        losses = model(token_ids[:, :-1], target_ids_BT=token_ids[:, 1:]).losses
        optimizer.zero_grad(set_to_none=True)
        losses.lm.backward()
        optimizer.step()

    return step


def their_step(token_ids: torch.Tensor, *, uses_bfloat16: bool) -> Callable[[], None]:
    """One optimizer step of transformers' model, with its fastest attention and experts on a CPU."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {name: value for name, value in RECIPE.model_dump().items() if name != "num_nextn_predict_layers"}
    torch.manual_seed(46)
    config = Glm4MoeConfig(**fields, attn_implementation="sdpa")  # pyright: ignore[reportCallIssue]
    model = Glm4MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_bfloat16):
            loss = model(input_ids=token_ids[:, :-1], labels=token_ids[:, :-1], shift_labels=token_ids[:, 1:].contiguous()).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    """Time all in turn and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the result in benchmarks/results/")
    given = parser.parse_args()
    token_ids = torch.randint(0, RECIPE.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(46))
    steps = {
        "ours": our_step(token_ids),
        "transformers fp32": their_step(token_ids, uses_bfloat16=False),
        "transformers bf16": their_step(token_ids, uses_bfloat16=True),
    }
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(given.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(given.steps):
                step()
            speeds[name].append(given.steps * BATCH * LENGTH / (time.perf_counter() - started))
        measured = ", ".join(f"{name} {of_rounds[-1]:,.0f}" for name, of_rounds in speeds.items())
        print(f"round {number + 1}: {measured} tokens/s", flush=True)
    medians = {name: statistics.median(of_rounds) for name, of_rounds in speeds.items()}
    peer = max((name for name in medians if name != "ours"), key=lambda name: medians[name])
    ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds["ours"], speeds[peer], strict=True))
    report(
        "train_step", ours=medians["ours"], peer=medians[peer], unit="tokens/s", ratio=round(ratio, 3), peer_mode=peer,
        medians={name: round(speed, 1) for name, speed in medians.items()}, num_rounds=given.rounds, num_threads=torch.get_num_threads(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
