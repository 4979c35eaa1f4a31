"""Where the released model is served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.schema.base import Frozen


class ServingResources(Frozen):
    host: Literal["127.0.0.1", "localhost"]
    """Loopback: the server asks for no password."""
    port: int = Field(ge=0, le=65535)
    """0 takes a free port."""
    context_length: int = Field(gt=0)
    num_threads: int = Field(gt=0)
    startup_timeout_seconds: float = Field(gt=0)


class ServingSection(Frozen):
    resources: ServingResources
