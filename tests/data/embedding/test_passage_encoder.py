"""Vectors of passages: against transformers' hidden states."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from tasks.data.embedding.embedding_model import PACKAGED_MODELS, packaged_model
from tasks.data.embedding.passage_encoder import MAX_TOKENS, NUM_LAYERS, encode_passages
from tests.support.data_inputs import prose

PASSAGES = ["A short one.", "", "Été in 中文 and русский, 12 + 7 = 19!", prose(0, 60), prose(1, 400)]


def test_vectors_are_the_mean_of_transformers_hidden_states():
    for name in PACKAGED_MODELS:
        directory = packaged_model(name)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
        vectors = encode_passages(PASSAGES, name)
        for passage, vector in zip(PASSAGES, vectors, strict=True):
            ids = tokenizer(passage, truncation=True, max_length=MAX_TOKENS, return_tensors="pt").input_ids
            with torch.inference_mode():
                states_TD = model(input_ids=ids, output_hidden_states=True).hidden_states[NUM_LAYERS][0]
            assert np.array_equal(vector, states_TD.double().mean(dim=0).numpy())
        assert encode_passages([], name).shape == (0, model.config.hidden_size)
