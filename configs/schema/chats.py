"""Conversations, and the decontamination that they share with documents."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.deduplication import DeduplicationRecipe
from configs.schema.filtering import PersonalDataRecipe


class ChatRecipe(Frozen):
    """Conversations from the sources with role `sft`, besides those of the verified problems."""

    max_chat_chars: int = Field(gt=0)
    """A longer conversation is dropped, reason `too_long`: cut, it would teach to answer without the question."""
    max_rejected_share: float = Field(ge=0, le=1)
    """Share of malformed conversations (unknown role, tool result without a call, no answer) above which the run stops
    and names them."""
    max_per_collection: int = Field(gt=0)
    """About this many conversations of one collection stay, chosen by hash; the others are dropped, reason
    `collection_full`. One set of ten thousand problems would otherwise leave the rest no share of a short phase."""
    validation_share: float = Field(ge=0, lt=1)
    """Share of conversations held out, by a hash of the record they come from: a seed and its variations stay together,
    and so do near-duplicates by deduplicate.threshold."""


class PreferenceRecipe(Frozen):
    """Preference pairs from the sources with role `preference`, or of verified problems where there is no such
    source."""

    max_pair_chars: int = Field(gt=0)
    """A longer pair (its prompt and both answers) is dropped, reason `too_long`."""
    max_rejected_share: float = Field(ge=0, le=1)
    """Share of malformed pairs (no shared prompt, equal answers, no answer) above which the run stops and names
    them."""
    max_per_collection: int = Field(gt=0)
    """About this many pairs of one collection stay, chosen by the hash of their prompt."""
    validation_share: float = Field(gt=0, lt=1)
    """Share of pairs that are measured while a phase trains, by the hash of their prompt; near-duplicates stay
    together."""
    test_share: float = Field(gt=0, lt=1)
    """Share that gates judge by, likewise. Pairs of verified problems are judged by unseen prompts instead."""

    @model_validator(mode="after")
    def _leaves_pairs_to_train_on(self) -> Self:
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                f"validation_share ({self.validation_share}) and test_share ({self.test_share}) leave no pair to train "
                f"on: lower them"
            )
        return self


class DecontaminationRecipe(Frozen):
    ngram_size: int = Field(gt=0)
    """Normalised words per n-gram; one shared n-gram with an evaluation item drops a document (GPT-3: 13)."""
    code_ngram_size: int = Field(gt=0)
    """The same for program text in items: solutions, added lines of a change, tracebacks. Honest programs share shorter
    runs."""
    max_items_per_run: int = Field(gt=0)
    """A run of words that more items share is the benchmark's instruction and proves no overlap."""
    max_documents_per_run: int = Field(gt=0)
    """A run that more documents hold is a common phrase and drops none (GPT-3: 10). A run of evaluated arithmetic never
    counts as common."""

    @model_validator(mode="after")
    def _programs_need_longer_runs(self) -> Self:
        if self.code_ngram_size < self.ngram_size:
            raise ValueError(
                f"code_ngram_size ({self.code_ngram_size}) must be at least ngram_size ({self.ngram_size})"
            )
        return self


class ChatCollectionRecipe(Frozen):
    """What decides which conversations are kept. Made by `DataRecipe.chat_collection`."""

    chats: ChatRecipe
    personal_data: PersonalDataRecipe
    deduplicate: DeduplicationRecipe
    """Decides which conversations are near-duplicates, so that they are held out together."""
    decontaminate: DecontaminationRecipe


class PreferenceCollectionRecipe(Frozen):
    """What decides which preference pairs are kept. Made by `DataRecipe.preference_collection`."""

    preferences: PreferenceRecipe
    personal_data: PersonalDataRecipe
    deduplicate: DeduplicationRecipe
    """Decides which pairs have nearly the same conversation, so that they are in one part of the split."""
    decontaminate: DecontaminationRecipe
