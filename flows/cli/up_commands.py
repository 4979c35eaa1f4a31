"""Commands `glm46 up`, `down`, `worker` and `exporter`: what lasts beside the runs, its servers all on loopback."""

from __future__ import annotations

from contextlib import suppress
from shlex import quote
from typing import Annotated

import typer

from flows.cli.command_errors import failures, usage_errors
from flows.cli.options import STORE


def up(
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="port of Prefect's server and UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="port of MLflow's server and UI")] = 5000,
    monitoring: Annotated[bool, typer.Option("--monitoring", help="also Prometheus, its exporters, Grafana")] = False,
    prometheus_port: Annotated[int, typer.Option(min=1, max=65535, help="port of Prometheus")] = 9090,
    grafana_port: Annotated[int, typer.Option(min=1, max=65535, help="port of Grafana")] = 3000,
    store: STORE = None,
) -> None:
    """Start Prefect and MLflow servers, deploy the flow and start a worker; all on loopback, until `glm46 down`.

    With --monitoring it first starts what is installed of Prometheus, Alertmanager, node exporter and Grafana, and the
    exporter of this home's runs. --store is the store that this exporter reads.
    """
    with usage_errors():
        from infra.home import open_home
        from infra.storage.open_store import open_store

        home = open_home()
        if store is not None and not monitoring:
            raise ValueError("--store is for the exporter of --monitoring: add that, or name the store to each run")
        open_store(store, home)
    with failures(home):
        from flows.cli.deployment import bring_up
        from infra.servers.server_password import environment_path, password_path

        if monitoring:
            from infra.monitoring.stack import bring_up_monitoring

            print("\n".join(bring_up_monitoring(home, prometheus_port, grafana_port, store)), flush=True)
        urls = bring_up(home, prefect_port, mlflow_port)
        print(f"Prefect  {urls.prefect} (its UI asks for the line in {password_path(home)})\nMLflow   {urls.mlflow}\n")
        sourced = quote(str(environment_path(home)))
        print(f". {sourced} && prefect deployment run glm46/full-pipeline --param scale=tiny --watch")


def down() -> None:
    """Stop what `glm46 up` started; databases and artifacts stay."""
    with usage_errors():
        from flows.cli.deployment import bring_down
        from infra.home import known_home, refuse_missing_home
        from infra.monitoring.services import stop_services

        home = known_home()
        refuse_missing_home(home)
        print(f"{bring_down(home) + stop_services(home)} processes ended")


def worker(
    site: Annotated[str, typer.Argument(metavar="slurm|kubernetes", help="whose requests are run here")],
) -> None:
    """Run what is requested for a site on this machine, a login node for example, until it is interrupted.

    It reaches the servers of `glm46 up` by the environment: source that home's run/environment.sh first.
    """
    with usage_errors():
        from flows.cli.deployment import become_worker
        from infra.home import open_home

        become_worker(open_home(), site)


def exporter(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on loopback")] = 9464, store: STORE = None
) -> None:
    """Serve the metrics of this home's runs to a Prometheus, at /metrics on loopback, until it is interrupted."""
    with usage_errors():
        from infra.child_process import take_port
        from infra.home import known_home
        from infra.storage.open_store import open_known_store
        from tasks.monitoring.exporter import HOST, serve

        home = known_home()
        opened = open_known_store(store, home)
        take_port(port)
    print(f"http://{HOST}:{port}/metrics", flush=True)
    with suppress(KeyboardInterrupt):
        serve(home, opened, port)
