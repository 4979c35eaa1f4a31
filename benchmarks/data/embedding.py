"""Vectors by an encoder of MiniLM's size, on one core: python -m benchmarks.data.embedding [--write]

Ours sends each document's passage through the model alone, so that no neighbour moves a bit of its vector; the peer is
what model cards show, transformers in padded batches with a mask, sorted by length as sentence-transformers does. Both
read the first 256 tokens, in CPU seconds of one thread, in turn. The weights are random (none can be downloaded here),
which costs as much as trained ones. Documents/s with the four passages of the recipes come beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModel, BertConfig, BertModel

from benchmarks.data.filters import english_texts
from benchmarks.results import report
from tasks.data.embedding.embedding_model import EmbeddingModel, directory_digest, encode

NUM_DOCUMENTS, BATCH_DOCUMENTS, NUM_ROUNDS = 64, 32, 2
PASSAGE_TOKENS, MAX_PASSAGES, MIN_WORDS = 256, 4, 1
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def save_model(directory: Path, texts: list[str]) -> int:
    """MiniLM-L6's shape with random weights, and a word-piece tokenizer learned from the texts; number of
    parameters."""
    torch.manual_seed(46)
    encoder = BertModel(
        BertConfig(
            vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
    )
    encoder.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=30522, special_tokens=SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return sum(parameter.numel() for parameter in encoder.parameters())


def in_padded_batches(texts: list[str], directory: Path) -> Callable[[], np.ndarray]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(PASSAGE_TOKENS)
    tokenizer.enable_padding()
    encoder = AutoModel.from_pretrained(directory).eval()
    order = np.argsort([-len(text) for text in texts])

    def run() -> np.ndarray:
        vectors = np.zeros((len(texts), encoder.config.hidden_size))
        with torch.inference_mode():
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                indices = order[start : start + BATCH_DOCUMENTS]
                encoded = tokenizer.encode_batch([texts[index] for index in indices])
                mask = torch.tensor([item.attention_mask for item in encoded])
                states = encoder(
                    input_ids=torch.tensor([item.ids for item in encoded]), attention_mask=mask
                ).last_hidden_state
                vectors[indices] = ((states * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)).numpy()
        return vectors

    return run


def timed(run: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """What it gives, and CPU seconds."""
    started = time.process_time()
    return run(), time.process_time() - started


def main() -> None:
    torch.set_num_threads(1)
    texts = english_texts()[:NUM_DOCUMENTS]
    with tempfile.TemporaryDirectory() as directory:
        num_parameters = save_model(Path(directory), texts)
        model = EmbeddingModel(directory, directory_digest(Path(directory)), PASSAGE_TOKENS, 1, MIN_WORDS)
        whole = EmbeddingModel(directory, model.sha256, PASSAGE_TOKENS, MAX_PASSAGES, MIN_WORDS)
        peer = in_padded_batches(texts, Path(directory))
        for warmed in (model, whole):
            encode(texts[:1], warmed)
        rounds = [(timed(lambda: encode(texts, model)), timed(peer)) for _ in range(NUM_ROUNDS)]
        (ours, our_seconds), (theirs, their_seconds) = (
            min(side, key=lambda run: run[1]) for side in zip(*rounds, strict=True)
        )
        _, whole_seconds = timed(lambda: encode(texts, whole))
    products = np.einsum("nd,nd->n", ours, theirs) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    print(
        f"ours: {len(texts) / our_seconds:.2f} documents/s\ntransformers: {len(texts) / their_seconds:.2f} documents/s"
    )
    report(
        "embedding",
        ours=len(texts) / our_seconds,
        peer=len(texts) / their_seconds,
        unit="documents/s per core, first 256 tokens",
        documents_per_second_four_passages=round(len(texts) / whole_seconds, 3),
        min_cosine_with_peer=round(float(products.min()), 6),
        num_parameters=num_parameters,
        num_documents=len(texts),
        megabytes=round(sum(len(text.encode()) for text in texts) / 1e6, 3),
    )


if __name__ == "__main__":
    main()
