"""SGLang's protocol: `/update_weights_from_disk` under the name of a version, `/generate` for all prompts or rows at
once."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.generation.generation import Sampling
from tasks.training.policy.rollout_connection import (
    ONE_DRAW,
    ONE_TOKEN,
    EngineError,
    ServerAnswer,
    ServerConnection,
    ServerScores,
    TokenScore,
    server_seed,
)


class SglangProtocol:
    """Of SGLang 0.5 and later."""

    def give_weights(self, connection: ServerConnection, weights_dir: Path, weights_version: str) -> None:
        body = {"model_path": str(weights_dir), "weight_version": weights_version}
        done = connection.post("/update_weights_from_disk", body)
        if not isinstance(done, dict) or done.get("success") is not True:
            raise EngineError(f"{connection.url} did not load {weights_dir}: {str(done)[:300]}")

    def sample(
        self,
        connection: ServerConnection,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
    ) -> list[ServerAnswer]:
        wanted = {"return_routed_experts": True} if sampling.keeps_routes else {}
        answers = _generate(connection, prompts, [_parameters(sampling, own) for own in draws], **wanted)
        return [_read(connection, number, answer) for number, answer in enumerate(answers)]

    def score(self, connection: ServerConnection, rows: Sequence[Sequence[int]]) -> list[ServerScores]:
        parameters = [_parameters(ONE_TOKEN, ONE_DRAW)] * len(rows)
        answers = _generate(connection, rows, parameters, logprob_start_len=0, top_logprobs_num=1)
        return [
            _read_scores(connection, number, row, answer)
            for number, (row, answer) in enumerate(zip(rows, answers, strict=True))
        ]


def _generate(
    connection: ServerConnection, prompts: Sequence[Sequence[int]], parameters: list[dict[str, Any]], **wanted: int
) -> list[Any]:
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": parameters,
        "return_logprob": True,
        **wanted,
    }
    answers = connection.post("/generate", body)
    if not isinstance(answers, list) or len(answers) != len(prompts):
        size = len(answers) if isinstance(answers, list) else 1
        raise EngineError(f"{connection.url} gave {size} answers to {len(prompts)} prompts")
    return answers


def _parameters(sampling: Sampling, draws: Sequence[float]) -> dict[str, Any]:
    return {
        "max_new_tokens": len(draws),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": server_seed(draws),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def _read(connection: ServerConnection, number: int, answer: Any) -> ServerAnswer:
    try:
        about = answer["meta_info"]
        scored = about["output_token_logprobs"]
        log_probabilities = [float(each[0]) for each in scored]
        scored_ids = [each[1] for each in scored]
        written = about.get("routed_experts")
        experts = None if written is None else np.frombuffer(base64.b64decode(written, validate=True), np.int32)
        return ServerAnswer(list(answer["output_ids"]), scored_ids, log_probabilities, about["weight_version"], experts)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(
            f"answer {number} of {connection.url} has no output_ids with output_token_logprobs and weight_version "
            f"({error!r}): use a server of SGLang's protocol, 0.5 or later"
        ) from error


def _read_scores(connection: ServerConnection, number: int, row: Sequence[int], answer: Any) -> ServerScores:
    try:
        about = answer["meta_info"]
        entries = zip(row[1:], about["input_token_logprobs"][1:], about["input_top_logprobs"][1:], strict=False)
        tokens = []
        for token_id, (value, reported_id, *_), top in entries:
            # SGLang reports the vocabulary's last id as 0.
            if reported_id not in (token_id, 0):
                raise ValueError(f"token {len(tokens) + 1} is {token_id}, {reported_id} was scored")
            tokens.append(TokenScore(float(value), float(value) >= max(float(each[0]) for each in top)))
        return ServerScores(tokens, about["weight_version"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(
            f"answer {number} of {connection.url} has no input_token_logprobs of its row with input_top_logprobs and "
            f"weight_version ({error!r}): use a server of SGLang's protocol, 0.5 or later"
        ) from error
