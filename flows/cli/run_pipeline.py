"""Runs the flow from the command line: servers up, environment set, flow called, servers down."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from infra.home import Home
from infra.servers.recorded_servers import ServerUrls, ended_servers, log_path, read_recorded, read_servers_file
from infra.servers.server_answers import ask_databases
from infra.servers.server_password import API_URL, CLIENT_VARIABLE, MLFLOW_URL, SERVER_HOME, api_password
from infra.servers.servers import HEARTBEAT_SECONDS, TELEMETRY_OFF, running_servers

if TYPE_CHECKING:
    from configs.schema import Scale
    from flows.show.outcome import RunOutcome

DRAIN_SECONDS = 5
MLFLOW_RETRIES = 2
"""Retries of one request; MLflow's default of seven takes minutes without a message."""
WORKER_QUERY_SECONDS = 3
"""Seconds between two questions of the worker for requested runs; the server is on the same machine."""


def set_environment(home: Home, prefect_url: str, mlflow_url: str) -> None:
    """Set the variables that Prefect and MLflow read when they are imported."""
    os.environ.update(TELEMETRY_OFF)
    os.environ.update(
        {
            "GLM46_HOME": str(home.root),
            "PREFECT_HOME": str(home.prefect_dir),
            API_URL: f"{prefect_url}/api",
            SERVER_HOME: str(home.root),
            CLIENT_VARIABLE: api_password(home),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
            "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_SECONDS),
            # The stage log writes to the terminal, Prefect's log to its UI.
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
            "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
            MLFLOW_URL: mlflow_url,
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(MLFLOW_RETRIES),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait cost whole cores on a busy machine
            "MLFLOW_LOGGING_LEVEL": "WARNING",
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        }
    )


def say_unused_servers(home: Home, servers: ServerUrls) -> None:
    """Names the variables of the shell that point Prefect or MLflow to another server; not their values, which may
    hold a password."""
    for name, own in ((API_URL, f"{servers.prefect}/api"), (MLFLOW_URL, servers.mlflow)):
        if os.environ.get(name, own).rstrip("/") != own:
            print(f"{name} is not used: runs of {home.root} are kept by its own server, {own}", file=sys.stderr)


def refuse_unanswerable_release(home: Home, scale: Scale) -> None:
    """Raises ValueError where a release would wait for a person, and the servers of the run would end with it: nobody
    watches their page."""
    if scale.release.approval is not None and read_recorded(home) is None:
        raise ValueError(
            f"release.approval of scale {scale.scale} asks a person in Prefect's UI, and no servers of {home.root} "
            f"run: start them with `glm46 up`, set release.approval to null, or leave before the release with --until"
        )


def run_pipeline(
    home: Home,
    scale: str,
    store: str | None,
    data: str | None,
    from_stage: str | None,
    start: str | None,
    until: str | None,
) -> RunOutcome:
    """Call the flow `glm46` on servers that answer. Raises what the failed stage raised."""

    def load_flow(servers: ServerUrls) -> None:
        say_unused_servers(home, servers)
        set_environment(home, servers.prefect, servers.mlflow)
        logging.raiseExceptions = False  # Prefect writes into the terminal's lines that its server takes no log
        import mlflow  # noqa: F401

        import flows.full_pipeline  # noqa: F401

    with running_servers(home, partial(print, flush=True), load_flow) as servers:
        from prefect.exceptions import Abort
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        from flows.cli.silent_runs import crash_dead_runs, lost_its_process
        from flows.full_pipeline import full_pipeline

        is_private = servers != read_servers_file(home)
        if is_private:  # of earlier runs on these databases only a worker's may live
            crash_dead_runs(lambda flow_run: not flow_run.infrastructure_pid or lost_its_process(flow_run))
        # What watches heartbeats ends with private servers, and each flow would wait up to a second for its last one.
        changed: dict[Any, None] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None} if is_private else {}
        try:
            with temporary_settings(changed):
                outcome: Any = full_pipeline(
                    scale=scale, store=store, data=data, from_stage=from_stage, start=start, until=until
                )
                return outcome
        except Abort as error:  # is no Exception: nobody else would say why the run ended
            raise RuntimeError(
                f"Prefect's server aborted the run ({error}; {log_path(home, 'prefect')}): run again to continue"
            ) from error
        except Exception as error:
            _blame_servers(home, servers, error)
            raise
        finally:
            _send_waiting_logs_and_events()


def _blame_servers(home: Home, servers: ServerUrls, error: Exception) -> None:
    """Raises RuntimeError where a server made the run fail: it has ended, or its database does not answer."""
    ended = ended_servers(home, servers)
    if ended:
        logs = ", ".join(str(log_path(home, name)) for name in ended)
        raise RuntimeError(
            f"the {' and '.join(ended)} server stopped during the run ({logs}): run again to continue"
        ) from error
    ask_databases(home, servers)


def _send_waiting_logs_and_events() -> None:
    """Send them while the server still runs; at exit Prefect would wait for it."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=DRAIN_SECONDS)
    EventsWorker.drain_all(timeout=DRAIN_SECONDS)
