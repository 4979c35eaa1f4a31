"""Greedy generation on a CPU, ours beside transformers' generate: python -m benchmarks.training.generate [--rounds 3]
[--new-tokens 128] [--write]

Both continue the same prompts of 64 tokens with the same weights in float32 arithmetic, in turn, at batch 8 and at
batch 64, by the same number of tokens; the tokens must be the same but where two logits are closer than rounding. The
weights are bfloat16 values, as released checkpoints hold them, which ours keeps in bfloat16 without a loss;
`float32_weights` is ours at batch 8 and 64 with weights that need float32. `peer_bfloat16` is one round of the peer
computing in bfloat16.

What batch 64 can reach on two AVX2 cores whose multiply-adds peak at 198 GFLOP/s: 64 prompts of 64 tokens and 128 steps
are 152 GFLOP (877 MFLOP a step in matrices, 38 in attention at 96 positions; prompts 35 GFLOP, of whose last layer only
the read tokens are computed), 0.77 s at peak or 10,700 tokens/s. Measured on a quiet machine: a step 6.3 ms in the pass
(products at 148 to 170 GFLOP/s, attention 0.9 ms, whose 19 MB of keys and values come from memory) and 0.3 ms in
Python, the prompts 0.22 s. Ten times a peer of 1,380 tokens/s or more is beyond that peak; only fewer operations than
float32 arithmetic on these weights could reach it.

`speculation` is another model: the same sizes and an MTP layer, trained for a few steps on sequences that are 90 %
predictable, so that drafts have something to hit. Plain and speculative generation give the same tokens; the share of
accepted drafts and both speeds are reported. The last line is JSON; `ratio` is that of batch 8, `batches` holds both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.train_step import RECIPE
from model.architecture.transformer import Glm4Moe
from model.generation.generation import Generation, InProcessEngine, Sampling

BATCHES = (8, 64)
PROMPT_TOKENS = 64
T = TypeVar("T")
ROUNDING = 1e-3
"""Of a logit, between two orders of the same float32 sums."""


def our_model(*, in_bfloat16: bool) -> Glm4Moe:
    """Random weights; float32 tensors of bfloat16 values, or of values that only float32 holds."""
    model = Glm4Moe(RECIPE).eval()
    model.init_weights(torch.Generator().manual_seed(46))
    if in_bfloat16:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    return model


def their_model(model: Glm4Moe):
    """transformers' model with the same weights."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {name: value for name, value in model.recipe.model_dump().items() if name != "num_nextn_predict_layers"}
    theirs = Glm4MoeForCausalLM(Glm4MoeConfig(**fields, attn_implementation="sdpa")).eval()
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith("experts.gate_proj")]:
        prefix = name.removesuffix("gate_proj")
        state[prefix + "gate_up_proj"] = torch.cat([state.pop(name), state.pop(prefix + "up_proj")], dim=1)
    theirs.load_state_dict(state)
    return theirs


def peer_generate(theirs, token_ids: torch.Tensor, num_new: int) -> list[list[int]]:
    with torch.inference_mode():
        continued = theirs.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return continued[:, token_ids.shape[1] :].tolist()


def check_tokens(ours: Generation, peer: list[list[int]]) -> float:
    """Share of rows with equal tokens. Raises where a row parts from the peer's at a token that rounding could not have
    decided."""
    num_equal = 0
    for row, (own, other, margins) in enumerate(zip(ours.token_ids, peer, ours.top2_margins, strict=True)):
        parting = next(
            (position for position, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), None
        )
        if parting is not None and margins[parting] > ROUNDING:
            raise AssertionError(
                f"row {row} differs from the peer at token {parting}, where the best logit leads by {margins[parting]}"
            )
        num_equal += parting is None
    return num_equal / len(peer)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def compare(batch: int, num_rounds: int, num_new: int) -> dict[str, float]:
    """Median tokens per second of both, and the median of the rounds' ratios."""
    model = our_model(in_bfloat16=True)
    theirs = their_model(model)
    token_ids = prompts_of(batch)
    engine, wide = (
        InProcessEngine(each, weights_version="0", batch_sequences=batch)
        for each in (model, our_model(in_bfloat16=False))
    )
    sampling, num_tokens = Sampling(num_new), batch * num_new
    for warmed in (engine, wide):
        warmed.generate(token_ids.tolist(), Sampling(2), "0")
    peer_generate(theirs, token_ids, 2)
    speeds: dict[str, list[float]] = {"ours": [], "peer": [], "float32_weights": []}
    share = 1.0
    for number in range(num_rounds):
        seconds, ours = timed(lambda: engine.generate(token_ids.tolist(), sampling, "0"))
        peer_seconds, peer = timed(lambda: peer_generate(theirs, token_ids, num_new))
        wide_seconds, _ = timed(lambda: wide.generate(token_ids.tolist(), sampling, "0"))
        share = min(share, check_tokens(ours, peer))
        for name, taken in (("ours", seconds), ("peer", peer_seconds), ("float32_weights", wide_seconds)):
            speeds[name].append(num_tokens / taken)
        described = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in speeds.items())
        print(f"batch {batch}, round {number + 1}: {described} tokens/s, equal rows {share:.0%}", flush=True)
    ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["peer"], strict=True)]
    theirs = theirs.bfloat16()
    peer_generate(theirs, token_ids, 2)
    seconds, _ = timed(lambda: peer_generate(theirs, token_ids, num_new))
    medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    return {
        **medians,
        "ratio": round(statistics.median(ratios), 3),
        "peer_bfloat16": round(num_tokens / seconds, 1),
        "equal_rows": share,
    }


def prompts_of(batch: int) -> torch.Tensor:
    return torch.randint(0, RECIPE.vocab_size, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(46))


def predictable_rows(num_rows: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Rows of 256 tokens in a fixed order, each followed by its successor in 90 % of the positions and by any token
    else."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randperm(256, generator=torch.Generator().manual_seed(46))
    rows = [torch.randint(0, 256, (num_rows,), generator=generator)]
    for _ in range(num_tokens - 1):
        is_next = torch.rand(num_rows, generator=generator) < 0.9
        rows.append(torch.where(is_next, successors[rows[-1]], torch.randint(0, 256, (num_rows,), generator=generator)))
    return torch.stack(rows, dim=1)


def measure_speculation(num_steps: int, num_rounds: int, num_new: int) -> dict[str, object]:
    """Train a model with an MTP layer, then generate with and without drafts: greedily, and sampled at temperature
    1."""
    model = Glm4Moe(RECIPE.model_copy(update={"num_nextn_predict_layers": 1}))
    model.init_weights(torch.Generator().manual_seed(46))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(num_steps):
        rows = predictable_rows(8, 65, seed=step)
        losses = model(rows[:, :-1], target_ids_BT=rows[:, 1:]).losses
        assert losses is not None
        optimizer.zero_grad(set_to_none=True)
        (losses.lm + 0.3 * losses.mtp).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    results: dict[str, object] = {"training_steps": num_steps}
    for batch in (1, *BATCHES):
        engine = InProcessEngine(model, weights_version="0", batch_sequences=batch)
        prompts = predictable_rows(batch, PROMPT_TOKENS, seed=10_000).tolist()
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            speeds: list[list[float]] = [[], []]
            plain, drafted = (
                partial(engine.generate, prompts, Sampling(num_new, temperature, is_speculative=each), "0")
                for each in (False, True)
            )
            for _ in range(num_rounds):
                (plain_seconds, expected), (seconds, generated) = timed(plain), timed(drafted)
                assert expected.token_ids == generated.token_ids, "drafts changed the tokens"
                speeds[0].append(batch * num_new / plain_seconds)
                speeds[1].append(batch * num_new / seconds)
            plain_speed, speed = (statistics.median(values) for values in speeds)
            acceptance = generated.acceptance_rate
            results[f"{name}_batch_{batch}"] = {
                "acceptance": round(acceptance, 3),
                "plain": round(plain_speed, 1),
                "speculative": round(speed, 1),
                "ratio": round(speed / plain_speed, 3),
            }
            print(f"speculation, {name}, batch {batch}: {results[f'{name}_batch_{batch}']}", flush=True)
    return results


def main() -> None:
    """Time both in turn and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--training-steps", type=int, default=60)
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    given = parser.parse_args()
    batches = {str(batch): compare(batch, given.rounds, given.new_tokens) for batch in BATCHES}
    small = batches[str(BATCHES[0])]
    report(
        "generate",
        ours=small["ours"],
        peer=small["peer"],
        unit="tokens/s",
        ratio=small["ratio"],
        batch=BATCHES[0],
        batches=batches,
        speculation=measure_speculation(given.training_steps, given.rounds, given.new_tokens),
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
