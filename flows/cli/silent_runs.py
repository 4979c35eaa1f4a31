"""Sets flow runs whose process died from Running to Crashed, so that the UI and the API can retry them.

A dead process reports nothing, so there are two ways: an automation on the server for runs that stopped sending
heartbeats, whatever machine they were on; and a look at this machine's processes when servers start.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.states import Crashed

from flows.show.report_failure import REFUSED
from infra.servers.servers import HEARTBEAT_SECONDS

SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS + 10
"""Seconds without a heartbeat: on a busy machine one may be late."""
AUTOMATION = "glm46: crash flow runs that fell silent"
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDED = {
    f"prefect.flow-run.{state}"
    for state in (
        *("Completed", REFUSED, "Failed", "TimedOut", "Cancelled", "Crashed"),
        *("Paused", "Suspended", "AwaitingRetry"),
    )
}
"""Events are named after a state's name, not its type."""


def ensure_silence_automation() -> None:
    """Tell the server to crash a flow run that sends neither a heartbeat nor its end for SILENCE_SECONDS."""
    automation = AutomationCore(
        name=AUTOMATION,
        description="The process of such a run has died. Retry the run: what it had computed is in the store.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *ENDED},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENCE_SECONDS),
            match={"prefect.resource.id": "prefect.flow-run.*"},  # pyright: ignore[reportArgumentType]
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, name="Crashed", message=f"no sign of life for {SILENCE_SECONDS} s", force=False
            )
        ],
    )
    with get_client(sync_client=True) as client:
        existing = client.read_automations_by_name(AUTOMATION)
        if existing:
            client.update_automation(existing[0].id, automation)
        else:
            client.create_automation(automation)


def crash_dead_runs(is_dead: Callable[[FlowRun], bool]) -> int:
    """Set flow runs in state Running whose process is dead to Crashed; returns how many."""
    running = FlowRunFilter(
        state=FlowRunFilterState(
            type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING])
        )
    )
    with get_client(sync_client=True) as client:
        dead = [flow_run for flow_run in client.read_flow_runs(flow_run_filter=running) if is_dead(flow_run)]
        for flow_run in dead:
            _crash(client, flow_run)
    return len(dead)


def _crash(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    client.set_flow_run_state(flow_run.id, Crashed(message="its process has ended; retry to continue"), force=True)


def lost_its_process(flow_run: FlowRun) -> bool:
    """Whether a worker of this machine started the run in a process that is gone. Runs that were started otherwise are
    judged by their heartbeats."""
    if not flow_run.infrastructure_pid or not flow_run.infrastructure_pid.isdigit():
        return False
    try:
        return psutil.Process(int(flow_run.infrastructure_pid)).environ().get("PREFECT__FLOW_RUN_ID") != str(
            flow_run.id
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return True
