"""What a policy phase and a played evaluation ask: a prompt with its verifier or environment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model.text.chat_template import encode, problem_prompt
from tasks.data.environments.environments import OPENERS
from tasks.data.prompts.verifiers import AskedPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tasks.data.environments.environment import Environment

COLUMNS = ("id", "domain", "kind", "prompt", "tools", "answer")


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

    @property
    def asked(self) -> AskedPrompt:
        return AskedPrompt(self.id, self.kind, self.answer)

    def open_environment(self) -> Environment | None:
        """A new one for each answer, in its first state; None for prompts that are answered in one turn."""
        return OPENERS[self.kind](self.answer) if self.kind in OPENERS else None

    def token_ids(self, tokenizer: Tokenizer, enable_thinking: bool) -> list[int]:
        """The prompt up to where the assistant begins to write."""
        return encode(tokenizer, problem_prompt(self.question, enable_thinking, json.loads(self.tools)))[0]


def read_prompts(prompts_path: Path) -> list[Prompt]:
    """The prompts of prompts.parquet in the order of their ids."""
    import pyarrow.parquet as pq

    rows = pq.read_table(prompts_path, columns=list(COLUMNS)).sort_by("id").to_pylist()
    return [Prompt(*(row[name] for name in COLUMNS)) for row in rows]
