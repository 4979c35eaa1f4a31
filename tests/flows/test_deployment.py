"""`glm46 up`, its deployments and worker: wrong parameters, a worker and a flow run that are killed, a retry, ports in
use, passwords, and what other users and web pages may ask of its servers: nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote
from typing import Any

import psutil
import pytest

from flows.cli.deployment import become_worker
from infra.child_process import free_port, take_port
from infra.home import Home
from infra.servers.databases import MLFLOW_DATABASE, PREFECT_DATABASE, mlflow_database, prefect_database
from tests.conftest import ROOT
from tests.infra.test_launcher import wait_for
from tests.support.cluster.deployed import Deployed
from tests.support.pipeline import command, glm46
from tests.support.postgres import PASSWORD, needs_postgres, postgres


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Brought up by two commands at once: the second waits for the first and finds everything running."""
    up = Deployed(tmp_path_factory.mktemp("deployed") / "a home", (free_port(), free_port()))
    with ThreadPoolExecutor(2) as both:
        started = list(both.map(lambda _: up.up(), range(2)))
    assert [finished.exit_code for finished in started] == [0, 0], [finished.stderr for finished in started]
    yield up
    pids = up.recorded["pids"].values()
    assert glm46("down", home=up.home).exit_code == 0
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_deployments_state_their_parameters_with_help_and_a_schedule(deployed):
    deployment = deployed.api("deployments/name/glm46/full-pipeline")
    schema = deployment["parameter_openapi_schema"]["properties"]
    assert set(schema) == {"scale", "store", "data", "from_stage", "start", "until"}
    assert all(parameter["description"] for parameter in schema.values())
    nightly = deployed.api("deployments/name/glm46/nightly")
    assert [schedule["schedule"]["cron"] for schedule in nightly["schedules"]] == ["0 2 * * *"]
    assert nightly["parameters"] == {"scale": "nightly"}
    assert nightly["global_concurrency_limit"]["limit"] == 1


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("scale", "hugee", "micro"), ("until", "lunch", "release_model"), ("store", "artifacts", "s3://")],
)
def test_a_wrong_choice_is_refused_before_a_run_exists(name, value, allowed, deployed):
    with pytest.raises(ValueError, match=rf"{value}.*{allowed}"):
        deployed.start(**{name: value})


def test_a_missing_directory_fails_at_once_and_says_so(deployed, tmp_path):
    failed = deployed.wait(deployed.start(scale="micro", data=str(tmp_path / "absent")), "Failed")
    assert f"{tmp_path / 'absent'} is not on this machine" in failed["state"]["message"]


def test_a_worker_of_another_home_runs_what_is_requested_for_its_site(deployed, tmp_path):
    """As on a login node: it knows the servers by the file environment.sh only."""
    assert {pool["name"]: pool["type"] for pool in deployed.api("work_pools/filter", {})} == dict.fromkeys(
        ("local", "slurm", "kubernetes"), "process"
    )
    words = " ".join(map(quote, command("worker", "slurm")))
    shell = f". {quote(str(deployed.home))}/run/environment.sh; exec {words}"
    environment = {**os.environ, "GLM46_HOME": str(tmp_path / "site"), "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "wb") as log:
        worker = subprocess.Popen(["sh", "-c", shell], env=environment, stdout=log, stderr=log)
    try:
        here = deployed.start("full-pipeline-slurm", scale="micro", until="prepare_data")
        failed = deployed.wait(here, "Failed")
        assert (
            f"GLM46_HOME is {tmp_path / 'site'}, the servers are those of {deployed.home}"
            in (failed["state"]["message"])
        ), (tmp_path / "log").read_text()
        assert failed["work_pool_name"] == "slurm"
        (named,) = deployed.api("work_pools/slurm/workers/filter", {})
        assert named["name"].startswith("slurm-")
    finally:
        worker.terminate()
        worker.wait(timeout=60)


def test_a_worker_without_servers_or_of_no_site_is_refused_with_the_fix(home, monkeypatch):
    with pytest.raises(ValueError, match="site moon: those with a worker of their own are slurm, kubernetes"):
        become_worker(home, "moon")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(ValueError, match=r"PREFECT_API_URL is not set: source the file run/environment\.sh"):
        become_worker(home, "slurm")


@pytest.mark.long
def test_a_killed_flow_run_and_worker_come_back(deployed):
    """Both are killed; `up` starts a worker, keeps the servers, and sets the run to Crashed; retried, it completes
    under its own MLflow run."""
    (schedule,) = deployed.api("deployments/name/glm46/nightly")["schedules"]
    address = f"deployments/{schedule['deployment_id']}/schedules/{schedule['id']}"
    deployed.api(address, {"active": False}, method="PATCH")
    before = deployed.recorded["pids"]
    flow_run = deployed.start(scale="micro", until="prepare_data")
    process = int(deployed.wait(flow_run, "Running")["infrastructure_pid"])
    os.kill(before["worker"], signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
    checked = json.loads(glm46("doctor", "--json", home=deployed.home).stdout)["checks"]
    assert [(check["passed"], check["fix"]) for check in checked if check["name"] in ("servers", "worker")] == [
        (True, ""),
        (False, "glm46 up"),
    ]
    again = deployed.up()
    assert again.exit_code == 0, again.stderr
    after = deployed.recorded["pids"]
    assert {name: after[name] for name in ("prefect", "mlflow")} == {
        name: before[name] for name in ("prefect", "mlflow")
    }
    assert after["worker"] != before["worker"]
    (kept,) = deployed.api("deployments/name/glm46/nightly")["schedules"]
    assert (kept["id"], kept["active"]) == (schedule["id"], False), "paused in the UI"
    assert "retry to continue" in deployed.wait(flow_run, "Crashed")["state"]["message"]
    deployed.api(
        f"flow_runs/{flow_run}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    )
    assert deployed.wait(flow_run, "Completed", "Failed", "Crashed")["state_name"] == "Completed"

    from infra.registry.experiment_tracking import connect, run_ids

    client = connect(deployed.recorded["mlflow"])
    assert [client.get_run(run_id).info.status for run_id in run_ids(client, "glm46.flow_run", flow_run)] == [
        "FINISHED"
    ]


def test_a_run_that_is_cancelled_in_the_ui_ends_in_mlflow_too(deployed):
    from infra.registry.experiment_tracking import connect, run_ids

    client = connect(deployed.recorded["mlflow"])
    flow_run = deployed.start(scale="micro", until="prepare_data")
    wait_for(lambda: run_ids(client, "glm46.flow_run", flow_run), seconds=120)
    deployed.api(f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    deployed.wait(flow_run, "Cancelled")
    (run,) = [client.get_run(run_id) for run_id in run_ids(client, "glm46.flow_run", flow_run)]
    assert run.info.status == "KILLED" and "was cancelled" in run.data.tags["mlflow.note.content"]


def test_flow_runs_that_fall_silent_are_watched(deployed):
    (automation,) = deployed.api("automations/filter", {})
    assert automation["enabled"] and automation["trigger"]["posture"] == "Proactive"
    assert automation["actions"][0]["state"] == "CRASHED"


def test_a_page_of_another_site_is_not_answered_and_starts_nothing(deployed, tmp_path):
    deployment = deployed.api("deployments/name/glm46/full-pipeline")["id"]
    wanted = {
        "job_variables": {"command": f"touch {tmp_path / 'run'}"},
        "state": {"type": "SCHEDULED"},
        "parameters": {"scale": "micro"},
    }
    for path, body in (("deployments/filter", {}), (f"deployments/{deployment}/create_flow_run", wanted)):
        with pytest.raises(ValueError, match="Unauthorized"):
            deployed.api(path, body, Origin="https://evil.example")
    for origin, allowed in (("https://evil.example", None), (f"http://127.0.0.1:{deployed.ports[0]}",) * 2):
        asked = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert (
            answer_headers("OPTIONS", f"{deployed.recorded['prefect']}/api/deployments/filter", asked).get(
                "Access-Control-Allow-Origin"
            )
            == allowed
        )
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            question = f"{deployed.recorded['mlflow']}/api/2.0/mlflow/experiments/search"
            urllib.request.urlopen(
                urllib.request.Request(question, b"{}", {"Content-Type": "application/json", **headers}), timeout=30
            )


@pytest.mark.parametrize(
    "variables", [{"command": "true"}, {"env": {"PATH": "/"}}, {"env.PATH": "/"}, {"working_dir": "/"}]
)
def test_a_run_cannot_name_its_command_or_environment(deployed, variables):
    deployment = deployed.api("deployments/name/glm46/full-pipeline")["id"]
    with pytest.raises(ValueError, match="Additional properties are not allowed"):
        deployed.api(
            f"deployments/{deployment}/create_flow_run", {"job_variables": variables, "parameters": {"scale": "micro"}}
        )


def test_other_users_can_read_neither_password_nor_databases_and_no_log_holds_it(deployed):
    modes = {name: (deployed.home / name).stat().st_mode & 0o777 for name in (".", "run", "prefect")}
    assert set(modes.values()) == {0o700}
    private = [
        "prefect/password",
        "prefect/prefect.db",
        "mlflow/mlflow.db",
        "run/environment.sh",
        "run/prefect.log",
        "run/worker.log",
    ]
    assert {(deployed.home / name).stat().st_mode & 0o777 for name in private} == {0o600}
    token = deployed.password.partition(":")[2].encode()
    assert len(token) >= 40
    holders = {
        path.relative_to(deployed.home).as_posix()
        for path in deployed.home.rglob("*")
        if path.is_file() and token in path.read_bytes()
    }
    assert holders == {"prefect/password", "run/environment.sh"}
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if token.decode() in command]


def test_another_shell_takes_its_settings_from_the_file_that_up_names(deployed):
    printed = deployed.up().stdout.splitlines()[-1].partition(" && ")[0]
    script = f"{printed}; exec '{sys.executable}' -m prefect deployment ls"
    listed = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert listed.returncode == 0 and "glm46/full-pipeline" in listed.stdout, listed.stderr


def answer_headers(method: str, url: str, headers: dict[str, str]) -> Any:
    """Headers of an answer, refused or not."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=30) as answer:
            return answer.headers
    except urllib.error.HTTPError as error:
        return error.headers


def test_a_port_in_use_names_who_has_it(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} .* process {os.getpid()}"):
            take_port(port)
        finished = glm46("up", "--prefect-port", str(port), home=tmp_path)
    assert (finished.exit_code, "Traceback" in finished.stderr) == (1, False)
    assert f"port {port}" in finished.stderr and not (tmp_path / "run" / "servers.json").exists()


def test_another_kind_of_database_is_refused_without_its_password(monkeypatch):
    monkeypatch.setenv(MLFLOW_DATABASE, "mysql://user:secret@host/db")
    with pytest.raises(ValueError, match="must be postgresql://") as error:
        mlflow_database(Home(Path("/absent")))
    assert "secret" not in str(error.value)


def test_each_server_is_given_the_ssl_mode_in_the_word_of_its_driver(monkeypatch):
    """As the addresses of managed databases end."""
    for variable in (PREFECT_DATABASE, MLFLOW_DATABASE):
        monkeypatch.setenv(variable, "postgresql://u:p@db/runs?application_name=x&sslmode=require")
    home = Home(Path("/absent"))
    assert prefect_database(home).uri == "postgresql+asyncpg://u:p@db/runs?application_name=x&ssl=require"
    assert mlflow_database(home).uri == "postgresql+psycopg2://u:p@db/runs?application_name=x&sslmode=require"


@pytest.mark.long
@needs_postgres
def test_postgres_by_url_and_its_password_is_written_nowhere(tmp_path_factory):
    up = Deployed(tmp_path_factory.mktemp("on-postgres") / "home", (free_port(), free_port()))
    with postgres(tmp_path_factory.mktemp("postgres"), "prefect", "mlflow") as (prefect, mlflow):
        urls = {PREFECT_DATABASE: f"{prefect}?sslmode=prefer", MLFLOW_DATABASE: f"{mlflow}?sslmode=prefer"}
        try:
            started = glm46(
                "up", "--prefect-port", str(up.ports[0]), "--mlflow-port", str(up.ports[1]), home=up.home, **urls
            )
            assert started.exit_code == 0, started.stderr
            assert up.api("deployments/name/glm46/nightly")["name"] == "nightly"
            assert not list(up.home.rglob("*.db"))
            assert not [
                path for path in up.home.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()
            ]
            commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
            assert not [command for command in commands if PASSWORD in command]
        finally:
            glm46("down", home=up.home)
