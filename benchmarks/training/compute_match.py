"""Our training beside transformers' and nanochat's at equal compute: bits per byte of unseen text after equal processor
time.

    python -m benchmarks.training.compute_match [--seconds 60 120] [--nanochat DIR] [--write]

All read the same rows in the same order, in batches of the same size, with the same tokenizer, in float32 on the same
threads. Ours: a small GLM-4 mixture of experts with Muon, loss-free balancing and our kernels. transformers: the same
architecture, Glm4MoeForCausalLM, with SDPA attention and torch's fused AdamW. nanochat: its dense GPT of the same
width and depth, with its own optimizer and schedule of rates; its momentum stays at 0.95, where its own script raises
and lowers it, and there is no weight decay. DIR is a clone of github.com/karpathy/nanochat, whose code is read from
there. Without DIR it is left out.

Each run ends when it has used its seconds of processor time (all threads; validation is not counted), and its learning
rate follows the share of them that is used. Rates are searched at the shortest budget, in factors of two until the best
one is no edge of those tried; nanochat's rates by one factor. `ratio` is the seconds that a peer would need for
our bits per byte at the longest budget over ours, interpolated over the logarithm of the time; where no budget of the
peer reaches them it is the longest peer budget over the time at which our curve passes the peer's best.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.muon import BALANCE_WEIGHT, BIAS_RATE, MODEL, OPTIMIZER, Rows, rate_share, read_rows

ROWS_PER_STEP, NUM_ROWS = 32, 12_000
SEED = 46
NANOCHAT_LAYERS, NANOCHAT_HEADS = 4, 4
NANOCHAT_WARMUP_SHARE, NANOCHAT_WARMDOWN_SHARE, NANOCHAT_FINAL_SHARE = 0.02, 0.65, 0.05
"""Of its scripts/base_train.py, whose 40 steps of warm-up are a share here."""


@dataclass(frozen=True)
class Contender:
    """A model with its optimizer, ready to train."""

    model: nn.Module
    step: Callable[[Tensor, float], None]
    """Train on rows (B, T + 1), at this share of the time."""
    losses: Callable[[Tensor], Tensor]
    """Mean loss of rows, in nats per token."""


def ours(rate: float) -> Contender:
    """As tasks/training does it on one rank."""
    from model.architecture.moe import update_router_bias
    from model.architecture.transformer import Glm4Moe
    from model.kernels.cpu_products import onednn_products
    from model.optimizer.optimizer import build_optimizer, set_learning_rate

    model = Glm4Moe(MODEL)
    model.init_weights(torch.Generator().manual_seed(SEED))
    optimizer = build_optimizer(model, OPTIMIZER.model_copy(update={"kind": "muon"}))

    def losses_of(rows: Tensor) -> Any:
        return model(rows[:, :-1], target_ids_BT=rows[:, 1:])

    def step(rows: Tensor, progress: float) -> None:
        with onednn_products():
            output = losses_of(rows)
            optimizer.zero_grad()
            (output.losses.lm + BALANCE_WEIGHT * output.losses.balance).backward()
        set_learning_rate(optimizer, rate * rate_share(progress))
        optimizer.step()
        update_router_bias(model, output.expert_counts_LE, BIAS_RATE)

    return Contender(model, step, lambda rows: losses_of(rows).losses.lm)


def transformers(rate: float) -> Contender:
    """The loop of their examples: AdamW, warm-up and cosine."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {name: value for name, value in MODEL.model_dump().items() if name != "num_nextn_predict_layers"}
    config = Glm4MoeConfig(**fields, attn_implementation="sdpa")  # pyright: ignore[reportCallIssue]
    model = Glm4MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def losses_of(rows: Tensor) -> Tensor:
        labels = rows[:, 1:].contiguous()
        return model(input_ids=rows[:, :-1], labels=rows[:, :-1], shift_labels=labels).loss

    def step(rows: Tensor, progress: float) -> None:
        loss = losses_of(rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_share(progress)
        optimizer.step()

    return Contender(model, step, losses_of)


def nanochat(rate: float) -> Contender:
    """Its model and optimizer at its own rates times `rate`, its schedule of rates; momentum and weight decay are its
    optimizer's defaults."""
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    length = MODEL.max_position_embeddings
    config = GPTConfig(
        sequence_len=min(length, 1024),
        vocab_size=MODEL.vocab_size,
        n_layer=NANOCHAT_LAYERS,
        n_head=NANOCHAT_HEADS,
        n_kv_head=NANOCHAT_HEADS,
        n_embd=MODEL.hidden_size,
        window_pattern="L",
    )
    model = GPT(config)
    model.init_weights()
    optimizer = model.setup_optimizer()

    def step(rows: Tensor, progress: float) -> None:
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        model.zero_grad(set_to_none=True)
        loss.backward()
        falling = min(1.0, (1.0 - progress) / NANOCHAT_WARMDOWN_SHARE)
        share = min(1.0, progress / NANOCHAT_WARMUP_SHARE, NANOCHAT_FINAL_SHARE + (1 - NANOCHAT_FINAL_SHARE) * falling)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate * share
        optimizer.step()

    return Contender(model, step, lambda rows: model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))


@dataclass(frozen=True)
class Run:
    """One contender's training."""

    bits_per_byte: float
    """Of the validation rows; infinite where training diverged."""
    num_tokens: int
    seconds: float
    """Of processor time."""


def train(contender: Callable[[float], Contender], rate: float, seconds: float, rows: Rows) -> Run:
    """Train for so much processor time; the batch order starts again where the rows end."""
    torch.manual_seed(SEED)
    made = contender(rate)
    batches = rows.training.split(ROWS_PER_STEP)
    used, num_steps = 0.0, 0
    while used < seconds:
        started = time.process_time()
        made.step(batches[num_steps % len(batches)], used / seconds)
        used += time.process_time() - started
        num_steps += 1
    with torch.no_grad():
        nats = [float(made.losses(part)) for part in rows.validation.split(ROWS_PER_STEP)]
    loss = sum(nats) / len(nats)
    bits = loss * rows.validation[:, 1:].numel() / math.log(2) / rows.num_validation_bytes
    tokens = num_steps * ROWS_PER_STEP * (rows.training.shape[1] - 1)
    return Run(bits if math.isfinite(bits) else math.inf, tokens, used)


def tune(contender: Callable[[float], Contender], start: float, seconds: float, rows: Rows) -> dict[float, Run]:
    """Runs by learning rate, over factors of two around the best."""
    runs: dict[float, Run] = {}
    missing = [start / 2, start, start * 2]
    while missing:
        runs |= {rate: train(contender, rate, seconds, rows) for rate in missing}
        best = min(runs, key=lambda rate: runs[rate].bits_per_byte)
        missing = [rate for rate in (best / 2, best * 2) if rate not in runs]
    return runs


def seconds_to(mark: float, curve: dict[float, float]) -> float | None:
    """Processor seconds at which a curve of bits per byte by seconds passes the mark; None where it does not."""
    points = sorted(curve.items())
    for (earlier, worse), (later, better) in pairwise(points):
        if worse >= mark >= better:
            share = (worse - mark) / (worse - better) if worse > better else 0.0
            return math.exp(math.log(earlier) + share * (math.log(later) - math.log(earlier)))
    return points[0][0] if points[0][1] < mark else None


def advantage(ours: dict[float, float], peer: dict[float, float]) -> dict[str, float | bool]:
    """How many times the time a peer needs for the same bits per byte; a bound says that one of them passed the other's
    mark before the shortest budget, or not by the longest."""
    longest = max(ours)
    needed = seconds_to(ours[longest], peer)
    if needed is not None:
        return {"ratio": round(needed / longest, 3), "is_bound": needed == min(peer)}
    reached = seconds_to(min(peer.values()), ours)
    assert reached is not None, "one of two curves reaches the other's best"
    return {"ratio": round(max(peer) / reached, 3), "is_bound": reached == min(ours)}


def main() -> None:
    """All contenders, one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[30.0, 60.0, 120.0], help="processor time of a run")
    parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a clone of nanochat")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    options = parser.parse_args()
    contenders = {"glm46": (ours, 1.6e-2), "transformers": (transformers, 4e-3)}
    if options.nanochat is not None:
        if not (options.nanochat / "nanochat" / "gpt.py").is_file():
            parser.error(f"{options.nanochat} holds no nanochat/gpt.py: clone github.com/karpathy/nanochat there")
        sys.path.insert(0, str(options.nanochat.resolve()))
        contenders["nanochat"] = (nanochat, 1.0)
    rows = read_rows(NUM_ROWS)
    budgets = sorted(options.seconds)
    runs: dict[str, dict[float, Run]] = {}
    rates: dict[str, dict[str, float]] = {}
    for name, (contender, start) in contenders.items():
        tuned = tune(contender, start, budgets[0], rows)
        rates[name] = {f"{rate:g}": round(run.bits_per_byte, 4) for rate, run in sorted(tuned.items())}
        best = min(tuned, key=lambda rate, tuned=tuned: tuned[rate].bits_per_byte)
        runs[name] = {budgets[0]: tuned[best]}
        for seconds in budgets[1:]:
            runs[name][seconds] = train(contender, best, seconds, rows)
        shown = ", ".join(f"{seconds:g} s {run.bits_per_byte:.4f}" for seconds, run in runs[name].items())
        print(f"{name}: rate {best:g}: {shown}", flush=True)
    curves = {name: {seconds: run.bits_per_byte for seconds, run in of.items()} for name, of in runs.items()}
    peers = {name: advantage(curves["glm46"], curve) for name, curve in curves.items() if name != "glm46"}
    longest = budgets[-1]
    report(
        "compute_match",
        ours=curves["glm46"][longest],
        peer=curves["transformers"][longest],
        unit=f"bits per byte after {longest:g} processor s",
        ratio=peers["transformers"]["ratio"],
        time_to_the_same_bits=peers,
        bits_per_byte={name: {f"{s:g}": round(bits, 4) for s, bits in curve.items()} for name, curve in curves.items()},
        tokens={name: {f"{s:g}": run.num_tokens for s, run in of.items()} for name, of in runs.items()},
        by_rate=rates,
        parameters={name: count(contender(start).model) for name, (contender, start) in contenders.items()},
        text=rows.source,
        num_threads=torch.get_num_threads(),
    )


def count(model: nn.Module) -> int:
    """Parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
