"""A registered version as MLflow's pyfunc model: `mlflow.pyfunc.load_model("models:/glm46-tiny@champion").predict(["What is 12 + 7?"])`.

MLflow imports this module by the name in the version's `MLmodel` (model/mlmodel_file.py) and calls `_load_pyfunc`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.chat_template import answer_of, encode, problem_prompt
from model.generation import InProcessEngine, Sampling
from model.hf_checkpoint import CONFIG_FILE, load_model
from model.tokenizer_layout import tokenizer_for_text

if TYPE_CHECKING:
    import pandas as pd

BATCH_SEQUENCES = 8
WEIGHTS_VERSION = "loaded"


class AnsweringModel:
    """Greedy answers: what a chat-trained model says to each prompt as a user's turn, else each prompt's continuation."""

    def __init__(self, checkpoint_dir: Path, config: dict[str, Any]) -> None:
        self.engine = InProcessEngine(load_model(checkpoint_dir), weights_version=WEIGHTS_VERSION, batch_sequences=BATCH_SEQUENCES)
        self.tokenizer = tokenizer_for_text(str(checkpoint_dir / "tokenizer.json"))
        stops = json.loads((checkpoint_dir / CONFIG_FILE).read_text())["eos_token_id"]
        self.sampling = Sampling(max_new_tokens=config["max_new_tokens"], stop_token_ids=tuple(stops))
        self.is_chat_trained: bool = config["is_chat_trained"]
        self.enable_thinking: bool = config["enable_thinking"]

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> list[str]:
        """One answer per row of the one column; `params` is MLflow's, and the signature declares none."""
        prompts = [str(prompt) for prompt in model_input.iloc[:, 0]]
        generation = self.engine.generate([self._token_ids(prompt) for prompt in prompts], self.sampling, WEIGHTS_VERSION)
        if self.is_chat_trained:
            return [answer_of(self.tokenizer.decode(token_ids, skip_special_tokens=False)) for token_ids in generation.token_ids]
        return [self.tokenizer.decode(token_ids) for token_ids in generation.token_ids]

    def _token_ids(self, prompt: str) -> list[int]:
        if not self.is_chat_trained:
            return self.tokenizer.encode(prompt, add_special_tokens=False).ids
        token_ids, _ = encode(self.tokenizer, problem_prompt(prompt, self.enable_thinking))
        return token_ids


def _load_pyfunc(path: str, config: dict[str, Any]) -> AnsweringModel:
    return AnsweringModel(Path(path), config)
