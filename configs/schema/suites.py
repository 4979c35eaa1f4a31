"""A suite of benchmarks, as one YAML below configs/suites/ states it: what `glm46 eval` asks, and in which form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Frozen


class FewShot(Frozen):
    """Answered examples before every question."""

    file: str
    """Where they come from, relative to the data directory. In the benchmark's own file the asked item is left out."""
    num_examples: int = Field(gt=0)
    group: str
    """Field in which an example must equal the asked item, as `subject`; empty where any record will do."""


class LikelihoodBenchmark(Frozen):
    """Asks how probable given texts are; nothing is generated."""

    name: str
    kind: Literal["choice", "lettered_choice", "context_choice", "last_word", "text"]
    """choice: which choice continues the question. lettered_choice: the choices are listed, which letter follows.
    context_choice: after which context is the ending likelier. last_word: is the word the greedy continuation.
    text: bits per byte of whole texts."""
    file: str
    """Relative to the data directory; its role must be `evaluation`."""
    few_shot: FewShot | None
    """null asks without examples."""


class AnswerBenchmark(Frozen):
    """Generates greedily and judges what was written."""

    name: str
    kind: Literal["math", "exact", "constraints", "completed_program", "program", "refusal", "over_refusal"]
    """math: a final answer. exact: the text itself. constraints: IFEval's instructions. completed_program: the rest of
    a function, judged by its tests in the sandbox. program: a whole program, likewise. refusal: harmful requests, to be
    declined. over_refusal: harmless ones, to be answered. Both read one file and leave out each other's records."""
    file: str
    few_shot: FewShot | None
    is_chat: bool
    """Whether the question is a user's message in the chat template; else its text is continued."""
    max_new_tokens: int = Field(gt=0)
    until: list[str]
    """Texts that end an answer and are no part of it; an end-of-answer token always does."""

    @model_validator(mode="after")
    def _chats_have_no_examples(self) -> AnswerBenchmark:
        if self.is_chat and self.few_shot is not None:
            raise ValueError(f"benchmark {self.name}: few_shot must be null where is_chat is true")
        return self


Benchmark = Annotated[LikelihoodBenchmark | AnswerBenchmark, Field(discriminator="kind")]


class Suite(Frozen):
    description: str
    sequence_length: int = Field(gt=1)
    """Tokens of the longest row; a longer context loses its beginning. A model with fewer positions sets its own."""
    batch_sequences: int = Field(gt=0)
    """Rows that are computed at once; results do not depend on it beyond rounding."""
    dtype: Literal["float32", "bfloat16"]
    """Arithmetic of a checkpoint that is evaluated in this process."""
    enable_thinking: bool
    """Whether chats let the model reason first."""
    timeout_seconds: float = Field(gt=0)
    """How long a server may take for one request."""
    benchmarks: list[Benchmark] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Suite:
        names = [benchmark.name for benchmark in self.benchmarks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"benchmarks {', '.join(twice)} occur twice: give each a name of its own")
        return self
