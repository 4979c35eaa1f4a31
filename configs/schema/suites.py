"""A suite of benchmarks, as one YAML below configs/suites/ states it: what `glm46 eval` asks, and in which form."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Frozen

HUB = "hf://"
MAX_NAME = 100
NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}")
"""Of a benchmark: MLflow takes no other characters in the alias of its anchor."""
MIN_RETRIEVAL_CHARS = 80
"""Characters of a document that one sentence with a code needs."""


class FewShot(Frozen):
    """Answered examples before every question."""

    file: str
    """Where they come from, named as a benchmark's file. In the benchmark's own file the asked item is left out."""
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
    """Relative to the data directory; its role must be `evaluation`. Or a file of a dataset of the Hugging Face Hub,
    `hf://owner/name[@revision]/file`, of its test or validation split: needs no data directory, but a network. A glob
    (`ceval/val/*.csv`) names several files: each has a figure of its own, and `subject` is what its name says besides
    the split, where a record has no such field."""
    few_shot: FewShot | None
    """null asks without examples."""

    @property
    def file_names(self) -> set[str]:
        """Files that its items and examples come from."""
        return {self.file} | ({self.few_shot.file} if self.few_shot is not None else set())


class AnswerBenchmark(Frozen):
    """Generates and judges what was written."""

    name: str
    kind: Literal[
        "math",
        "math_with_python",
        "exact",
        "constraints",
        "completed_program",
        "program",
        "tools",
        "patch",
        "refusal",
        "over_refusal",
    ]
    """math: a final answer. math_with_python: the same in a chat with a tool that runs programs in the sandbox;
    max_new_tokens are those of one turn, and rows hold all turns. exact: the text itself. constraints: IFEval's
    instructions. completed_program: the rest of a function, judged by its tests in the sandbox. program: a whole
    program, likewise. tools: the calls of given functions, or none, in a chat that shows the functions. patch: a diff
    that resolves an issue of SWE-bench, judged by the tests in the sandbox where the record holds the source, else only
    written as a prediction. refusal: harmful requests, to be declined. over_refusal: harmless ones, to be answered.
    Both read one file and leave out each other's records."""
    file: str
    """As above."""
    few_shot: FewShot | None
    is_chat: bool
    """Whether the question is a user's message in the chat template; else its text is continued."""
    max_new_tokens: int = Field(gt=0)
    num_samples: int = Field(gt=0)
    """Answers to each item. A figure is their mean; its interval counts the answers to one item as one."""
    temperature: float = Field(ge=0)
    """0 takes the likeliest token each time; several answers need more."""
    until: list[str]
    """Texts that end an answer and are no part of it; an end-of-answer token always does."""

    @model_validator(mode="after")
    def _chats_have_no_examples(self) -> AnswerBenchmark:
        if self.is_chat and self.few_shot is not None:
            raise ValueError(f"benchmark {self.name}: few_shot must be null where is_chat is true")
        if self.few_shot is not None and self.kind not in ("math", "exact", "program"):
            raise ValueError(
                f"benchmark {self.name}: few_shot must be null for kind {self.kind}, whose records are no examples"
            )
        _require_chance(self)
        if self.kind == "patch" and self.num_samples > 1:
            raise ValueError(f"benchmark {self.name}: num_samples must be 1 for kind patch: SWE-bench takes one patch")
        if self.kind in ("tools", "math_with_python") and not self.is_chat:
            raise ValueError(
                f"benchmark {self.name}: is_chat must be true for kind {self.kind}: a template shows tools"
            )
        return self

    @property
    def file_names(self) -> set[str]:
        """Files that its items and examples come from."""
        return {self.file} | ({self.few_shot.file} if self.few_shot is not None else set())


class RetrievalBenchmark(Frozen):
    """Asks for a code that one sentence of a long document states: a needle in a haystack. The items are made here, the
    same ones for every model."""

    name: str
    kind: Literal["retrieval"]
    file: str | None
    """A text from which the documents are cut, relative to the data directory; its role must be `evaluation`. null:
    sentences that are made."""
    document_chars: list[int] = Field(min_length=1)
    """Lengths of the documents in characters, a figure each: the same for models with different tokenizers. An item
    with more tokens than sequence_length leaves for it is an error."""
    depths: list[float] = Field(min_length=1)
    """Where the sentence is: 0 at the beginning of a document, 1 at its end."""
    items_per_depth: int = Field(gt=0)
    """Items of each length and depth."""
    num_distractors: int = Field(ge=0)
    """Sentences that state the codes of other names."""
    is_chat: bool
    """Whether document and question are a user's message in the chat template; else their text is continued."""
    max_new_tokens: int = Field(gt=0)
    num_samples: int = Field(gt=0)
    """Answers to each item. A figure is their mean; its interval counts the answers to one item as one."""
    temperature: float = Field(ge=0)
    """0 takes the likeliest token each time; several answers need more."""
    until: list[str]
    """As of other answers."""

    @model_validator(mode="after")
    def _sentences_fit(self) -> RetrievalBenchmark:
        shortest = MIN_RETRIEVAL_CHARS * (1 + self.num_distractors)
        if min(self.document_chars) < shortest:
            raise ValueError(
                f"benchmark {self.name}: document_chars {min(self.document_chars)} must be at least {shortest}, which "
                f"{1 + self.num_distractors} sentences with codes need"
            )
        _require_chance(self)
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"benchmark {self.name}: depths {self.depths} must be in 0..1")
        return self

    @property
    def file_names(self) -> set[str]:
        """The file that its documents come from, if there is one."""
        return set() if self.file is None else {self.file}


def _require_chance(benchmark: AnswerBenchmark | RetrievalBenchmark) -> None:
    if benchmark.num_samples > 1 and benchmark.temperature == 0:
        raise ValueError(
            f"benchmark {benchmark.name}: num_samples {benchmark.num_samples} needs a temperature above 0, else all "
            f"answers are the same"
        )


Benchmark = Annotated[LikelihoodBenchmark | AnswerBenchmark | RetrievalBenchmark, Field(discriminator="kind")]


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

    @property
    def own_files(self) -> dict[str, str]:
        """Files of the data directory that items and examples come from, each with the first benchmark that reads
        it."""
        return {name: benchmark for name, benchmark in self.benchmark_by_file.items() if not name.startswith(HUB)}

    @property
    def hub_files(self) -> dict[str, str]:
        """Likewise, the files of datasets of the hub, by their addresses."""
        return {name: benchmark for name, benchmark in self.benchmark_by_file.items() if name.startswith(HUB)}

    @property
    def benchmark_by_file(self) -> dict[str, str]:
        """Both."""
        by_file: dict[str, str] = {}
        for benchmark in self.benchmarks:
            for name in sorted(benchmark.file_names):
                by_file.setdefault(name, benchmark.name)
        return by_file

    @model_validator(mode="after")
    def _names_differ(self) -> Suite:
        names = [benchmark.name for benchmark in self.benchmarks]
        if wrong := [name for name in names if not NAME.fullmatch(name)]:
            raise ValueError(
                f"benchmark {wrong[0]!r}: a name is 1 to {MAX_NAME} letters, digits, _ and -, since an alias and files "
                f"are named after it: rename it"
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"benchmarks {', '.join(twice)} occur twice: give each a name of its own")
        return self
