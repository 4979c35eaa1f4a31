"""Prometheus, Alertmanager and the node exporter of a home: their configuration and commands.

Targets are found in files below run/monitoring/targets/: glm46*.json, node*.json and dcgm*.json. `glm46 up` writes
those of this machine; a cluster adds files of its nodes, which Prometheus reads without a restart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from configs.files.atomic_files import replace_durably
from infra.home import Home, private_file
from infra.monitoring.services import HOST, Service

RULES = [Path(__file__).parent / name for name in ("recording_rules.yml", "alerts.yml")]
JOBS = ("glm46", "node", "dcgm")
SCRAPE_SECONDS = 15
WEBHOOK_VARIABLE = "GLM46_ALERT_WEBHOOK"
"""URL that receives alerts. Only from the environment: such a URL is often its own password."""
RETENTION = "30d"


def monitoring_dir(home: Home) -> Path:
    return home.run_dir / "monitoring"


def write_targets(home: Home, job: str, addresses: list[str]) -> None:
    """What this machine contributes to a job; no address is no target."""
    groups = [{"targets": addresses}] if addresses else []
    directory = monitoring_dir(home) / "targets"
    directory.mkdir(parents=True, exist_ok=True)
    replace_durably(directory / f"{job}.json", json.dumps(groups).encode())


def prometheus_configuration(home: Home, scrape_seconds: float = SCRAPE_SECONDS) -> str:
    """prometheus.yml: every job and Alertmanager by files."""
    targets = monitoring_dir(home) / "targets"
    interval = f"{round(scrape_seconds * 1000)}ms"

    def found_in(pattern: str) -> list[dict[str, object]]:
        return [{"files": [str(targets / pattern)], "refresh_interval": interval}]

    return yaml.safe_dump(
        {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in RULES],
            "alerting": {"alertmanagers": [{"file_sd_configs": found_in("alertmanager.json")}]},
            "scrape_configs": [{"job_name": job, "file_sd_configs": found_in(f"{job}*.json")} for job in JOBS],
        },
        sort_keys=False,
    )


def prometheus(home: Home, program: str, port: int, scrape_seconds: float = SCRAPE_SECONDS) -> Service:
    """Writes its configuration; its data are below the home."""
    directory = monitoring_dir(home)
    replace_durably(directory / "prometheus.yml", prometheus_configuration(home, scrape_seconds).encode())
    options = (
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'prometheus'}",
        f"--storage.tsdb.retention.time={RETENTION}",
        f"--web.listen-address={HOST}:{port}",
        "--log.level=warn",
    )
    return Service("prometheus", (program, *options), port, "/-/ready")


def alertmanager(home: Home, program: str, port: int) -> Service:
    """Sends every alert to the webhook of the environment, once and again every four hours, and when it has ended."""
    directory = monitoring_dir(home)
    configuration = {
        "route": {
            "receiver": "webhook",
            "group_by": ["alertname", "scale", "phase"],
            "group_wait": "10s",
            "group_interval": "1m",
            "repeat_interval": "4h",
        },
        "receivers": [
            {"name": "webhook", "webhook_configs": [{"url": os.environ[WEBHOOK_VARIABLE], "send_resolved": True}]}
        ],
    }
    private_file(directory / "alertmanager.yml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    options = (
        f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'alertmanager'}",
        f"--web.listen-address={HOST}:{port}",
        "--cluster.listen-address=",  # a single one: nobody to gossip with
        "--log.level=warn",
    )
    return Service("alertmanager", (program, *options), port, "/-/ready")


def node_exporter(program: str, port: int) -> Service:
    return Service("node-exporter", (program, f"--web.listen-address={HOST}:{port}", "--log.level=warn"), port, "/")
