"""What `glm46 up --monitoring` starts, keeps, refuses and says: programs of a PATH of our own."""

from __future__ import annotations

import json
import socket
import urllib.request

import psutil
import pytest
import yaml

from infra.child_process import free_port
from infra.home import open_home
from infra.monitoring import stack
from infra.monitoring.dashboards import DASHBOARDS, expressions
from infra.monitoring.grafana import write_dashboards
from infra.monitoring.prometheus import WEBHOOK_VARIABLE, alertmanager, monitoring_dir, prometheus_configuration
from infra.monitoring.services import read_services, started_with, stop_services
from infra.monitoring.stack import bring_up_monitoring


@pytest.fixture
def watched_home(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(WEBHOOK_VARIABLE, raising=False)
    (tmp_path / "bin").mkdir()
    home = open_home()
    yield home
    stop_services(home)


def install(home, name: str, text: str) -> None:
    program = home.root.parent / "bin" / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def test_the_exporter_starts_once_and_again_where_it_was_killed_and_the_rest_is_named_as_missing(watched_home):
    said = bring_up_monitoring(watched_home, free_port(), free_port())
    assert [sentence.split()[0] for sentence in said] == ["exporter", "node-exporter", "alertmanager", "prometheus"]
    assert "prometheus is not installed (apt-get install prometheus)" in said[3] and WEBHOOK_VARIABLE in said[2]
    (name, first), *others = read_services(watched_home).items()
    assert name == "exporter" and not others
    with urllib.request.urlopen(f"{first.url}/metrics") as answer:
        assert answer.status == 200
    again = bring_up_monitoring(watched_home, free_port(), free_port())
    assert again == said and read_services(watched_home)["exporter"] == first
    targets = monitoring_dir(watched_home) / "targets" / "glm46.json"
    assert json.loads(targets.read_text()) == [{"targets": [first.address]}]
    exporter = psutil.Process(first.pid)
    exporter.kill()
    exporter.wait()
    bring_up_monitoring(watched_home, free_port(), free_port())
    second = read_services(watched_home)["exporter"]
    assert second.pid != first.pid and json.loads(targets.read_text()) == [{"targets": [second.address]}]
    assert stop_services(watched_home) == 1 and not read_services(watched_home)


def test_an_exporter_of_another_store_is_started_anew_for_the_one_that_is_named(watched_home, tmp_path):
    ports = free_port(), free_port()
    bring_up_monitoring(watched_home, *ports)
    pids = [read_services(watched_home)["exporter"].pid]
    for store in (tmp_path / "other", tmp_path / "other", None):
        said = bring_up_monitoring(watched_home, *ports, None if store is None else str(store))[0]
        pids.append(read_services(watched_home)["exporter"].pid)
        assert said.endswith(": started anew, it read another store") is (len(pids) == 2), said
    assert pids[0] != pids[1] == pids[2] == pids[3]
    command = started_with(watched_home, read_services(watched_home)["exporter"])
    assert command[-2:] == ["--store", str(tmp_path / "other")] and not psutil.pid_exists(pids[0])


def test_a_port_in_use_is_refused_before_anything_starts(watched_home):
    install(watched_home, "prometheus", "exit 0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 is taken by .*: end it, or name another port"):
            bring_up_monitoring(watched_home, port, free_port())
    assert not (watched_home.run_dir / "monitoring.json").exists()


def test_a_program_that_ends_is_named_with_its_last_lines(watched_home):
    install(watched_home, "prometheus", "echo no space left; exit 1")
    with pytest.raises(RuntimeError, match=r"(?s)prometheus stopped; the end of .*prometheus\.log:\nno space left"):
        bring_up_monitoring(watched_home, free_port(), free_port())
    assert list(read_services(watched_home)) == ["exporter"], "the next `glm46 up` keeps what runs"


def test_all_targets_are_found_by_files_and_everything_listens_on_loopback(watched_home, monkeypatch):
    configuration = yaml.safe_load(prometheus_configuration(watched_home))
    assert all(set(job) == {"job_name", "file_sd_configs"} for job in configuration["scrape_configs"])
    monkeypatch.setenv(WEBHOOK_VARIABLE, "https://hooks.example.org/secret")
    monitoring_dir(watched_home).mkdir()
    service = alertmanager(watched_home, "alertmanager", 9093)
    written = monitoring_dir(watched_home) / "alertmanager.yml"
    assert "https://hooks.example.org/secret" in written.read_text() and written.stat().st_mode & 0o077 == 0
    assert "--web.listen-address=127.0.0.1:9093" in service.command and not any("secret" in x for x in service.command)


def test_dashboards_are_files_with_every_expression(watched_home):
    directory = write_dashboards(watched_home)
    for name in DASHBOARDS:
        board = json.loads((directory / f"{name}.json").read_text())
        drawn = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        assert drawn == expressions(name) and board["uid"] == f"glm46-{name}"


def test_the_exporter_reads_a_store_that_is_named_relatively(tmp_path, monkeypatch):
    """It runs in the project's directory."""
    monkeypatch.chdir(tmp_path)
    assert stack._exporter("kept").command[-1] == str(tmp_path / "kept")
    assert stack._exporter("s3://bucket/kept").command[-1] == "s3://bucket/kept"
