"""Muon against AdamW at equal data: python -m benchmarks.training.muon [--steps 160] [--write]

The same small mixture of experts, initial weights, rows in the same order, batch, warm-up, cosine, weight decay and
biases; only the optimizer differs. Each one's learning rate is tuned first, in factors of two until the best one is no
edge of those tried. Muon's validation loss after `--steps` steps is the mark. AdamW is then trained with more and more
steps, each time with a cosine of that length, until it is as good; between two lengths the loss is interpolated over
the logarithm of the tokens. `ratio` is AdamW's tokens to the mark over Muon's (ours over peer would be its inverse:
fewer is better); where AdamW does not get there, it is a lower bound and says so.

Text: Gutenberg books and PEPs of ../shared/data where that is, else the embedded default's (Python's standard library
and its topics).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import report
from configs.schema import OptimizerRecipe
from infra.code_digest import ROOT
from model.architecture.moe import update_router_bias
from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import build_optimizer, set_learning_rate
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.data.sources.embedded_sources import pydoc_topics, standard_library
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tests.support.model_recipes import GLM46

SHARED_TEXT = ROOT.parent / "shared" / "data" / "text"
SHARED_FILES = ("gutenberg_en.jsonl.gz", "peps.jsonl.gz")
NUM_ORDINARY_TOKENS, SEQUENCE_LENGTH, ROWS_PER_STEP, VALIDATION_ROWS = 988, 128, 8, 64
LENGTHS = (1.0, 1.35, 1.8, 2.4)
"""Lengths of AdamW's runs over that of Muon's."""
WARMUP_SHARE, FINAL_RATE_SHARE, BALANCE_WEIGHT, BIAS_RATE = 0.1, 0.1, 1e-4, 0.001
MAX_CHARS_PER_DOCUMENT, SAMPLE_CHARS = 20_000, 2_000_000
START_RATES = {"muon": 8e-3, "adamw": 4e-3}
MODEL = GLM46.model_copy(
    update={
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rope_theta": 10_000.0,
        "num_nextn_predict_layers": 0,
    }
)
OPTIMIZER = OptimizerRecipe.model_validate(
    {
        "kind": "muon",
        "muon_momentum": 0.95,
        "muon_newton_schulz_steps": 5,
        "muon_update_rms": 0.2,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "adam_rate_ratio": 1.0,
        "router_rate_ratio": 1.0,
        "state_dtype": "float32",
    }
)


@dataclass(frozen=True)
class Rows:
    """Packed rows of T + 1 tokens."""

    training: Tensor
    validation: Tensor
    num_validation_bytes: int
    source: str


def read_rows(num_training: int) -> Rows:
    """Documents one after the other, cut into rows and shuffled once; validation rows come from documents of their
    own."""
    if SHARED_TEXT.is_dir():
        texts, source = (
            [text for name in SHARED_FILES for text in _json_lines(SHARED_TEXT / name)],
            ", ".join(SHARED_FILES),
        )
    else:
        paths = [path for _, path in (*standard_library(), pydoc_topics())]
        texts, source = [path.read_text(errors="replace") for path in paths], "the embedded default"
    draw = np.random.default_rng(46)
    texts = [texts[index][:MAX_CHARS_PER_DOCUMENT] for index in draw.permutation(len(texts))]
    sample = texts[: max(1, SAMPLE_CHARS // MAX_CHARS_PER_DOCUMENT)]
    tokenizer = train_bpe(iter(sample), NUM_ORDINARY_TOKENS)
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts: list[Tensor] = []
    stream = iter(texts)
    for num_rows in (VALIDATION_ROWS, num_training):
        tokens: list[int] = []
        wanted = num_rows * (SEQUENCE_LENGTH + 1)
        while len(tokens) < wanted:
            batch = list(islice(stream, 32))
            if not batch:
                raise ValueError(f"{source} holds less text than {num_training} rows: lower --steps")
            for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                tokens += [*encoded.ids, end]
        parts.append(torch.tensor(tokens[:wanted]).view(num_rows, -1))
    order = torch.from_numpy(draw.permutation(num_training))
    num_bytes = sum(len(text.encode()) for text in tokenizer.decode_batch(parts[0][:, 1:].tolist()))
    return Rows(parts[1][order], parts[0], num_bytes, source)


def _json_lines(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["text"] for line in file]


def train(kind: str, peak_rate: float, num_steps: int, rows: Rows) -> float:
    """Validation loss in nats per token after `num_steps` steps; infinite where training diverged."""
    torch.manual_seed(46)
    model = Glm4Moe(MODEL)
    optimizer = build_optimizer(model, OPTIMIZER.model_copy(update={"kind": kind}))
    for step in range(num_steps):
        batch = rows.training[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP]
        output = model(batch[:, :-1], target_ids_BT=batch[:, 1:])
        assert output.losses is not None
        loss = output.losses.lm + BALANCE_WEIGHT * output.losses.balance
        if not math.isfinite(float(loss.detach())):
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, peak_rate * rate_share((step + 1) / num_steps))
        optimizer.step()
        update_router_bias(model, output.expert_counts_LE, BIAS_RATE)
    return validation_loss(model, rows.validation)


def rate_share(progress: float) -> float:
    """Linear warm-up, then a cosine to the final share, as in the recipe."""
    if progress < WARMUP_SHARE:
        return progress / WARMUP_SHARE
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine


@torch.no_grad()
def validation_loss(model: Glm4Moe, rows: Tensor) -> float:
    losses = [model(part[:, :-1], target_ids_BT=part[:, 1:]).losses for part in rows.split(ROWS_PER_STEP)]
    return float(torch.stack([each.lm for each in losses if each is not None]).mean())


def tune(kind: str, num_steps: int, rows: Rows) -> dict[float, float]:
    """Loss by learning rate, over factors of two around the best."""
    losses = {rate: train(kind, rate, num_steps, rows) for rate in (START_RATES[kind] / 2, START_RATES[kind])}
    while True:
        best = min(losses, key=lambda rate: losses[rate])
        missing = [rate for rate in (best / 2, best * 2) if rate not in losses]
        print(f"{kind}: " + ", ".join(f"{rate:g} -> {loss:.4f}" for rate, loss in sorted(losses.items())), flush=True)
        if not missing:
            return losses
        losses |= {rate: train(kind, rate, num_steps, rows) for rate in missing}


def tokens_to(mark: float, losses: dict[float, float]) -> tuple[float, bool]:
    """Length at which the loss reaches the mark, and whether it does: else the longest one tried, as a lower bound."""
    lengths = sorted(losses)
    for shorter, longer in pairwise(lengths):
        if losses[shorter] >= mark >= losses[longer]:
            share = (losses[shorter] - mark) / (losses[shorter] - losses[longer])
            return math.exp(math.log(shorter) + share * (math.log(longer) - math.log(shorter))), True
    return (lengths[0], True) if losses[lengths[0]] < mark else (lengths[-1], False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="of Muon's run")
    parser.add_argument("--write", action="store_true", help="store the result in benchmarks/results/")
    arguments = parser.parse_args()
    started = time.monotonic()
    num_steps = {length: round(arguments.steps * length) for length in LENGTHS}
    rows = read_rows(max(num_steps.values()) * ROWS_PER_STEP)
    tuned = {kind: tune(kind, arguments.steps, rows) for kind in START_RATES}
    rates = {kind: min(losses, key=lambda rate, losses=losses: losses[rate]) for kind, losses in tuned.items()}
    mark = tuned["muon"][rates["muon"]]
    adamw = {1.0: tuned["adamw"][rates["adamw"]]}
    for length in LENGTHS[1:]:
        if min(adamw.values()) > mark:
            adamw[length] = train("adamw", rates["adamw"], num_steps[length], rows)
            print(f"adamw, {length:g} x the tokens: {adamw[length]:.4f}, mark {mark:.4f}", flush=True)
    ratio, is_reached = tokens_to(mark, adamw)
    tokens = arguments.steps * ROWS_PER_STEP * SEQUENCE_LENGTH
    report(
        "muon",
        ours=tokens,
        peer=tokens * ratio,
        unit="tokens to the same validation loss",
        lower_is_better=True,
        ratio=round(ratio, 3),
        is_lower_bound=not is_reached,
        validation_loss=mark,
        learning_rates=rates,
        losses_by_rate={
            kind: {f"{rate:g}": loss for rate, loss in sorted(losses.items())} for kind, losses in tuned.items()
        },
        adamw_losses_by_length={f"{length:g}": loss for length, loss in adamw.items()},
        text=rows.source,
        seconds=round(time.monotonic() - started),
    )


if __name__ == "__main__":
    main()
