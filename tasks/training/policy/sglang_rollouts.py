"""SGLang's protocol: `/update_weights_from_disk` under the name of a version, `/generate` for all prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.generation.generation import Sampling
from tasks.training.policy.rollout_connection import EngineError, ServerAnswer, ServerConnection, server_seed


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
        answers = connection.post(
            "/generate",
            {
                "input_ids": [list(prompt) for prompt in prompts],
                "sampling_params": [_parameters(sampling, own) for own in draws],
                "return_logprob": True,
            },
        )
        if not isinstance(answers, list) or len(answers) != len(prompts):
            size = len(answers) if isinstance(answers, list) else 1
            raise EngineError(f"{connection.url} gave {size} answers to {len(prompts)} prompts")
        return [_read(connection, number, answer) for number, answer in enumerate(answers)]


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
        return ServerAnswer(list(answer["output_ids"]), scored_ids, log_probabilities, about["weight_version"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(
            f"answer {number} of {connection.url} has no output_ids with output_token_logprobs and weight_version "
            f"({error!r}): use a server of SGLang's protocol, 0.5 or later"
        ) from error
