"""`glm46 up`, its deployments and worker: wrong parameters, a worker and a flow run that are killed, a retry, ports in use, passwords."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.child_process import free_port, take_port
from infra.home import Home
from infra.servers import MLFLOW_DATABASE, PREFECT_DATABASE, mlflow_database_uri
from tests.pipeline import glm46

FLOW_TIMEOUT_SECONDS = 240
POSTGRES_BIN = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), None)


@dataclass(frozen=True)
class Deployed:
    """A home whose servers and worker are up."""

    home: Path
    ports: tuple[int, int]

    def up(self):
        return glm46("up", "--prefect-port", str(self.ports[0]), "--mlflow-port", str(self.ports[1]), home=self.home)

    @property
    def recorded(self) -> dict[str, Any]:
        return json.loads((self.home / "run" / "servers.json").read_text())

    def api(self, path: str, body: dict | None = None) -> Any:
        """One request to Prefect; a refused one raises ValueError with the server's words."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[0]}/api/{path}", headers={"Content-Type": "application/json"},
            data=None if body is None else json.dumps(body).encode(),
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def start(self, **parameters: str) -> str:
        """Id of a new run of glm46/full-pipeline."""
        deployment = self.api("deployments/name/glm46/full-pipeline")["id"]
        return self.api(f"deployments/{deployment}/create_flow_run", {"parameters": parameters, "enforce_parameter_schema": True})["id"]

    def wait(self, flow_run: str, *states: str) -> dict[str, Any]:
        """The flow run once it is in one of the states."""
        deadline = time.monotonic() + FLOW_TIMEOUT_SECONDS
        while True:
            found = self.api(f"flow_runs/{flow_run}")
            if found["state_name"] in states:
                return found
            assert time.monotonic() < deadline, (found["state"], (self.home / "run" / "worker.log").read_text()[-3000:])
            time.sleep(0.5)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    up = Deployed(tmp_path_factory.mktemp("deployed") / "home", (free_port(), free_port()))
    started = up.up()
    assert started.exit_code == 0, started.stderr
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


@pytest.mark.parametrize(("name", "value", "allowed"), [("scale", "hugee", "micro"), ("until", "lunch", "release_model")])
def test_a_wrong_choice_is_refused_before_a_run_exists(name, value, allowed, deployed):
    with pytest.raises(ValueError, match=rf"{value}.*{allowed}"):
        deployed.start(**{name: value})


def test_a_missing_directory_fails_at_once_and_says_so(deployed, tmp_path):
    failed = deployed.wait(deployed.start(scale="micro", data=str(tmp_path / "absent")), "Failed")
    assert f"{tmp_path / 'absent'} is not a directory of this machine" in failed["state"]["message"]


def test_a_killed_flow_run_and_worker_come_back(deployed):
    """Both are killed; `up` starts a worker, leaves the servers, and crashes the run; retried, it completes under its own MLflow run."""
    before = deployed.recorded["pids"]
    flow_run = deployed.start(scale="micro", until="prepare_data")
    process = int(deployed.wait(flow_run, "Running")["infrastructure_pid"])
    os.kill(before["worker"], signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
    again = deployed.up()
    assert again.exit_code == 0, again.stderr
    after = deployed.recorded["pids"]
    assert {name: after[name] for name in ("prefect", "mlflow")} == {name: before[name] for name in ("prefect", "mlflow")}
    assert after["worker"] != before["worker"]
    assert "retry to continue" in deployed.wait(flow_run, "Crashed")["state"]["message"]
    deployed.api(f"flow_runs/{flow_run}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True})
    assert deployed.wait(flow_run, "Completed", "Failed", "Crashed")["state_name"] == "Completed"

    from infra.experiment_tracking import connect, run_ids

    client = connect(deployed.recorded["mlflow"])
    assert [client.get_run(run_id).info.status for run_id in run_ids(client, "glm46.flow_run", flow_run)] == ["FINISHED"]


def test_flow_runs_that_fall_silent_are_watched(deployed):
    (automation,) = deployed.api("automations/filter", {})
    assert automation["enabled"] and automation["trigger"]["posture"] == "Proactive"
    assert automation["actions"][0]["state"] == "CRASHED"


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
        mlflow_database_uri(Home(Path("/absent")))
    assert "secret" not in str(error.value)


@pytest.mark.long
@pytest.mark.skipif(POSTGRES_BIN is None or os.getuid() != 0, reason="needs Postgres, started as its own user")
def test_postgres_by_url_and_its_password_is_written_nowhere(tmp_path_factory):
    assert POSTGRES_BIN is not None
    root, port = tmp_path_factory.mktemp("postgres"), free_port()
    for directory in (root, *list(root.parents)[:2]):
        directory.chmod(0o755)
    (root / "password").write_text("geheim9")
    shutil.chown(root, "postgres")
    user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    initialise = ["initdb", "-D", root / "data", "-U", "glm46", "-A", "scram-sha-256", f"--pwfile={root / 'password'}", "-N"]
    subprocess.run([*user, POSTGRES_BIN / initialise[0], *initialise[1:]], **quiet)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={root} -c fsync=off -c max_connections=200"
    subprocess.run([*user, POSTGRES_BIN / "pg_ctl", "-D", root / "data", "-w", "-l", root / "log", "-o", options, "start"], **quiet)
    up = Deployed(tmp_path_factory.mktemp("on-postgres") / "home", (free_port(), free_port()))
    urls = {}
    try:
        for variable, name in ((PREFECT_DATABASE, "prefect"), (MLFLOW_DATABASE, "mlflow")):
            arguments = ["-h", "127.0.0.1", "-p", str(port), "-U", "glm46", name]
            subprocess.run([POSTGRES_BIN / "createdb", *arguments], env={"PGPASSWORD": "geheim9"}, **quiet)
            urls[variable] = f"postgresql://glm46:geheim9@127.0.0.1:{port}/{name}"
        started = glm46("up", "--prefect-port", str(up.ports[0]), "--mlflow-port", str(up.ports[1]), home=up.home, **urls)
        assert started.exit_code == 0, started.stderr
        assert up.api("deployments/name/glm46/nightly")["name"] == "nightly"
        assert not list(up.home.rglob("*.db"))
        assert not [path for path in up.home.rglob("*") if path.is_file() and b"geheim9" in path.read_bytes()]
        commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        assert not [command for command in commands if "geheim9" in command]
    finally:
        glm46("down", home=up.home)
        subprocess.run([*user, POSTGRES_BIN / "pg_ctl", "-D", root / "data", "-m", "immediate", "stop"], **quiet)
