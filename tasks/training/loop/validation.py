"""Measures bits per byte of held-out documents while a phase trains, per domain.

Every document is scored from an end-of-text token before it, as evaluation does
(tasks/evaluation/document_scores.py). Attention stays inside documents. A row that ends inside a document cuts it
there: what follows has no context. Ranks divide the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from configs.files.block_reader import BlockReader
from model.architecture.losses import IGNORED
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.data.shards.stored_shard import StoredShard, open_shards
from tasks.training.loop.training_step import sum_losses
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.sequence_parallel import own_parts
from tasks.training.parallel.trainable import Trainable
from tasks.training.state.job import TrainingJob
from tasks.training.state.measurements import Measurement

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class HeldOutRows:
    """The documents of one domain in rows of T positions; the last row is filled up with positions that are not
    scored."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    segments_BT: np.ndarray
    num_bytes: int
    num_tokens: int
    """Scored."""


class HeldOut:
    """The held-out rows of a job, per domain."""

    def __init__(self, job: TrainingJob) -> None:
        """Raises ValueError where a domain has no text to score."""
        num_bytes = bytes_per_token(Path(job.tokenizer_path))
        self._num_sequences = job.resources.micro_batch_sequences
        with BlockReader() as blocks:
            shards = open_shards(job.validation, blocks)
            self.domains = {
                domain: _read_domain(
                    [shards[name] for name, other in sorted(job.validation_domains.items()) if other == domain],
                    domain,
                    job,
                    num_bytes,
                )
                for domain in sorted(set(job.validation_domains.values()))
            }

    def measure(self, trainable: Trainable, step: int) -> Measurement:
        """All ranks call it and get the same numbers; weights, moments and random state stay as they are."""
        axis = trainable.ranks.data
        sums = sum_losses(
            trainable,
            [
                own_parts(self._batches(rows, axis.rank, axis.size, trainable.device), trainable.ranks)
                for rows in self.domains.values()
            ],
        )
        nats = dict(zip(self.domains, sums, strict=True))
        return Measurement(
            step=step,
            bits_per_byte={
                domain: nats[domain] / math.log(2) / rows.num_bytes for domain, rows in self.domains.items()
            },
            nats_per_token={domain: nats[domain] / rows.num_tokens for domain, rows in self.domains.items()},
        )

    def _batches(self, rows: HeldOutRows, rank: int, num_ranks: int, device: torch.device) -> Iterator[MicroBatch]:
        """This rank's rows. Every rank gets the same number: gathers and exchanges of a forward pass are collective."""
        per_rank = -(-len(rows.tokens_BT) // num_ranks)
        for first in range(rank * per_rank, (rank + 1) * per_rank, self._num_sequences):
            stop = min(first + self._num_sequences, (rank + 1) * per_rank)
            yield MicroBatch(
                *(
                    torch.as_tensor(_filled_up(values[first:stop], stop - first, gap), device=device)
                    for values, gap in ((rows.tokens_BT, 0), (rows.targets_BT, IGNORED), (rows.segments_BT, NO_SEGMENT))
                ),
                is_segmented=True,
                has_gaps=stop > len(rows.segments_BT) or bool((rows.segments_BT[first:stop] == NO_SEGMENT).any()),
            )


def pack_held_out(documents: Sequence[np.ndarray], sequence_length: int, num_bytes: np.ndarray) -> HeldOutRows:
    """Documents one after the other in rows, each after an end-of-text token; every token but that one is scored."""
    tokens = np.concatenate([document[:-1] for document in documents]) if documents else np.zeros(0, np.int64)
    targets = np.concatenate([document[1:] for document in documents]) if documents else np.zeros(0, np.int64)
    segments = np.repeat(np.arange(len(documents)), [len(document) - 1 for document in documents])
    num_rows = -(-len(tokens) // sequence_length)
    shape = (num_rows, sequence_length)
    return HeldOutRows(
        *(
            _filled_up(values, num_rows * sequence_length, gap).reshape(shape)
            for values, gap in ((tokens, 0), (targets, IGNORED), (segments, NO_SEGMENT))
        ),
        num_bytes=int(num_bytes[targets].sum()),
        num_tokens=len(targets),
    )


def bytes_per_token(tokenizer_path: Path) -> np.ndarray:
    """UTF-8 bytes of each id's text, 0 for special tokens: a character of a byte-level vocabulary is one byte of the
    text."""
    description = json.loads(tokenizer_path.read_text())
    vocabulary: Mapping[str, int] = description["model"]["vocab"]
    added = {entry["id"] for entry in description["added_tokens"]}
    lengths = np.zeros(max([*vocabulary.values(), *added]) + 1, dtype=np.int64)
    for token, token_id in vocabulary.items():
        lengths[token_id] = 0 if token_id in added else len(token)
    return lengths


def _read_domain(shards: list[StoredShard], domain: str, job: TrainingJob, num_bytes: np.ndarray) -> HeldOutRows:
    recipe = job.recipe
    documents = _documents(shards, recipe.validation.num_tokens, job.pad_token_id)
    highest = max((int(document.max()) for document in documents), default=0)
    if highest >= min(recipe.model.vocab_size, len(num_bytes)):
        raise ValueError(
            f"the held-out shards of domain {domain} hold token id {highest}, the tokenizer has {len(num_bytes)} ids "
            f"and the model {recipe.model.vocab_size} rows: they come from another tokenizer; shard the documents again"
        )
    rows = pack_held_out(documents, recipe.sequence_length, num_bytes)
    if not rows.num_bytes:
        addresses = ", ".join(shard.file.uri for shard in shards)
        raise ValueError(f"phase {recipe.phase}: no held-out text of domain {domain} in {addresses}")
    return rows


def _documents(shards: Sequence[StoredShard], max_tokens: int, end_of_text_id: int) -> list[np.ndarray]:
    """The first documents of these shards until `max_tokens` tokens are scored; the last one is cut there. The
    end-of-text token that closes a document in its shard is put before it instead."""
    documents: list[np.ndarray] = []
    left = max_tokens
    for shard in shards:
        for number in range(shard.header.num_sequences):
            text = shard.sequence(number).astype(np.int64)
            text = text[text != end_of_text_id][:left]
            if len(text):
                documents.append(np.concatenate([np.array([end_of_text_id]), text]))
            left -= len(text)
            if not left:
                return documents
    return documents


def _filled_up(values: np.ndarray, length: int, gap: int) -> np.ndarray:
    """`values` and then `gap`, up to this length along the first axis."""
    filled = np.full((length, *values.shape[1:]), gap, dtype=np.int64)
    filled[: len(values)] = values
    return filled
