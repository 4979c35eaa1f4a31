"""Verified problems, variations of seed problems, and the traces of a teacher."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen

ReasoningFamily = Literal["brackets", "equations", "systems", "quadratics", "logic", "code"]
"""Kinds of verified problems besides arithmetic: tasks/data/problems/reasoning_families.py."""


EnvironmentName = Literal["calculator", "python", "search", "retail"]
"""Environments that have generated tasks: tasks/data/environments/."""


class SynthesisRecipe(Frozen):
    num_training_problems: int = Field(gt=0)
    """Of arithmetic, in documents; `families` adds others (S0: 1,000,000 in all)."""
    num_evaluation_problems: int = Field(gt=0)
    """Of arithmetic: what checkpoints are asked."""
    families: dict[ReasoningFamily, int]
    """Problems of each family in documents, with their reasoning; of these the share num_chats / num_training_problems
    are also conversations."""
    difficulty: int = Field(ge=1, le=5)
    """Difficulty of the families' problems: it sets the size of numbers and how many steps, people or conditions a
    problem has."""
    num_held_out_problems: int = Field(ge=0)
    """Problems of each family from the part that is never trained on: held_out.parquet, protected by
    decontamination."""
    prompt_families: tuple[Literal["brackets", "equations", "systems", "quadratics", "logic"], ...]
    """Families that also give num_prompts prompts of reinforcement learning; their answer is a short text that is
    compared."""
    operations: tuple[Literal["+", "-", "*"], ...] = Field(min_length=1)
    max_operand: int = Field(ge=20, le=1_000_000_000)
    """Largest operand, so that products fit 64 bits; the operand pairs are divided between training and evaluation by
    hash."""
    problems_per_document: int = Field(gt=0)
    num_chats: int = Field(ge=0)
    """Training problems that are also written as conversations, for SFT; 0 trains on no conversation of ours."""
    thinking_share: float = Field(ge=0, le=1)
    """Share of these conversations whose answer is reasoned in <think>; the others are asked with /nothink (report: SFT
    mixes both)."""
    worked_share: float = Field(ge=0, le=1)
    """Share of the arithmetic conversations with reasoning that work the problem out by digits, as documents do; in the
    others the reasoning is the equation. Both are right, only one shows how: the difference is what reinforcement
    learning finds."""
    num_prompts: int = Field(gt=0)
    """Further training problems, in no document and no conversation: the prompts of reinforcement learning."""
    tasks: dict[EnvironmentName, int]
    """Tasks of each environment that are prompts of reinforcement learning, domain agentic. Those of python need a
    sandbox."""
    num_evaluation_tasks: int = Field(ge=0)
    """Held-out tasks of each of these environments that evaluation plays (evaluation.recipe.tasks); none is trained on.
    0: none."""
    num_task_chats: int = Field(ge=0)
    """Further tasks of each of these environments that are solved in conversations, for SFT: a model that was never
    shown a call makes none."""
    num_safety_chats: int = Field(ge=0)
    """Conversations about requests that must be declined and harmless ones like them, half of each, for SFT; 0 teaches
    no refusal."""
    num_safety_prompts: int = Field(ge=0)
    """Further such requests, the prompts of rl_alignment (domain safety). Those that evaluation asks have other
    templates (tasks/data/problems/safety_requests.py)."""

    @model_validator(mode="after")
    def _chats_are_training_problems(self) -> Self:
        if self.num_chats > self.num_training_problems:
            raise ValueError(
                f"num_chats ({self.num_chats}) must not exceed num_training_problems ({self.num_training_problems})"
            )
        unknown = sorted(set(self.prompt_families) - set(self.families))
        if unknown:
            raise ValueError(
                f"prompt_families names {unknown[0]}, families ({', '.join(self.families)}) does not: add it there"
            )
        return self


class PromptRecipe(Frozen):
    """Prompts of reinforcement learning from files of role `prompts` and about documents, beside the generated ones."""

    max_per_collection: int = Field(gt=0)
    """Most prompts of one collection, those of smallest hash; the others are dropped, reason `collection_full`."""
    max_prompt_chars: int = Field(gt=0)
    """A longer prompt is dropped, reason `too_long`. A phase leaves out what is too long for its own window."""
    num_document_searches: int = Field(ge=0)
    """Most tasks of the environment search about the run's own documents, domain agentic: at most one about each
    training document of a sample of this size (tasks/data/prompts/document_searches.py). 0: none."""


class PassageRecipe(Frozen):
    """A sample of documents of which each gives a passage. Made by `DataRecipe.passage_sample`."""

    num_documents: int = Field(gt=0)


class SeedVariationRecipe(Frozen):
    """Seed problems with annotated calculations, rewritten with other numbers (tasks/data/seeds/seed_variations.py)."""

    per_seed: int = Field(ge=0)
    """Conversations at most of each seed; some have fewer numbers that keep the story sensible. 0: none."""


class TeacherRequest(Frozen):
    """What a teacher is asked. An empty base_url means no teacher: request_traces does not run."""

    base_url: str
    """URL of an OpenAI-compatible server, http:// or https://, with /v1. Its key comes from GLM46_TEACHER_API_KEY and
    must not be here."""
    model: str
    num_seeds: int = Field(gt=0)
    """Problems with role `prompts` that are asked, those of smallest hash."""
    temperature: float = Field(ge=0)
    max_tokens: int = Field(gt=0)
    """Most tokens of one answer; a longer one is dropped, reason `cut_off`."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.base_url and not re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", self.base_url):
            raise ValueError(
                "teacher.request: base_url must be http:// or https:// with a host and no password, as in "
                "http://127.0.0.1:8000/v1; the "
                "key comes from GLM46_TEACHER_API_KEY"
            )
        if self.base_url and not self.model:
            raise ValueError(
                f"teacher.request: base_url is {self.base_url} and model is empty: name the model, as the server "
                f"lists it"
            )
        return self


class TeacherLimits(Frozen):
    """How a teacher is asked: none of it changes what is asked."""

    num_parallel: int = Field(gt=0)
    requests_per_minute: int = Field(gt=0)
    tokens_per_minute: int = Field(gt=0)
    max_attempts: int = Field(gt=0)
    first_delay_seconds: float = Field(gt=0)
    """Wait before the second attempt; doubled before each further one, up to a minute. A server's Retry-After overrides
    it."""
    timeout_seconds: float = Field(gt=0)
    price_per_million_prompt_tokens: float = Field(ge=0)
    price_per_million_completion_tokens: float = Field(ge=0)
    max_cost: float = Field(gt=0)
    """Most that requests may cost at these prices; then the run stops and keeps the answers so far."""


class TeacherRecipe(Frozen):
    """Reasoning traces for seed problems, kept where they verify."""

    request: TeacherRequest
    limits: TeacherLimits
