"""Says in one line what a run will cost, before it starts: minutes, disk, money where ranks have a price, and how each
is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.load import load_prices
from flows.running.run import Run
from flows.show.show_trend import PREFIX
from flows.show.track_run import SCALE_TAG
from flows.stages import RELEASE_MODEL, StageWindow
from infra.registry.experiment_tracking import TrackedRun, connect, newest_runs, set_run_tags
from tasks.report.trend_page import trend_row_name
from tasks.training.measured_phases import measured_phases
from tasks.training.plan.plan_training import plan_training
from tasks.training.plan.planned import Plan, PlannedPhase
from tasks.training.plan.planned_needs import amount, size

if TYPE_CHECKING:
    from mlflow import MlflowClient

STAGES_TAG = "glm46.stages"
"""Phases of a run, and whether it releases: minutes are those of a run of the same stages."""
MINUTES = f"{PREFIX}minutes"


def say_cost(run: Run, window: StageWindow) -> None:
    """Print it, and tag the run with its stages for the runs after it."""
    client = connect(run.mlflow)
    stages = " ".join([*(phase.name for phase in window.phases), *([RELEASE_MODEL] if window.releases else [])])
    set_run_tags(client, run.pipeline_run_id, {STAGES_TAG: stages})
    if not window.phases:
        return
    alike = newest_alike(client, run.scale.scale, stages)
    plan = plan_training(run.scale, measured=() if alike else measured_phases(run.store, run.log.say))
    names = {phase.name for phase in window.phases}
    run.log.say(expected_cost(plan, [phase for phase in plan.phases if phase.name in names], alike))


def newest_alike(client: MlflowClient, scale: str, stages: str) -> list[TrackedRun]:
    """The newest run of a scale that computed everything in these stages; none where there is none."""
    of_scale = f"tags.`{SCALE_TAG}` = '{scale}' AND tags.`{STAGES_TAG}` = '{stages}'"
    return newest_runs(client, f"{of_scale} AND metrics.`{MINUTES}` >= 0", 1)


def expected_cost(plan: Plan, phases: Sequence[PlannedPhase], alike: Sequence[TrackedRun]) -> str:
    """The line about these phases of the plan; `alike` are runs of the same stages that computed everything, the newest
    last."""
    disk = size(sum(phase.needs.disk_bytes + phase.needs.data_bytes for phase in phases))
    parts = [f"{_time(phases, alike)}; what the store has is not computed again"]
    parts.append(f"checkpoints and tokens need at most {disk} of disk by the plan, documents more")
    if plan.cost.rank_hour:
        hours, price = sum(phase.needs.rank_hours for phase in phases), sum(phase.needs.cost for phase in phases)
        currency = load_prices("guide").currency
        parts.append(f"{hours:,.1f} rank-hours cost {amount(price)} {currency} by configs/prices/guide.yaml")
    return f"expect {'; '.join(parts)}"


def _time(phases: Sequence[PlannedPhase], alike: Sequence[TrackedRun]) -> str:
    if alike:
        return (
            f"{_long(alike[-1].metrics[MINUTES])}, as the run of {trend_row_name(alike[-1].started)} that computed "
            f"everything"
        )
    tokens, known = sum(phase.num_tokens for phase in phases), {phase.known_by.split()[0] for phase in phases}
    how = "measured by runs in the store" if known == {"run"} else f"at a speed that is {' or '.join(sorted(known))}"
    how = how.replace("or run", "or measured by runs in the store")
    spent = _long(sum(phase.hours for phase in phases) * 60)
    beside = "sampling of answers, data" if any(phase.not_counted for phase in phases) else "data"
    return f"{spent} of training on {tokens:,} tokens, {how}; {beside}, evaluation and release come on top"


def _long(minutes: float) -> str:
    return f"{minutes:,.1f} minutes" if minutes < 120 else f"{minutes / 60:,.1f} hours"
