"""Greedy generation on a CPU at the size of `nightly`, ours beside llama.cpp's server on our own GGUF file:
python -m benchmarks.training.generate_llama [--rounds 5] [--new-tokens 128] [--write]

Both continue the same prompts of 64 tokens on one thread, in turn, round by round, timed in processor seconds of the
process: other work on the machine must not count, and threads that wait for each other by spinning would. The weights
are random bfloat16 values, as released checkpoints hold them; `float32_weights` is ours with weights that need float32.
The tokens must be the same but where two logits are closer than rounding. llama.cpp is given the F32 file, as it is
served, with as many slots as there are prompts, in two settings: `peer` is that of infra/serving (keys and values in
float32, no flash attention: log-probabilities equal ours to 1e-5), `peer_half_cache` its default (keys and values in
float16, flash attention). `peer_log_probabilities` is `peer` asked for the log-probability of each token, which ours
always gives and rollouts need. The last line is JSON; `ratio` is that of batch 8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.generate import PROMPT_TOKENS, check_tokens
from configs.load import load_scale
from model.architecture.transformer import Glm4Moe
from model.formats.gguf_checkpoint import write_gguf
from model.generation.generation import InProcessEngine, Sampling
from model.text.tokenizer_layout import SPECIAL_TOKENS
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tests.support.saved_models import save_checkpoint

BATCHES = (1, 8, 64)
RECIPE = load_scale("nightly").model.recipe
NUM_ORDINARY = 257
T = TypeVar("T")
SERVER = """
import sys, xllamacpp
path, batch, tokens, is_half = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx, params.port = path, batch, batch * tokens, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if not is_half:
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def our_model(*, in_bfloat16: bool) -> Glm4Moe:
    """Random weights; special tokens, at which llama.cpp would stop, are never the best ones."""
    model = Glm4Moe(RECIPE).eval()
    model.init_weights(torch.Generator().manual_seed(46))
    with torch.no_grad():
        model.lm_head.weight[NUM_ORDINARY : NUM_ORDINARY + len(SPECIAL_TOKENS)] = 0
        for parameter in model.parameters() if in_bfloat16 else ():
            parameter.copy_(parameter.bfloat16())
    return model


def write_model(model: Glm4Moe, directory: Path) -> Path:
    """As GGUF, with a tokenizer of the bytes, one merge and the special tokens."""
    tokenizer = train_bpe(iter(["to be or not to be"]), NUM_ORDINARY)
    tokenizer.save(str(directory / "tokenizer.json"))
    save_checkpoint(
        model,
        directory,
        eos_token_ids=[NUM_ORDINARY],
        pad_token_id=NUM_ORDINARY,
        dtype=torch.float32,
        max_shard_bytes=10**9,
    )
    write_gguf(directory, directory / "tokenizer.json", directory / "model.gguf", gguf_type="F32", name="random")
    return directory / "model.gguf"


class Server:
    """llama.cpp's, with a slot per prompt, in a process of its own."""

    def __init__(self, path: Path, num_slots: int, num_tokens: int, *, is_half: bool) -> None:
        command = [sys.executable, "-c", SERVER, *map(str, (path, num_slots, num_tokens, int(is_half)))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self._url = next((line.strip() for line in self._process.stdout if line.startswith("http")), "")
        if not self._url:
            raise RuntimeError(f"llama.cpp's server ended before it listened: exit code {self._process.wait()}")
        self.process = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def generate(self, prompts: list[list[int]], num_new: int, num_probabilities: int = 0) -> list[list[int]]:
        body = {
            "prompt": prompts,
            "n_predict": num_new,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "n_probs": num_probabilities,
        }
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = json.load(answer)
        rows = [found] if isinstance(found, dict) else sorted(found, key=lambda each: each["index"])
        return [each["tokens"] for each in rows]


def timed(process: int, call: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds of the process that works."""
    clock = (~process << 3) | 2  # Linux's number of another process's clock (clock_getcpuclockid)
    before = time.clock_gettime(clock)
    result = call()
    return time.clock_gettime(clock) - before, result


def compare(path: Path, batch: int, num_rounds: int, num_new: int) -> dict[str, float]:
    """Median tokens per second of each, and the median of the rounds' ratios."""
    prompts = torch.randint(
        0, RECIPE.vocab_size, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(46)
    ).tolist()
    engine, wide = (
        InProcessEngine(our_model(in_bfloat16=each), weights_version="0", batch_sequences=batch)
        for each in (True, False)
    )
    length, own = PROMPT_TOKENS + num_new + 8, os.getpid()
    speeds: dict[str, list[float]] = {}
    share = 1.0
    with Server(path, batch, length, is_half=False) as served, Server(path, batch, length, is_half=True) as half:
        calls: dict[str, tuple[int, Callable[[int], Any]]] = {
            "ours": (own, lambda num_new: engine.generate(prompts, Sampling(num_new), "0")),
            "peer": (served.process, lambda num_new: served.generate(prompts, num_new)),
            "float32_weights": (own, lambda num_new: wide.generate(prompts, Sampling(num_new), "0")),
            "peer_half_cache": (half.process, lambda num_new: half.generate(prompts, num_new)),
            "peer_log_probabilities": (served.process, lambda num_new: served.generate(prompts, num_new, 1)),
        }
        for _, call in calls.values():
            call(2)
        for number in range(num_rounds):
            found = {name: timed(process, partial(call, num_new)) for name, (process, call) in calls.items()}
            share = min(share, check_tokens(found["ours"][1], found["peer"][1]))
            for name, (seconds, _) in found.items():
                speeds.setdefault(name, []).append(batch * num_new / seconds)
            described = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in speeds.items())
            print(f"batch {batch}, round {number + 1}: {described} tokens/s, equal rows {share:.0%}", flush=True)
    ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["peer"], strict=True)]
    medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    return {
        **medians,
        "ratio": round(statistics.median(ratios), 3),
        "smallest_ratio": round(min(ratios), 3),
        "largest_ratio": round(max(ratios), 3),
        "equal_rows": share,
    }


def main() -> None:
    """Time both in turn and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(our_model(in_bfloat16=True), Path(directory))
        batches = {str(batch): compare(path, batch, given.rounds, given.new_tokens) for batch in BATCHES}
    middle = batches[str(BATCHES[1])]
    report(
        "generate_llama",
        ours=middle["ours"],
        peer=middle["peer"],
        unit="tokens per processor second",
        ratio=middle["ratio"],
        batch=BATCHES[1],
        batches=batches,
        threads=1,
        xllamacpp=version("xllamacpp"),
    )


if __name__ == "__main__":
    main()
