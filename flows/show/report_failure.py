"""Tells a webhook that a run failed, crashed or was refused by a gate; infra/monitoring/failure_webhook.py posts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import Flow, State, get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_logger
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Completed

from flows.show.outcome import RunOutcome
from infra.monitoring.failure_webhook import post_failure

REFUSED = "Refused"
MAX_REASON_CHARS = 1000


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


def failure(state: str, name: str, flow_run_id: str, parameters: dict[str, Any], reason: str) -> dict[str, str]:
    """What is posted; `text` is what chat servers show."""
    scale, short = Path(str(parameters.get("scale", ""))).stem, reason[:MAX_REASON_CHARS]
    return {
        "text": f"glm46 run {name}: {state}. {short}".rstrip(),
        "state": state,
        "scale": scale,
        "flow_run": name,
        "flow_run_id": flow_run_id,
        "reason": short,
    }
