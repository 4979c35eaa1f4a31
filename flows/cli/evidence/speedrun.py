"""`glm46 speedrun`: how long this machine takes from raw pages to a share of right answers, as a record to repeat.

In: an ordinary run of a scale up to its last phase. Out: one JSON file with the first phase that reaches the target,
the wall time until then, and the digest of every step on the way. A second run of the same steps is compared with it.
"""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.machine import this_machine
from flows.cli.evidence.whole_run import whole_run
from flows.show.outcome import RunOutcome
from infra.home import Home
from infra.step import Manifest, digest_of
from infra.storage.manifest_graph import ManifestGraph
from infra.storage.open_store import open_store
from tasks.evaluation.evaluate_checkpoint import Evaluation, evaluate_checkpoint
from tasks.lineage.provenance import packages_of

EVALUATION = "evaluate "
"""Begins the name of the stage that asks a phase's checkpoint the held-out problems."""
SOURCES = "sources"
"""Input of the steps that read raw pages."""


class SpeedrunStep(BaseModel):
    """One step on the way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    digest: str
    seconds: float
    """Wall time of the step by itself."""


class SpeedrunRecord(BaseModel):
    """The file. `configuration`, `code` and `data` are digests over the recipes, the code and the raw pages of the
    steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: str
    target: float
    phase: str
    """The first phase with the lower end of the interval at the target or above."""
    pass_at_1: float
    """Share of right answers to held-out problems."""
    interval: tuple[float, float]
    """Of 95 %."""
    seconds: float
    """Wall time from the beginning of the first step to the end of the phase's evaluation."""
    date: str
    machine: str
    num_cores: int
    configuration: str
    code: str
    data: str
    versions: dict[str, str]
    """Of Python and of the packages that may change a result."""
    steps: dict[str, SpeedrunStep]
    """By stage, producers first."""

    def describe(self) -> str:
        """In one line."""
        low, high = self.interval
        return (
            f"{self.scale}: pass@1 {self.pass_at_1:.3f} [{low:.3f}, {high:.3f}] after {self.phase}, "
            f"{self.seconds:,.0f} s from raw pages on {self.num_cores} cores, {self.machine}"
        )


def read_record(path: Path) -> SpeedrunRecord:
    """Raises ValueError where the file is no record."""
    try:
        return SpeedrunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a file of `glm46 speedrun`") from None
    except ValidationError as error:
        raise ValueError(
            f"{path} is no record that this version of `glm46 speedrun` wrote: {error.errors()[0]['msg']}"
        ) from None


def refuse_used_store(home: Home) -> None:
    """Raises ValueError where steps were computed before: a record counts from raw pages."""
    if any(True for _ in open_store(None, home).iterate_manifests()):
        raise ValueError(
            f"the store of {home.root} is not empty, and time counts from raw pages: set GLM46_HOME to a new directory"
        )


def run_to(phase: str, home: Home, scale: str, data: str | None) -> RunOutcome:
    """An ordinary run that ends after a phase, or at the gate before it that refuses."""
    return whole_run(home.root, scale, "--until", phase, *([] if data is None else ["--data", data]))


def record_target(outcome: RunOutcome, home: Home, scale: str, target: float) -> SpeedrunRecord:
    """Of the first phase that reached the target. Raises ValueError where none did."""
    steps = _steps(outcome, home)
    evaluations = {stage: made for stage, made in steps.items() if made.step == evaluate_checkpoint.name}
    figures = {stage: Evaluation.model_validate(made.record) for stage, made in evaluations.items()}
    lows = {stage: each.intervals["pass_at_1"][0] for stage, each in figures.items()}
    reached = [stage for stage, low in lows.items() if low >= target]
    if not lows:
        raise ValueError(
            f"the run of {scale} ended without an evaluation: {'; '.join(outcome.reasons) or 'name its scale'}"
        )
    if not reached:
        best = max(lows, key=lows.__getitem__)
        raise ValueError(
            f"no phase of {scale} reached pass@1 {target} with the lower end of its interval; {best} came nearest with "
            f"{figures[best].pass_at_1:.3f} {figures[best].intervals['pass_at_1']}: train longer, or lower --target"
        )
    return record_phase(outcome, home, scale, target, reached[0].removeprefix(EVALUATION))


def record_phase(outcome: RunOutcome, home: Home, scale: str, target: float, phase: str) -> SpeedrunRecord:
    """Of the steps that the phase's evaluation was made from and through. Raises ValueError where the run did not come
    to it."""
    steps, last = _steps(outcome, home), f"{EVALUATION}{phase}"
    if last not in steps:
        raise ValueError(f"the run of {scale} ended without {last}: {'; '.join(outcome.reasons) or 'name its scale'}")
    stages = {made.key: stage for stage, made in steps.items()}
    store = open_store(None, home)
    graph = ManifestGraph(store, {made.digest: (made,) for made in steps.values()})
    steps = {stages[made.key]: made for made in graph.ancestors(steps[last])}
    figures = Evaluation.model_validate(steps[last].record)
    identities = {stage: made.identity for stage, made in steps.items()}
    pages = {stage: each["inputs"][SOURCES] for stage, each in identities.items() if SOURCES in each["inputs"]}
    ended = {stage: store.committed_at(made) for stage, made in steps.items()}
    begun = min(ended[stage] - made.seconds for stage, made in steps.items())
    return SpeedrunRecord(
        scale=scale,
        target=target,
        phase=phase,
        pass_at_1=figures.pass_at_1,
        interval=figures.intervals["pass_at_1"],
        seconds=round(max(ended.values()) - begun, 1),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=str(this_machine()),
        num_cores=os.cpu_count() or 1,
        configuration=digest_of({stage: each["recipe"] for stage, each in identities.items()}),
        code=digest_of({stage: each["code"] for stage, each in identities.items()}),
        data=digest_of(pages),
        versions={"python": platform.python_version(), **dict(packages_of(steps.values()))},
        steps={
            stage: SpeedrunStep(key=made.key, digest=made.digest, seconds=made.seconds) for stage, made in steps.items()
        },
    )


def differences(record: SpeedrunRecord, again: SpeedrunRecord) -> list[str]:
    """What a second run has otherwise, a sentence each, causes first; times and machines may differ."""
    pairs = [(name, getattr(record, name), getattr(again, name)) for name in ("configuration", "code", "data")]
    names = sorted({**record.versions, **again.versions})
    pairs += [(f"version of {name}", record.versions.get(name), again.versions.get(name)) for name in names]
    stages = {**record.steps, **again.steps}
    pairs += [(stage, _digest_of(record, stage), _digest_of(again, stage)) for stage in stages]
    pairs += [("pass@1", record.pass_at_1, again.pass_at_1)]
    return [f"{what}: {there} in the record, {here} here" for what, there, here in pairs if there != here]


def _digest_of(record: SpeedrunRecord, stage: str) -> str | None:
    return record.steps[stage].digest if stage in record.steps else None


def _steps(outcome: RunOutcome, home: Home) -> dict[str, Manifest]:
    """Manifests by stage, in the order in which they ended."""
    store = open_store(None, home)
    found = {stage.name: store.read_manifest(stage.key) for stage in outcome.stages if stage.key}
    steps = {stage: made for stage, made in found.items() if made is not None}
    assert len(steps) == len(found), sorted(found.keys() - steps.keys())
    return steps
