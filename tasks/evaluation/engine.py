"""The engine protocol that rollouts, evaluation, chat and smoke tests share; the in-process engine and its
tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from model.text.tokenizer_layout import END_OF_TEXT, END_TOKENS, tokenizer_for_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from model.generation.continuation_scores import ContinuationScore, Pair
    from model.generation.generation import Generation, InProcessEngine, Sampling


class Continued(Protocol):
    """What an engine continued; `Continuations` has nothing else."""

    @property
    def token_ids(self) -> list[list[int]]: ...

    @property
    def log_probabilities(self) -> list[list[float]]: ...


@dataclass(frozen=True)
class Continuations:
    """One entry per prompt, each as long as its continuation; a stop token that ended one is its last token."""

    token_ids: list[list[int]]
    log_probabilities: list[list[float]]
    """Natural logarithms under the model itself, whatever the sampling."""

    @classmethod
    def up_to_stops(
        cls, rows: Sequence[tuple[Sequence[int], Sequence[float]]], stop_token_ids: Sequence[int]
    ) -> Continuations:
        """Of tokens and their log-probabilities, which may go on after a stop token."""
        lengths = [
            next((number for number, token in enumerate(token_ids, 1) if token in stop_token_ids), len(token_ids))
            for token_ids, _ in rows
        ]
        return cls(
            [list(token_ids[:size]) for (token_ids, _), size in zip(rows, lengths, strict=True)],
            [list(scores[:size]) for (_, scores), size in zip(rows, lengths, strict=True)],
        )


class AnsweringEngine(Protocol):
    """Continues prompts: what a figure of generated answers asks of an engine."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, weights_version: str) -> Continued:
        """Continue every prompt; refuses weights other than the ones it holds."""
        ...


class PlayingEngine(Protocol):
    """Continues rows turn by turn: what tasks in environments ask of an engine."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        weights_version: str,
        draws: Sequence[Sequence[float]],
    ) -> Generation:
        """Continue each prompt by as many tokens at most as it has draws."""
        ...


class ScoringEngine(AnsweringEngine, Protocol):
    """Also scores given continuations: what questions by likelihood ask of an engine."""

    def score_continuations(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """Log-probability of every continuation after its context, and whether it is the greedy one."""
        ...


class Engine(Protocol):
    """Computes token ids and log-probabilities from token ids, with weights of a named version."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, weights_version: str) -> Generation:
        """Continue every prompt; refuses weights other than the ones it holds."""
        ...

    def score(self, token_id_sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural log-probability of every token after the first, given those before it."""
        ...

    def score_continuations(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """Log-probability of every continuation after its context, and whether it is the greedy one."""
        ...


def load_engine(
    checkpoint_dir: Path,
    *,
    weights_version: str,
    batch_sequences: int,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> InProcessEngine:
    """An engine of this process for a Hugging Face directory. `weights_version` is the digest that callers must ask
    for. Raises ValueError where the process has no such device."""
    import torch

    from model.device import open_device
    from model.formats.hf_checkpoint import load_model
    from model.generation.generation import InProcessEngine

    model = load_model(checkpoint_dir, device=open_device(device), dtype=getattr(torch, dtype))
    return InProcessEngine(model, weights_version=weights_version, batch_sequences=batch_sequences)


def load_tokenizer(tokenizer_path: Path) -> Tokenizer:
    """A tokenizer that takes special tokens in a text for plain characters, as the shards were written."""
    return tokenizer_for_text(str(tokenizer_path))


@contextmanager
def reproducible_arithmetic(num_threads: int) -> Iterator[None]:
    """A fixed number of torch threads, deterministic algorithms and the training's products within the block; what was
    set before comes back after it."""
    import torch

    from model.kernels.cpu_products import onednn_products

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    try:
        with onednn_products():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token. Raises ValueError when the tokenizer has none of that name."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"the checkpoint's tokenizer.json has no token {token}: export the checkpoint with the tokenizer it was "
            f"trained with"
        )
    return token_id


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end an answer."""
    return tuple(special_token_id(tokenizer, token) for token in END_TOKENS)


def document_token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens with end-of-text before them: documents follow one another that way in training."""
    return [special_token_id(tokenizer, END_OF_TEXT), *tokenizer.encode(text, add_special_tokens=False).ids]
