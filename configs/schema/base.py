"""The base class of all sections, and the names that several sections share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Domain = Literal[
    "web",
    "multilingual",
    "code",
    "repository",
    "commit",
    "issue",
    "math",
    "medical",
    "financial",
    "synthetic",
    "chat",
    "agentic",
    "safety",
]
"""Kind of text. `repository`: the files of one repository in one document; `commit`: a change as a diff with its
message; `issue`: the thread of an issue or pull request. Prompts only: `agentic`, answered in an environment; `safety`,
harmful requests and harmless ones like them."""
PackagedEncoder = Literal["all-MiniLM-L6-v2"]
"""Text encoders that an installed package holds (tasks/data/embedding/embedding_model.py)."""


class Frozen(BaseModel):
    """Base of every section: immutable, unknown keys refused, field docstrings kept as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
