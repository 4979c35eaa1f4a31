"""The record of a trained phase: its weights, their tokenizer, and what later steps need to know of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from infra.step import Record, digest_of
from model.text.chat_template import CHAT_TEMPLATE

WEIGHTS_SUFFIX = ".safetensors"
OF_PAIRS = ("dpo", "reward")
"""Objectives whose loss is that of a preference pair, not of a token."""
CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_KEY = "chat_template.jinja", "chat_template"


class TrainedCheckpoint(Record):
    """The record of a phase's checkpoint."""

    phase: str
    objective: str
    num_steps: int
    num_tokens: int
    """Of this phase."""
    course: str
    course_tokens: int
    """Position on the course where it ended."""
    lm_loss: float | None
    """Of the last step's batch; None for imported weights, as are the next two. Of a policy objective the surrogate's
    gradient as a weighted cross-entropy: no measure of the model."""
    mtp_loss: float | None
    balance_loss: float | None
    num_parameters: int
    mean_reward: float | None
    """Over the last tenth of a policy objective's steps."""
    num_long_prompts: int = 0
    """Prompts of a policy objective that were left out: they leave no room for an answer in the window."""
    num_easy_prompts: int = 0
    """Prompts whose pass rate was above what objective.difficulty wants: never asked."""
    num_hard_prompts: int = 0
    """Prompts whose pass rate was below it: never asked."""
    num_rollbacks: int
    """Spikes after which training went back and left rows out."""
    unreached_tensors: tuple[str, ...] = ()
    """Trainable tensors that no gradient reached on the course so far: experts without a token, or an error."""
    merge_error: float | None = None
    """Largest difference of a logit between the weights with the adapter merged in and beside it, as a share of the
    largest logit (merge_check.py); None where the phase trained all weights."""
    validation_bits_per_byte: dict[str, float]
    """By domain, of the weights that the phase left, as measured while it trained; empty where nothing was measured."""
    is_chat_trained: bool
    """Whether this phase or one before it trained on conversations; only then hf/ holds the chat template."""
    chat_template_digest: str
    """sha256 of the template's text."""
    tokenizer_digest: str
    special_token_ids: dict[str, int]
    export_digest: str
    """sha256 over the names and bytes of hf/."""

    @property
    def shown(self) -> dict[str, object]:
        """Of a policy the reward in place of the losses, which are its surrogate's; a loss of pairs is named so."""
        values = dict(self)
        if self.mean_reward is not None:
            first = ("num_steps", "num_tokens", "mean_reward")
            losses = ("lm_loss", "mtp_loss", "balance_loss")
            return {name: values[name] for name in (*first, *(each for each in values if each not in losses))}
        if self.objective in OF_PAIRS:
            return {"pair_loss" if name == "lm_loss" else name: value for name, value in values.items()}
        return values


def chat_template_digest() -> str:
    return hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()


def weights_sha256(hashes: Mapping[str, str]) -> str:
    """One digest of a model's weights, of the sha256 of each file of its directory: equal for equal files of weights,
    whatever else is there."""
    return digest_of({name: sha256 for name, sha256 in hashes.items() if name.endswith(WEIGHTS_SUFFIX)})
