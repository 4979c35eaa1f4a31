"""Vectors of short passages, from the middle layer of a packaged text encoder.

The vector is the mean of the hidden states after layer 4 of 6. That layer shows the style of a text better than the
top, which is trained to keep its topic (held-out files of toxicity labels, area under the curve: 0.84 on average, at
the top 0.80). Each passage goes through the model by itself, so that its vector depends on nothing else.

The packaged models are BERTs, and these layers of one are written out here: the values are those of transformers'
BertModel to the last bit, and its import takes a process 3 s, of which each executor has several. Runs in
executors: imports no Spark.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.embedding.embedding_model import CONFIG_FILE, TOKENIZER_FILE, packaged_model
from tasks.data.text.text_encoder import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

NUM_LAYERS = 4
MAX_TOKENS = 128


class BertLayers:
    """The embeddings and the first NUM_LAYERS layers of a BERT, from the files of its directory."""

    def __init__(self, directory: str) -> None:
        from safetensors import safe_open

        with open(f"{directory}/{CONFIG_FILE}", encoding="utf-8") as file:
            config = json.load(file)
        assert config["hidden_act"] == "gelu" and config["position_embedding_type"] == "absolute", config
        self.hidden_size: int = config["hidden_size"]
        self._num_heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        used = ("embeddings.", *(f"encoder.layer.{layer}." for layer in range(NUM_LAYERS)))
        with safe_open(f"{directory}/model.safetensors", "pt") as file:
            self._weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith(used)}  # noqa: SIM118

    def states(self, ids: list[int]) -> torch.Tensor:
        """(tokens, hidden size) of one passage."""
        import torch
        from torch.nn.functional import embedding, gelu, scaled_dot_product_attention

        words, kinds, positions = (
            self._weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type", "position")
        )
        embedded_BTD = embedding(torch.tensor([ids]), words) + kinds[0] + positions[: len(ids)]
        states_BTD = self._normed("embeddings.LayerNorm", embedded_BTD)
        for layer in range(NUM_LAYERS):
            own = f"encoder.layer.{layer}"
            query_BNTH, key_BNTH, value_BNTH = (
                self._linear(f"{own}.attention.self.{name}", states_BTD)
                .unflatten(-1, (self._num_heads, -1))
                .transpose(1, 2)
                for name in ("query", "key", "value")
            )
            mixed_BNTH = scaled_dot_product_attention(query_BNTH, key_BNTH, value_BNTH)
            mixed_BTD = self._linear(f"{own}.attention.output.dense", mixed_BNTH.transpose(1, 2).flatten(2))
            states_BTD = self._normed(f"{own}.attention.output.LayerNorm", mixed_BTD + states_BTD)
            hidden_BTF = gelu(self._linear(f"{own}.intermediate.dense", states_BTD))
            output_BTD = self._linear(f"{own}.output.dense", hidden_BTF)
            states_BTD = self._normed(f"{own}.output.LayerNorm", output_BTD + states_BTD)
        return states_BTD[0]

    def _linear(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import linear

        return linear(inputs, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _normed(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import layer_norm

        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return layer_norm(inputs, (self.hidden_size,), weight, bias, self._epsilon)


def encode_passages(passages: Sequence[str], encoder: str) -> NDArray[np.float64]:
    """Vectors of passages: (passages, hidden size)."""
    import torch

    tokenizer, layers = _opened(encoder)
    vectors = []
    with torch.inference_mode():
        for encoding in tokenizer.encode_batch(list(passages)):
            vectors.append(layers.states(encoding.ids).double().mean(dim=0).numpy())
    return np.stack(vectors) if vectors else np.zeros((0, layers.hidden_size))


@cache
def _opened(encoder: str) -> tuple[Tokenizer, BertLayers]:
    import torch

    torch.set_num_threads(1)  # Spark runs one worker per core, and sums of several threads may differ
    directory = packaged_model(encoder)
    tokenizer = open_tokenizer(str(directory / TOKENIZER_FILE))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer, BertLayers(str(directory))
