"""The base class of all sections, and the names that several sections share."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

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

    @model_validator(mode="before")
    @classmethod
    def refuse_what_is_no_number(cls, written: Any) -> Any:
        """Raises ValueError for true, false and text where an integer belongs: pydantic would read 1, 0 and its
        digits."""
        for name, value in written.items() if isinstance(written, dict) else ():
            kinds = _kinds_of(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            if isinstance(value, bool | str) and int in kinds and kinds <= {int, NoneType}:
                raise ValueError(f"{name}: {value!r} is no integer; write a number without quotes")
        return written


def _kinds_of(annotation: Any) -> set[Any]:
    return set(get_args(annotation) or (annotation,))
