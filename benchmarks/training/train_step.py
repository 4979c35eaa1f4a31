"""Training step on a CPU, ours beside transformers' Glm4MoeForCausalLM: python -m benchmarks.training.train_step
[--rounds 3] [--steps 2] [--write]

Both get the same 18.3 M parameter architecture, the same batch of 8 x 512 tokens and torch's fused AdamW, and are timed
in turn, round by round; the optimizer step is included. The peer is the faster of float32 and bfloat16 autocast. Ours
is float32, as the scales of CPUs are; `our_modes` also has it on bfloat16 copies of its weights. The
MTP layer and the router's balancing, which transformers does not have, are left out of ours, which multiplies as
training does (model/kernels/cpu_products.py). The last line is JSON; `ratio` is the median over the rounds of ours over
the peer, so a machine whose speed drifts does not decide.

Where the time goes on two AVX2 cores (peak 198 GFLOP/s), 1.30 s a step: 0.94 s matrix products, 145 GFLOP at 154
GFLOP/s, which the peer computes with the same library; 0.19 s attention, a seventh of it exponentials; 0.17 s
everything else. A product kernel of six rows by 16 columns over packed operands, tried in the library's place, was
faster for the unembedding's logits only (173 GFLOP/s against 138).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.results import WRITE_FLAG, report
from tests.support.model_recipes import GLM46

BATCH, LENGTH = 8, 512
RECIPE = GLM46.model_copy(
    update={
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 6,
        "n_routed_experts": 16,
        "num_attention_heads": 8,
        "head_dim": 32,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "num_nextn_predict_layers": 0,
    }
)


def our_step(token_ids: torch.Tensor, *, uses_bfloat16: bool) -> Callable[[], None]:
    """One optimizer step of our model."""
    from model.architecture.transformer import Glm4Moe
    from model.kernels.cpu_products import onednn_products
    from tasks.training.parallel.mixed_precision import ComputeInBfloat16

    model = Glm4Moe(RECIPE)
    model.init_weights(torch.Generator().manual_seed(46))
    computed = ComputeInBfloat16(model) if uses_bfloat16 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with onednn_products():
            losses = computed(token_ids[:, :-1], target_ids_BT=token_ids[:, 1:]).losses
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
            loss = model(
                input_ids=token_ids[:, :-1], labels=token_ids[:, :-1], shift_labels=token_ids[:, 1:].contiguous()
            ).loss
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
    ours_by_mode = {mode: our_step(token_ids, uses_bfloat16=mode == "bf16") for mode in ("fp32", "bf16")}
    modes = {mode: their_step(token_ids, uses_bfloat16=mode == "bf16") for mode in ("fp32", "bf16")}
    for step in (*ours_by_mode.values(), *modes.values()):
        step()
    our, our_modes = ours_by_mode["fp32"], {mode: speed_of(step, 1) for mode, step in ours_by_mode.items()}
    # Without bfloat16 instructions that mode takes most of a minute: one step tells which of the two is the peer.
    by_mode = {mode: speed_of(step, 1) for mode, step in modes.items()}
    mode = max(by_mode, key=lambda mode: by_mode[mode])
    speeds: list[tuple[float, float]] = []
    for number in range(given.rounds):
        speeds.append((speed_of(our, given.steps), speed_of(modes[mode], given.steps)))
        print(
            f"round {number + 1}: ours {speeds[-1][0]:,.0f}, transformers {mode} {speeds[-1][1]:,.0f} tokens/s",
            flush=True,
        )
    ours, peer = (statistics.median(of_rounds) for of_rounds in zip(*speeds, strict=True))
    report(
        "train_step",
        ours=ours,
        peer=peer,
        unit="tokens/s",
        ratio=round(statistics.median(a / b for a, b in speeds), 3),
        peer_mode=mode,
        our_modes={mode: round(speed, 1) for mode, speed in our_modes.items()},
        peer_modes={mode: round(speed, 1) for mode, speed in by_mode.items()},
        num_rounds=given.rounds,
        num_threads=torch.get_num_threads(),
    )


def speed_of(step: Callable[[], None], num_steps: int) -> float:
    """Tokens per second of `num_steps` steps."""
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return num_steps * BATCH * LENGTH / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
