"""Grafana of a home: its provisioning (one data source, the generated dashboards) and command."""

from __future__ import annotations

import secrets
from pathlib import Path

import yaml

from infra.home import Home, private_file
from infra.monitoring.dashboards import DASHBOARDS, dashboard_json
from infra.monitoring.prometheus import monitoring_dir
from infra.monitoring.services import HOST, Service

DATA_SOURCE_UID = "glm46-prometheus"
HOME_PATHS = ("/usr/share/grafana", "/opt/grafana")


def write_dashboards(home: Home) -> Path:
    """The dashboards as files that any Grafana imports; their directory."""
    directory = monitoring_dir(home) / "dashboards"
    directory.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (directory / f"{name}.json").write_text(dashboard_json(name))
    return directory


def password_path(home: Home) -> Path:
    return monitoring_dir(home) / "grafana-password"


def grafana(home: Home, program: str, port: int, prometheus_url: str) -> Service:
    """The user is admin, the password random: other users of this machine reach loopback too."""
    directory = monitoring_dir(home)
    _provision(directory, prometheus_url, write_dashboards(home))
    path = private_file(password_path(home))
    if not path.read_text():
        path.write_text(secrets.token_urlsafe(24))
    home_path = next((path for path in HOME_PATHS if Path(path).is_dir()), HOME_PATHS[0])
    settings = {
        "GF_SERVER_HTTP_ADDR": HOST,
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_DATA": str(directory / "grafana"),
        "GF_PATHS_LOGS": str(directory / "grafana" / "log"),
        "GF_PATHS_PLUGINS": str(directory / "grafana" / "plugins"),
        "GF_PATHS_PROVISIONING": str(directory / "provisioning"),
        "GF_SECURITY_ADMIN_PASSWORD": path.read_text(),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_NEWS_NEWS_FEED_ENABLED": "false",
    }
    server = () if Path(program).name == "grafana-server" else ("server",)
    return Service("grafana", (program, *server, "--homepath", home_path), port, "/api/health", settings)


def provisioning(prometheus_url: str, dashboards: str) -> tuple[dict, dict]:
    """(what datasources/ holds, what dashboards/ holds) of Grafana's provisioning."""
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "uid": DATA_SOURCE_UID,
        "url": prometheus_url,
        "access": "proxy",
        "isDefault": True,
    }
    provider = {"name": "glm46", "folder": "glm46", "type": "file", "options": {"path": dashboards}}
    return {"apiVersion": 1, "datasources": [source]}, {"apiVersion": 1, "providers": [provider]}


def _provision(directory: Path, prometheus_url: str, dashboards: Path) -> None:
    sources, providers = provisioning(prometheus_url, str(dashboards))
    for name, content in {"datasources/prometheus.yaml": sources, "dashboards/glm46.yaml": providers}.items():
        path = directory / "provisioning" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
