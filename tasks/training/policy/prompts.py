"""What a policy phase and a played evaluation ask: a prompt with its verifier or environment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model.text.chat_template import encode, render
from tasks.data.environments.environments import OPENERS
from tasks.data.prompts.verifiers import AskedPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from configs.schema import PolicyObjective
    from configs.schema.objectives import SolutionObjective
    from model.text.chat_template import Message, Segment
    from tasks.data.environments.environment import Environment

COLUMNS = ("id", "domain", "kind", "prompt", "tools", "answer", "source", "messages")
NUM_NAMED_SOURCES = 5


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    kind: str
    question: str
    tools: str
    """Function descriptions as a JSON list."""
    answer: str
    """What the verifier of the kind expects, or from which its environment is made."""
    source: str = ""
    """File, or name of what generated it."""
    messages: str = "[]"
    """The turns of which `question` is the text, as a JSON list; empty where it is one turn of a user."""

    @property
    def turns(self) -> list[Message]:
        """What is said before the assistant answers."""
        return json.loads(self.messages) or [{"role": "user", "content": self.question}]

    @property
    def asked(self) -> AskedPrompt:
        return AskedPrompt(self.id, self.kind, self.answer)

    def open_environment(self) -> Environment | None:
        """A new one for each answer, in its first state; None for prompts that are answered in one turn."""
        return OPENERS[self.kind](self.answer) if self.kind in OPENERS else None

    def segments(self, enable_thinking: bool) -> list[Segment]:
        """The prompt up to where the assistant begins to write."""
        tools = json.loads(self.tools)
        return render(self.turns, tools, enable_thinking=enable_thinking, add_generation_prompt=True)

    def token_ids(self, tokenizer: Tokenizer, enable_thinking: bool) -> list[int]:
        return encode(tokenizer, self.segments(enable_thinking))[0]


def read_prompts(prompts_path: Path) -> list[Prompt]:
    """The prompts of prompts.parquet in the order of their ids."""
    import pyarrow.parquet as pq

    rows = pq.read_table(prompts_path, columns=list(COLUMNS)).sort_by("id").to_pylist()
    return [Prompt(*(row[name] for name in COLUMNS)) for row in rows]


def with_room(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    sequence_length: int,
    objective: PolicyObjective | SolutionObjective,
) -> list[Prompt]:
    """Those that leave room for an answer. Only those that have more bytes than room for tokens are encoded: a token
    has a byte at least, unless the tokenizer rewrites the text first."""
    room, is_bounded = sequence_length - objective.max_new_tokens, tokenizer.normalizer is None

    def fits(segments: list[Segment]) -> bool:
        # One more of each text: a tokenizer may put a space before it.
        most = sum(1 if segment.is_special else len(segment.text.encode()) + 1 for segment in segments)
        return (is_bounded and most <= room) or len(encode(tokenizer, segments)[0]) <= room

    return [prompt for prompt in prompts if fits(prompt.segments(objective.enable_thinking))]


def refuse_without_room(
    who: str, prompts: Sequence[Prompt], sequence_length: int, objective: PolicyObjective | SolutionObjective
) -> None:
    """Raises the ValueError of prompts of which `with_room` leaves none."""
    room, max_new_tokens = sequence_length - objective.max_new_tokens, objective.max_new_tokens
    sources = sorted({prompt.source for prompt in prompts})
    more = "" if len(sources) <= NUM_NAMED_SOURCES else " and others"
    raise ValueError(
        f"{who}: all {len(prompts)} prompts (of {', '.join(sources[:NUM_NAMED_SOURCES])}{more}) have more than {room} "
        f"tokens, which is sequence_length ({sequence_length}) less max_new_tokens ({max_new_tokens}): raise the "
        f"phase's sequence_length or lower objective.max_new_tokens"
    )


def refuse_lost_domains(
    expert: str, every: Sequence[Prompt], kept: Sequence[Prompt], sequence_length: int, objective: SolutionObjective
) -> None:
    """Raises ValueError where an expert is to answer a domain of which `with_room` leaves no prompt."""
    for domain in sorted({prompt.domain for prompt in every} - {prompt.domain for prompt in kept}):
        own = [prompt for prompt in every if prompt.domain == domain]
        refuse_without_room(f"domain {domain} of expert {expert}", own, sequence_length, objective)
