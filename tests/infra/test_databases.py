"""A database that cannot be used ends a command within seconds, with one sentence that names it and the fix."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import threading
import time
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from flows.cli.run_pipeline import _blame_servers
from infra.child_process import free_port
from infra.machine import doctor
from infra.servers import server_answers
from infra.servers.databases import MLFLOW_DATABASE, PREFECT_DATABASE, databases, open_databases
from infra.servers.loopback import DIRECT, exports, reach_loopback_directly
from infra.servers.recorded_servers import ServerUrls
from infra.servers.server_answers import ask_databases
from tests.support.pipeline import glm46

PATIENCE_SECONDS = 60
"""Seconds of a whole command on a busy machine; MLflow's own retries took eight minutes."""


def fill(path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE runs (name TEXT)")
        connection.executemany("INSERT INTO runs VALUES (?)", [(f"run {number}" * 20,) for number in range(2000)])
        connection.commit()


def overwrite(path) -> None:
    path.write_bytes(b"no database at all " * 4096)


def cut_in_half(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_page(path) -> None:
    content = bytearray(path.read_bytes())
    content[8192:12288] = bytes(reversed(content[8192:12288]))
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [overwrite, cut_in_half, flip_a_page])
@pytest.mark.parametrize("server", ["prefect", "mlflow"])
def test_a_damaged_database_is_refused_with_its_file_and_the_fix(server, damage, home):
    path = {database.server: database.path for database in databases(home)}[server]
    fill(path)
    open_databases(home)
    assert path.stat().st_mode & 0o777 == 0o600
    damage(path)
    with pytest.raises(ValueError, match=rf"{server}'s database {path} is damaged .*move {path} away, then run again"):
        open_databases(home)
    checks = {check.name: check for check in doctor.check_machine(home)}
    assert not checks[f"{server} data"].passed and str(path) in checks[f"{server} data"].fix


@pytest.mark.parametrize(("server", "damage"), [("mlflow", overwrite), ("prefect", cut_in_half)])
def test_a_run_on_a_damaged_database_ends_at_once(server, damage, home):
    path = {database.server: database.path for database in databases(home)}[server]
    fill(path)
    damage(path)
    started = time.monotonic()
    finished = glm46("run", "micro", home=home.root)
    assert (finished.exit_code, "Traceback" in finished.stderr) == (1, False)
    assert f"move {path} away" in finished.stderr and len(finished.stderr.splitlines()) == 1
    assert time.monotonic() - started < PATIENCE_SECONDS


@pytest.mark.parametrize("variable", [PREFECT_DATABASE, MLFLOW_DATABASE])
def test_a_postgres_that_does_not_answer_is_refused_without_its_password(variable, home, monkeypatch):
    port = free_port()
    monkeypatch.setenv(variable, f"postgresql://glm46:geheim9@127.0.0.1:{port}/runs")
    with pytest.raises(
        ValueError, match=rf"database at 127.0.0.1:{port} does not answer .*correct {variable}"
    ) as refused:
        open_databases(home)
    assert "geheim9" not in str(refused.value)


@pytest.mark.parametrize(
    "command", [("rollback", "micro", "--reason", "worse"), ("compare", "champion", "--scale", "micro")]
)
def test_a_command_on_the_registry_says_in_a_sentence_that_its_database_does_not_answer(command, home, monkeypatch):
    port = free_port()
    monkeypatch.setenv(MLFLOW_DATABASE, f"postgresql://glm46:geheim9@127.0.0.1:{port}/runs")
    finished = glm46(*command, home=home.root)
    assert finished.exit_code == 2 and len(finished.stderr.splitlines()) == 1
    assert f"mlflow's database at 127.0.0.1:{port} does not answer" in finished.stderr
    assert "geheim9" not in finished.stderr


class AnswersHealthOnly(BaseHTTPRequestHandler):
    """What MLflow's server does after its database was removed."""

    answers: ClassVar[list[int]] = []
    """Codes of the first answers to questions; the others are 500."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.send_response(self.answers.pop(0) if self.answers else 500)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def servers():
    """URLs of a server without its database."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), AnswersHealthOnly)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield ServerUrls(prefect=url, mlflow=url, pids={})
    server.shutdown()


def test_a_server_that_answers_without_its_database_is_named(servers, home):
    with pytest.raises(
        RuntimeError, match=r"the prefect server answers, but not from its database \(.*500.*move .*prefect.db away"
    ):
        ask_databases(home, servers)


def test_a_busy_database_is_asked_again_and_nobody_is_told_to_move_it(servers, home, monkeypatch):
    monkeypatch.setattr(AnswersHealthOnly, "answers", [503, 503, 200, 200])
    ask_databases(home, servers)
    assert not AnswersHealthOnly.answers
    monkeypatch.setattr(AnswersHealthOnly, "answers", [503] * 100)
    monkeypatch.setattr(server_answers, "DATABASE_SECONDS", 0.3)
    with pytest.raises(RuntimeError, match=r"the prefect server did not answer from its database within 0\.3 s: wait"):
        ask_databases(home, servers)


def test_a_run_whose_postgres_died_says_so_and_one_whose_server_died_names_its_log(servers, home, monkeypatch):
    monkeypatch.setenv(MLFLOW_DATABASE, "postgresql://glm46:geheim9@127.0.0.1:1/runs")
    monkeypatch.setattr(AnswersHealthOnly, "answers", [200])
    failed, environment = KeyError("what the flow raised"), {**os.environ, "GLM46_HOME": str(home.root)}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        urls = servers.model_copy(update={"pids": {"prefect": process.pid, "mlflow": process.pid}})
        said = r"mlflow's database at 127.0.0.1:1 does not answer .*: start it, or correct GLM46_MLFLOW_DATABASE_URL"
        with pytest.raises(RuntimeError, match=said) as died:
            _blame_servers(home, urls, failed)
        assert "geheim9" not in str(died.value)
        process.kill()
        process.wait()
        said = (
            rf"prefect and mlflow server stopped during the run \({home.run_dir}/prefect.log, .*\): run again to cont"
        )
        with pytest.raises(RuntimeError, match=said) as died:
            _blame_servers(home, urls, failed)
        assert died.value.__cause__ is failed


@pytest.mark.parametrize("url", ["mlflow:geheim9@db:5432/mlflow", "postgresql://mlflow:ge@geheim9@127.0.0.1:1/runs"])
def test_an_address_that_is_written_wrongly_is_refused_without_its_password(url, home, monkeypatch):
    monkeypatch.setenv(MLFLOW_DATABASE, url)
    with pytest.raises(ValueError, match=rf"{MLFLOW_DATABASE} (must be|has more than one @)") as refused:
        open_databases(home)
    assert "geheim9" not in str(refused.value)


def test_a_proxy_is_not_asked_for_servers_of_this_machine(servers, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in DIRECT:
        monkeypatch.setenv(name, "intranet")
    with pytest.raises(OSError):
        urllib.request.build_opener().open(servers.mlflow)
    reach_loopback_directly()
    assert os.environ["no_proxy"] == "intranet,127.0.0.1,localhost"
    with urllib.request.build_opener().open(servers.mlflow) as answer:
        assert answer.status == 200
    shell = subprocess.run(["sh", "-c", f"{exports()}echo $NO_PROXY"], capture_output=True, text=True, check=True)
    assert shell.stdout.startswith("127.0.0.1,localhost,intranet,")
