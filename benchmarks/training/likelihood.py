"""Likelihood items on a CPU, ours beside lm-evaluation-harness's own `hf` backend: python -m
benchmarks.training.likelihood [--questions 500] [--shots 0] [--rounds 1] [--write]

Both score the same requests in float32 with the same weights: questions of four choices, a choice 1 to 12 tokens long,
a question 20 to 120. `--shots N` puts N answered questions of 64 tokens before every one, as few-shot examples are. The
decisions must be the same, except where two choices are closer than rounding. The peer computes batches of 16, as ours.
Both run on one thread, and a figure is requests per second of the thread's processor time, so that another load on the
machine changes little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.train_step import RECIPE
from model.architecture.transformer import Glm4Moe
from model.generation.generation import InProcessEngine

NUM_CHOICES = 4
SHOT_TOKENS = 64
BATCH_SEQUENCES = 16
ROUNDING = 1e-3
"""Of a log-probability, between two orders of the same float32 sums."""

Pair = tuple[list[int], list[int]]


def pairs_of(num_questions: int, num_shots: int) -> list[Pair]:
    """Random contexts and continuations, NUM_CHOICES per context."""
    generator = torch.Generator().manual_seed(46)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(0, RECIPE.vocab_size, (length,), generator=generator).tolist()

    shots = [token_id for _ in range(num_shots) for token_id in tokens(SHOT_TOKENS, SHOT_TOKENS)]
    contexts = [shots + tokens(20, 120) for _ in range(num_questions)]
    return [(context, tokens(1, 12)) for context in contexts for _ in range(NUM_CHOICES)]


def peer_of(model: Glm4Moe, directory: Path):
    """The harness's backend over transformers' model with the same weights."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from benchmarks.training.generate import their_model
    from tests.support.evaluation_fakes import toy_tokenizer

    toy_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|endoftext|>")
    return HFLM(pretrained=their_model(model), tokenizer=tokenizer, batch_size=BATCH_SEQUENCES, backend="causal")


def check_decisions(ours: list[float], peer: list[float]) -> None:
    """Raises where the best choice differs and rounding could not have decided it."""
    for start in range(0, len(ours), NUM_CHOICES):
        own, other = ours[start : start + NUM_CHOICES], peer[start : start + NUM_CHOICES]
        best, their_best = (max(range(NUM_CHOICES), key=side.__getitem__) for side in (own, other))
        assert max(abs(a - b) for a, b in zip(own, other, strict=True)) < ROUNDING, (own, other)
        assert best == their_best or abs(own[best] - own[their_best]) < ROUNDING, (own, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(WRITE_FLAG, action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = Glm4Moe(RECIPE).eval()
    model.init_weights(torch.Generator().manual_seed(46))
    pairs = pairs_of(given.questions, given.shots)
    engine = InProcessEngine(model, weights_version="0", batch_sequences=BATCH_SEQUENCES)
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as directory:
        peer = peer_of(model, Path(directory))
        requests = [((str(number), ""), *pair) for number, pair in enumerate(pairs)]
        engine.score_continuations(pairs[:NUM_CHOICES])
        peer._loglikelihood_tokens(requests[:NUM_CHOICES], disable_tqdm=True)
        for number in range(given.rounds):
            started = time.thread_time()
            ours = [score.log_probability for score in engine.score_continuations(pairs)]
            between = time.thread_time()
            with torch.inference_mode():
                theirs = [score for score, _ in peer._loglikelihood_tokens(requests, disable_tqdm=True)]
            ended = time.thread_time()
            check_decisions(ours, theirs)
            speeds["ours"].append(len(pairs) / (between - started))
            speeds["peer"].append(len(pairs) / (ended - between))
            described = ", ".join(f"{name} {values[-1]:,.1f}" for name, values in speeds.items())
            print(f"round {number + 1}: {described} requests per processor second", flush=True)
    ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["peer"], strict=True)]
    report(
        "likelihood" if not given.shots else "likelihood_shots",
        ours=statistics.median(speeds["ours"]),
        peer=statistics.median(speeds["peer"]),
        ratio=round(statistics.median(ratios), 3),
        unit="requests per processor second",
        requests=len(pairs),
        shots=given.shots,
        rounds=given.rounds,
    )


if __name__ == "__main__":
    main()
