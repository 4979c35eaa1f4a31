"""What drafts of the MTP layer cost and bring in llama.cpp's server on a CPU, by the shape of the model:
python -m benchmarks.training.drafts [--rounds 3] [--new-tokens 96] [--write]

Whether drafts pay depends on two things: how many are right, and what a pass of two tokens and a draft cost beside a
pass of one token. The models here measure the second. Each continues a token t by a fixed other token p(t): the
unembedding of p(t) is the embedding of t, and layers add little to the residual stream. The MTP layer reads only the
embedding, so it says the same, and nearly every draft is right. Tokens differ, so their experts differ, as in a trained
model. `speedup` is the most that drafts bring to that shape; with a share a of right drafts they bring about
(1 + a) / 2 of it, and `break_even` is the a at which they bring nothing. One slot, one thread, F32 weights as served,
in processor seconds of the server, both in turn. The tokens must be the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import urllib.request
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import WRITE_FLAG, report
from benchmarks.training.generate_llama import timed, write_model
from configs.load import load_scale
from configs.schema import ModelRecipe, ServingResources
from infra.serving.model_server import Access, ModelServer, running_model_server
from model.architecture.counts import count_parameters
from model.architecture.transformer import Glm4Moe

NIGHTLY = load_scale("nightly").model.recipe
SIZES: dict[str, dict[str, int]] = {
    "nightly": {},
    "100M": {"hidden_size": 512, "moe_intermediate_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    "all experts": {
        "hidden_size": 768,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1536,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
    },
}
"""What differs from `nightly`. In the last one every token reads every expert, so two tokens read the same weights."""
SERVING = ServingResources(host="127.0.0.1", port=0, context_length=1024, num_threads=1, startup_timeout_seconds=120)
NUM_ORDINARY = 257
"""Tokens that are no special ones."""


def repeating_model(recipe: ModelRecipe) -> Glm4Moe:
    """Continues t by a fixed permutation of the ordinary tokens, and drafts the same."""
    model = Glm4Moe(recipe).eval()
    generator = torch.Generator().manual_seed(46)
    model.init_weights(generator)
    hidden = recipe.hidden_size
    following = torch.randperm(NUM_ORDINARY, generator=generator)
    embedding = torch.randn(recipe.vocab_size, hidden, generator=generator)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        model.lm_head.weight[following] = embedding[:NUM_ORDINARY]
        for name, parameter in model.named_parameters():
            if name.endswith("eh_proj.weight"):
                parameter.copy_(torch.eye(hidden, 2 * hidden))
    return model


def generated(server: ModelServer, number: int, num_new: int) -> dict[str, Any]:
    """What the server continues one token with: `tokens`, and `timings` with the drafts."""
    body = {
        "prompt": [number],
        "n_predict": num_new,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{server.url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def compare(path: Path, num_rounds: int, num_new: int) -> dict[str, float]:
    """Median speeds with and without drafts, and the rounds' median ratio."""
    ratios, speeds, drafted, right = [], {False: [], True: []}, 0, 0
    with (
        running_model_server(path, SERVING, path.with_suffix(".log")) as plain,
        running_model_server(path, SERVING, path.with_suffix(".drafts"), access=Access(is_drafting=True)) as drafting,
    ):
        servers = {False: plain, True: drafting}
        for server in servers.values():
            generated(server, 0, 2)
        for number in range(num_rounds):
            rows = []
            for is_drafting, server in servers.items():
                seconds, answer = timed(server.process.pid, partial(generated, server, number + 1, num_new))
                rows.append(answer["tokens"])
                speeds[is_drafting].append(num_new / seconds)
            if rows[0] != rows[1]:
                raise RuntimeError(f"drafts changed tokens: {rows[0]} became {rows[1]}")
            drafted += answer["timings"]["draft_n"]
            right += answer["timings"]["draft_n_accepted"]
            ratios.append(speeds[True][-1] / speeds[False][-1])
    speedup = statistics.median(ratios)
    return {
        "plain": round(statistics.median(speeds[False]), 1),
        "drafts": round(statistics.median(speeds[True]), 1),
        "speedup": round(speedup, 3),
        "smallest_speedup": round(min(ratios), 3),
        "largest_speedup": round(max(ratios), 3),
        "drafts_right": round(right / drafted, 3),
        "break_even": round((1 + right / drafted) / speedup - 1, 3),
    }


def main() -> None:
    """Time the shapes and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {}
    for name, changed in SIZES.items():
        recipe = NIGHTLY.model_copy(update=changed)
        with tempfile.TemporaryDirectory() as directory:
            path = write_model(repeating_model(recipe), Path(directory))
            found = compare(path, given.rounds, given.new_tokens)
        sizes[name] = {"parameters": count_parameters(recipe).total, **found}
        print(f"{name}: {sizes[name]}", flush=True)
    largest = next(reversed(sizes.values()))
    report(
        "drafts",
        ours=largest["drafts"],
        peer=largest["plain"],
        unit="tokens per processor second",
        sizes=sizes,
        threads=1,
        xllamacpp=version("xllamacpp"),
    )


if __name__ == "__main__":
    main()
