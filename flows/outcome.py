"""What a pipeline run ends with: the same for the command line, the deployment and `--json`."""

from __future__ import annotations

from pydantic import BaseModel

from flows.stage_log import StageResult


class RunOutcome(BaseModel):
    """The end of a run. `reasons` is empty unless a gate refused; `promoted` means that alias `champion` resolves to this run's digest."""

    promoted: bool
    model: str
    alias: str
    version: str
    seconds: float
    digest: str
    """Content digest of the Hugging Face export; empty where the run left before one was made."""
    report: str
    stages: list[StageResult]
    reasons: list[str]
