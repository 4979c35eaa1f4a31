"""`glm46 up --monitoring`: starts of the monitoring what is installed and does not run, and says what is not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from infra.child_process import free_port, take_port
from infra.home import Home
from infra.monitoring.grafana import grafana, password_path, write_dashboards
from infra.monitoring.prometheus import (
    SCRAPE_SECONDS,
    WEBHOOK_VARIABLE,
    alertmanager,
    monitoring_dir,
    node_exporter,
    prometheus,
    write_targets,
)
from infra.monitoring.services import (
    RunningService,
    Service,
    find_program,
    read_services,
    start_service,
    started_with,
    stop_service,
)

PROGRAMS = {
    "prometheus": ("prometheus",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "node-exporter": ("node_exporter", "prometheus-node-exporter"),
    "grafana": ("grafana", "grafana-server"),
}
INSTALL = {
    "prometheus": "apt-get install prometheus",
    "alertmanager": "apt-get install prometheus-alertmanager",
    "node-exporter": "apt-get install prometheus-node-exporter",
    "grafana": "see grafana.com/grafana/download; the dashboards are in {dashboards}",
}


class Monitoring:
    """What runs, and sentences for the user: an address of each service, or why there is none."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.running = read_services(home)
        self.sentences: list[str] = []

    def ensure(self, name: str, describe: Callable[[], Service]) -> RunningService:
        """The running service, started if it was not."""
        if name not in self.running:
            self.running[name] = start_service(self.home, describe())
        self.sentences.append(f"{name:<14} {self.running[name].url}")
        return self.running[name]

    def program(self, name: str) -> str | None:
        """Path of a service's program, also where it runs; says what to install where there is none."""
        program = find_program(*PROGRAMS[name])
        if program is None:
            fix = INSTALL[name].format(dashboards=monitoring_dir(self.home) / "dashboards")
            self.sentences.append(f"{name:<14} not started: {PROGRAMS[name][0]} is not installed ({fix})")
        return program


def bring_up_monitoring(
    home: Home,
    prometheus_port: int,
    grafana_port: int,
    store: str | None = None,
    scrape_seconds: float = SCRAPE_SECONDS,
) -> list[str]:
    """Sentences that say what runs where, and what is missing. Raises ValueError for a port in use, before anything is
    started."""
    monitoring = Monitoring(home)
    for name, port in (("prometheus", prometheus_port), ("grafana", grafana_port)):
        if name not in monitoring.running and find_program(*PROGRAMS[name]):
            take_port(port)
    monitoring_dir(home).mkdir(exist_ok=True)
    exporter = _ensure_exporter(monitoring, store)
    write_targets(home, "glm46", [exporter.address])
    _ensure_node_exporter(monitoring)
    _ensure_alertmanager(monitoring)
    write_dashboards(home)
    program = monitoring.program("prometheus")
    if program is None:
        return monitoring.sentences
    server = monitoring.ensure("prometheus", lambda: prometheus(home, program, prometheus_port, scrape_seconds))
    viewer = monitoring.program("grafana")
    if viewer is not None:
        monitoring.ensure("grafana", lambda: grafana(home, viewer, grafana_port, server.url))
        monitoring.sentences[-1] += f" (user admin, password in {password_path(home)})"
    return monitoring.sentences


def _ensure_exporter(monitoring: Monitoring, store: str | None) -> RunningService:
    """One that reads another store than the named one is started anew; where none is named, it is left as it is."""
    running, wanted, replaced = monitoring.running.get("exporter"), _exporter(store), ""
    if running is not None and store and started_with(monitoring.home, running)[-2:] != list(wanted.command[-2:]):
        stop_service(monitoring.home, "exporter")
        del monitoring.running["exporter"]
        replaced = ": started anew, it read another store"
    exporter = monitoring.ensure("exporter", lambda: wanted)
    monitoring.sentences[-1] += replaced
    return exporter


def _exporter(store: str | None) -> Service:
    port = free_port()
    place: tuple[str, ...] = ()
    if store is not None:  # it runs in another directory
        place = ("--store", store if "://" in store else str(Path(store).absolute()))
    command = (sys.executable, "-m", "tasks.monitoring.exporter", "--port", str(port), *place)
    return Service("exporter", command, port, "/metrics")


def _ensure_node_exporter(monitoring: Monitoring) -> None:
    program, addresses = monitoring.program("node-exporter"), []
    if program is not None:
        addresses = [monitoring.ensure("node-exporter", lambda: node_exporter(program, free_port())).address]
    write_targets(monitoring.home, "node", addresses)


def _ensure_alertmanager(monitoring: Monitoring) -> None:
    addresses = []
    if not os.environ.get(WEBHOOK_VARIABLE) and "alertmanager" not in monitoring.running:
        monitoring.sentences.append(
            f"{'alertmanager':<14} not started: set {WEBHOOK_VARIABLE} to the URL that receives alerts, and run again"
        )
    elif (program := monitoring.program("alertmanager")) is not None:
        home = monitoring.home
        service = monitoring.ensure("alertmanager", lambda: alertmanager(home, program, free_port()))
        addresses = [service.address]
    write_targets(monitoring.home, "alertmanager", addresses)
