"""Checks a hand-over's contract as a step of its own, keyed by data digest, contract file and runner."""

from __future__ import annotations

from typing import Any

from configs.schema import ContractRecipe
from flows.running.run import Run
from flows.running.run_step import run_step
from infra.step import Artifact
from tasks.data.validate_contract import ContractResult, validate_contract


def check_contract(run: Run, subject: Artifact[Any], name: str, stage: str = "") -> Artifact[ContractResult]:
    """The result of data_contracts/<name>.yaml on an artifact; a violation stops the run with rule, column and example
    rows."""
    return run_step(
        run,
        validate_contract,
        stage=stage or f"contract {name}",
        subject=subject,
        recipe=ContractRecipe(name=name),
        resources=run.scale.data.resources,
        data_files=(f"data_contracts/{name}.yaml",),
    )
