"""Asks a person in Prefect's UI whether to promote a release that every gate accepted: the flow run `release_model` is
paused until somebody answers or the time is over.

The page of the paused flow run shows the figures and the verdict above the form. The answer, with the name that the
person gave and the time, becomes a part of the decision on the promotion.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from prefect import pause_flow_run
from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Running
from prefect.utilities.urls import url_for
from pydantic import Field

from flows.running.run import AssessedModel, Run
from flows.running.run_step import run_effect
from flows.show.reported import reported_phases
from infra.registry.model_registry import PROMOTION_DECISION_TAG, model_name
from infra.registry.promotion import Rivals
from infra.step import Artifact
from tasks.evaluation.decide_gate import GateDecision
from tasks.release.decide_promotion import Approval, PromotionDecision
from tasks.report.report_evaluation import BOUND_COLUMNS, bound_row, figure_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

POLL_SECONDS = 2
"""Seconds between two questions of the paused flow to its server."""


class ReleaseAnswer(RunInput):
    """The form that a person fills in."""

    answer: Literal["approve", "refuse"]
    reason: str = Field(min_length=1, description="Why; it stays with the release.")
    name: str = Field(min_length=1, description="Who you are.")


def find_approval(
    run: Run, assessed: AssessedModel, rivals: Rivals, gates: Sequence[Artifact[GateDecision]]
) -> Approval | None:
    """The answer to a release that nothing else refuses; None where the scale asks nobody. The reigning champion is not
    asked about again: its answer is that by which it was promoted."""
    if rivals.champion is not None and rivals.is_champion(assessed.checkpoint):
        return run.store.load(rivals.champion.tag(PROMOTION_DECISION_TAG), PromotionDecision).record.approval
    if run.scale.release.approval is None:
        return None
    shown = description(f"{model_name(run.scale.scale)}, version {assessed.version}", assessed, gates)
    seconds = run.scale.release.approval.timeout_seconds
    return run_effect(
        run, "ask for approval", lambda: ask_person(run, shown, seconds), describe=lambda answer: answer.sentence
    )


def ask_person(run: Run, shown: str, timeout_seconds: int) -> Approval:
    """Pause the flow run that calls this until a person answers, at most so long."""
    flow_run_id = this_flow_run.id
    hours = f"{timeout_seconds / 3600:.3g} hours"
    run.log.say(f"this release waits at most {hours} for an answer: {url_for('flow-run', obj_id=flow_run_id)}, Resume")
    try:
        answer = pause_flow_run(
            wait_for_input=ReleaseAnswer.with_initial_data(description=shown),
            timeout=timeout_seconds,
            poll_interval=POLL_SECONDS,
            key=uuid4().hex,
        )
    except FlowPauseTimeout:
        with get_client(sync_client=True) as client:  # an expired pause may only fail, unless it is forced
            client.set_flow_run_state(flow_run_id, Running(message="nobody answered in time"), force=True)
        return Approval(answer="none", reason=f"within {hours}", name="", at=_written_now())
    verdict = "approved" if answer.answer == "approve" else "refused"
    return Approval(answer=verdict, reason=answer.reason, name=answer.name, at=_written_now())


def _written_now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"


def description(title: str, assessed: AssessedModel, gates: Sequence[Artifact[GateDecision]]) -> str:
    """What the person sees, in Markdown: the candidate's figures, and every bound with its verdict."""
    figures = figure_rows(reported_phases([assessed], ()))
    bounds = [(bound.outcome, *bound_row(bound)) for gate in gates for bound in gate.record.bounds]
    return "\n\n".join(
        [
            f"**{title}**: may it become `champion`? Every gate accepted it; {len(bounds)} bounds were judged, the "
            f"engines agree, and the served model answers as the trained one.",
            _table(("figure", "value [95 % interval]"), figures),
            _table(("verdict", *BOUND_COLUMNS), bounds),
        ]
    )


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
