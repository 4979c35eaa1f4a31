"""Reads from a store how fast phases were trained on this kind of machine and how much memory they took."""

from __future__ import annotations

import json
from collections.abc import Callable

from configs.machine import this_machine
from infra.jobs.supervisor import JobFile
from infra.step import Artifact, Record
from infra.storage.store import Store
from tasks.training.plan.measured import KEY_DIGITS, MeasuredPhase, kind_of
from tasks.training.state.job import METRICS_FILE
from tasks.training.train_phase import train_phase
from tasks.training.watch.effective_time import TIME_FILE, effective_time

JOB_FILE = "job.json"


def measured_phases(store: Store, tell: Callable[[str], None]) -> list[MeasuredPhase]:
    """Of the phases that ran on one machine of this kind; what another kind measured says nothing about this one.
    A phase whose files are damaged, or were written by another version, is left out; `tell` gets the sentence."""
    measured = []
    for manifest in store.iterate_manifests():
        if manifest.step != train_phase.name or not {JOB_FILE, TIME_FILE} <= manifest.evidence.keys():
            continue
        try:
            found = _measured(Artifact(manifest, Record(), store))
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            tell(
                f"phase {manifest.key[:KEY_DIGITS]} of the store is not counted, its measurements cannot be read: {why}"
            )
        else:
            measured += [] if found is None else [found]
    return measured


def _measured(phase: Artifact[Record]) -> MeasuredPhase | None:
    """None where another kind of machine, or no time, was measured."""
    job = JobFile(**json.loads(phase.path(JOB_FILE).read_bytes()))
    spent = effective_time(phase.path(TIME_FILE).read_bytes())
    if job.machine != str(this_machine()) or spent is None or not spent.productive:
        return None
    lines = [json.loads(line) for line in phase.path(METRICS_FILE).read_text().splitlines()]
    lines = [line for line in lines if "loss" in line or "skipped_steps" not in line]  # left out by a spike: no speed
    recipe = phase.manifest.identity["recipe"]
    kind_of(recipe)  # the plan compares it: an older recipe has other keys
    return MeasuredPhase(
        key=phase.key,
        recipe=recipe,
        num_ranks=len(job.rank_pids),
        num_tokens=phase.manifest.record["num_tokens"],
        seconds=spent.productive + spent.paused,
        num_positions=sum(line["filled_positions"] for line in lines),
        attended_tokens=sum(line["attended_tokens"] for line in lines) / len(lines),
        memory_bytes=max(line["memory_bytes"] for line in lines),
        committed_at=phase.committed_at,
    )
