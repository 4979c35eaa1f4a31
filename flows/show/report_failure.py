"""Tells a webhook that a run failed, crashed or was refused by a gate; infra/failure_webhook.py posts."""

from __future__ import annotations

from typing import Any

from prefect import Flow, State, get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_logger
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Completed

from flows.show.outcome import RunOutcome
from infra.failure_webhook import MAX_REASON_CHARS, failure, post_failure

REFUSED = "Refused"


def tell_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of the flow: its run ended as Failed or Crashed."""
    post_failure(
        failure(
            state.name or state.type.value, flow_run.name, str(flow_run.id), flow_run.parameters, state.message or ""
        ),
        get_logger("glm46").warning,
    )


def tell_refusal(outcome: RunOutcome) -> State[RunOutcome]:
    """Of the flow run that calls this, whose gates refused something: the state it ends in. Every step of it was
    completed, so the type is Completed; pages and lists of runs show the name."""
    reason = "; ".join(outcome.reasons)
    values = failure(REFUSED, str(this_flow_run.name), str(this_flow_run.id), this_flow_run.parameters, reason)
    post_failure(values, get_run_logger().warning)
    return Completed(name=REFUSED, message=reason[:MAX_REASON_CHARS], data=outcome)
