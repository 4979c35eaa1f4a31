"""What each engine says of given tokens: their log-probability, and whether each is its own first choice.

Every engine reads the released files by itself: transformers and vLLM the exported Hugging Face directory, llama.cpp
the served GGUF file. Ours is not among them: its figures are in the reference.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.release.served_scoring import CONTEXT_MARGIN, ServedScorer

if TYPE_CHECKING:
    from configs.schema import ServingResources
    from tasks.training.policy.rollout_connection import TokenScore


ANSWER_SECONDS = 600.0
"""Limit of the one request to vLLM, which holds all rows."""


class Row(NamedTuple):
    """A prompt and our own greedy continuation."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


def transformers_scores(hf_dir: Path, rows: Sequence[Row]) -> list[list[TokenScore]]:
    """The installed transformers on the exported directory, in float32: one pass per row."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tasks.training.policy.rollout_connection import TokenScore

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it names each tensor of the MTP layer, which it does not read
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    scores = []
    with torch.inference_mode():
        for row in rows:
            token_ids_T = torch.tensor([*row.prompt_ids, *row.token_ids])
            logits_TV = model(token_ids_T[None, :-1]).logits[0, len(row.prompt_ids) - 1 :].float()
            targets_T = token_ids_T[len(row.prompt_ids) :]
            chosen_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
            pairs = zip(chosen_T.tolist(), (logits_TV.argmax(-1) == targets_T).tolist(), strict=True)
            scores.append([TokenScore(*pair) for pair in pairs])
    return scores


def llama_scores(
    gguf_path: Path, rows: Sequence[Row], filler: int, vocab_size: int, resources: ServingResources, log_path: Path
) -> list[list[TokenScore]]:
    """llama.cpp's server on loopback, one request per token (tasks/release/served_scoring.py)."""
    from infra.serving.model_server import running_model_server
    from tasks.training.policy.rollout_connection import TokenScore

    longest = max(len(row.prompt_ids) + len(row.token_ids) for row in rows)
    private = resources.model_copy(update={"port": 0, "context_length": longest + CONTEXT_MARGIN})
    with (
        running_model_server(gguf_path, private, log_path) as server,
        ServedScorer(server.url, filler, vocab_size) as scorer,
    ):
        return [[TokenScore(*pair) for pair in scorer.score_tokens(row.prompt_ids, row.token_ids)] for row in rows]


def vllm_scores(hf_dir: Path, rows: Sequence[Row], log_path: Path) -> list[list[TokenScore]]:
    """vLLM's server on loopback, in float32. It reports the log-probabilities of a prompt's tokens and of the best
    ones, so our continuation is given as a part of the prompt. Raises RuntimeError where the program is not on this
    machine, and for an answer without them."""
    from infra.serving.vllm_program import running_vllm, vllm_program
    from tasks.training.policy.vllm_rollouts import read_prompt_scores

    program = vllm_program()
    if program is None:
        raise RuntimeError("vllm was on PATH where this run was started, and is not here: put it on PATH here too")
    longest = max(len(row.prompt_ids) + len(row.token_ids) for row in rows)
    given = [[*row.prompt_ids, *row.token_ids] for row in rows]
    asked = {"prompt": given, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    with running_vllm(program, hf_dir, longest + CONTEXT_MARGIN, log_path) as server:
        choices = _post(f"{server.url}/v1/completions", asked)["choices"]
    if len(choices) != len(rows):
        raise RuntimeError(f"vllm answered {len(choices)} of {len(rows)} prompts: its log is {log_path}")
    scores = []
    for number, (row, whole, choice) in enumerate(zip(rows, given, choices, strict=True)):
        read = read_prompt_scores(f"answer {number} of vllm", whole, choice["prompt_logprobs"])
        if len(read) != len(whole) - 1:
            raise RuntimeError(f"vllm scored {len(read)} of {len(whole) - 1} tokens of a row: its log is {log_path}")
        scores.append(read[len(row.prompt_ids) - 1 :])
    return scores


def _post(url: str, body: dict[str, Any]) -> Any:
    """Raises RuntimeError with what the server says where it refuses."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answered {error.code}: {error.read()[:300].decode(errors='replace')}") from error
