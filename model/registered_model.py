"""A registered version as MLflow's pyfunc model.

    mlflow.pyfunc.load_model("models:/glm46-tiny@champion").predict(["What is 12 + 7?"])
    mlflow.pyfunc.load_model(..., model_config={"device": "cuda", "dtype": "bfloat16"})

MLflow imports this module, or the copy of it that the version carries, by the name in the version's `MLmodel`
(infra/registry/model_package.py), and calls `_load_pyfunc`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.device import open_device
from model.formats.hf_checkpoint import CONFIG_FILE, load_model
from model.generation.generation import InProcessEngine, Sampling
from model.text.chat_template import answer_of, encode, problem_prompt
from model.text.tokenizer_layout import tokenizer_for_text

if TYPE_CHECKING:
    import pandas as pd

BATCH_SEQUENCES = 8
WEIGHTS_VERSION = "loaded"


class AnsweringModel:
    """Answers greedily: a chat-trained model answers each prompt as a user's turn, others continue it."""

    def __init__(self, checkpoint_dir: Path, config: dict[str, Any]) -> None:
        model = load_model(checkpoint_dir, device=open_device(config["device"]), dtype=getattr(torch, config["dtype"]))
        self.engine = InProcessEngine(model, weights_version=WEIGHTS_VERSION, batch_sequences=BATCH_SEQUENCES)
        self.tokenizer = tokenizer_for_text(str(checkpoint_dir / "tokenizer.json"))
        stops = json.loads((checkpoint_dir / CONFIG_FILE).read_text())["eos_token_id"]
        self.sampling = Sampling(
            max_new_tokens=config["max_new_tokens"], stop_token_ids=(stops,) if isinstance(stops, int) else tuple(stops)
        )
        self.is_chat_trained: bool = config["is_chat_trained"]
        self.enable_thinking: bool = config["enable_thinking"]
        self.max_prompt_tokens = self.engine.model.recipe.max_position_embeddings - self.sampling.max_new_tokens

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Columns `answer` and `error`, one row per prompt: a prompt that cannot be answered has an error, and the
        others still have their answers.

        Prompts are in the first column. MLflow drops the other columns and `params`, as the signature does not name
        them.
        """
        import pandas as pd

        prompts = list(model_input.iloc[:, 0])
        token_ids = [self._token_ids(prompt) if isinstance(prompt, str) else [] for prompt in prompts]
        errors = [self._error(prompt, ids) for prompt, ids in zip(prompts, token_ids, strict=True)]
        generation = self.engine.generate(
            [ids for ids, error in zip(token_ids, errors, strict=True) if not error], self.sampling, WEIGHTS_VERSION
        )
        answers = iter(generation.token_ids)
        return pd.DataFrame(
            {"answer": ["" if error else self._text(next(answers)) for error in errors], "error": errors}
        )

    def _error(self, prompt: object, token_ids: list[int]) -> str:
        if not isinstance(prompt, str):
            return f"a prompt is text, this is {type(prompt).__name__}"
        if not prompt.strip():
            return "the prompt is empty"
        if len(token_ids) > self.max_prompt_tokens:
            return f"the prompt has {len(token_ids)} tokens, at most {self.max_prompt_tokens} leave room for an answer"
        return ""

    def _token_ids(self, prompt: str) -> list[int]:
        if not self.is_chat_trained:
            return self.tokenizer.encode(prompt, add_special_tokens=False).ids
        token_ids, _ = encode(self.tokenizer, problem_prompt(prompt, self.enable_thinking))
        return token_ids

    def _text(self, token_ids: list[int]) -> str:
        if self.is_chat_trained:
            return answer_of(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        return self.tokenizer.decode(token_ids)


def _load_pyfunc(path: str, config: dict[str, Any]) -> AnsweringModel:
    return AnsweringModel(Path(path), config)
