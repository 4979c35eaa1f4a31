"""A server is dead when its process has ended, never because it answers late: what lives is waited for and kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from queue import Queue
from unittest.mock import patch

import pytest
import typer
from prefect.exceptions import Abort

from flows import full_pipeline
from flows.cli import deployment, run_pipeline
from flows.cli.command_errors import failures
from flows.cli.deployment import bring_down, bring_up
from flows.cli.run_pipeline import say_unused_servers
from infra.child_process import free_port
from infra.servers import server_answers
from infra.servers.recorded_servers import (
    ServerUrls,
    forget,
    lasting_mlflow,
    log_path,
    read_recorded,
    read_servers_file,
    record,
    recorded_process,
)
from infra.servers.server_password import SERVER_HOME
from infra.servers.servers import Server, exclusive, running_servers, wait_until_healthy

ANSWERS_ALL = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    do_POST = do_GET
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
SILENT_SECONDS = 1.5


def begin(home, *command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, env={**os.environ, "GLM46_HOME": str(home.root)}, stderr=subprocess.DEVNULL, start_new_session=True
    )
    # Popen returns when exec closes a file, which is before /proc shows the new environment.
    while process.poll() is None and recorded_process(process.pid, home) is None:
        time.sleep(0.001)
    return process


def answering(home, port: int) -> subprocess.Popen[bytes]:
    return begin(home, sys.executable, "-c", ANSWERS_ALL, str(port))


@pytest.fixture
def recorded(home, monkeypatch):
    """Two servers and a worker, recorded as by `glm46 up`."""
    monkeypatch.setattr(server_answers, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(server_answers, "SLOW_SECONDS", 0.5)
    ports = {"prefect": free_port(), "mlflow": free_port()}
    processes = {name: answering(home, port) for name, port in ports.items()} | {"worker": begin(home, "sleep", "600")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    record(home, ServerUrls(**urls, pids={name: process.pid for name, process in processes.items()}))
    for name in ports:
        log_path(home, name).touch()
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("command", ["run", "up"])
@pytest.mark.parametrize("server", ["prefect", "mlflow"])
def test_a_server_that_answers_late_is_waited_for_and_nothing_is_ended(server, command, recorded, home, capfd):
    os.kill(recorded[server].pid, signal.SIGSTOP)
    awake = threading.Timer(SILENT_SECONDS, partial(os.kill, recorded[server].pid, signal.SIGCONT))
    awake.start()
    with patch.dict(os.environ):
        if command == "run":
            with running_servers(home, print) as used:
                assert used == read_recorded(home)
        else:
            assert bring_up(home, free_port(), free_port()) == read_recorded(home)
    assert (
        f"the {server} server of {home.root} lives, but has not answered for 0.5 s; waiting" in capfd.readouterr().out
    )
    assert not awake.is_alive() and [process.poll() for process in recorded.values()] == [None] * 3


def test_a_command_waits_for_the_run_that_has_the_servers_and_then_uses_what_it_finds(recorded, home):
    urls, said = read_recorded(home), Queue()
    forget(home)
    with ThreadPoolExecutor(1) as waiting, ExitStack() as held:
        held.enter_context(exclusive(home, pytest.fail))

        def use() -> ServerUrls:
            with running_servers(home, said.put) as used:
                return used

        second = waiting.submit(use)
        assert said.get(timeout=20) == f"another run has the servers of {home.root}; waiting for it to end"
        record(home, urls)
        held.close()
        assert second.result(timeout=20) == urls and said.empty()


def test_a_server_that_never_answers_ends_the_command_and_not_the_server(recorded, home, monkeypatch):
    monkeypatch.setattr(server_answers, "ANSWER_SECONDS", 1)
    os.kill(recorded["mlflow"].pid, signal.SIGSTOP)
    said = r"the mlflow server lives, but did not answer within 1 s: run again when .* after `glm46 down`"
    with pytest.raises(RuntimeError, match=said), running_servers(home, print):
        pass
    assert [process.poll() for process in recorded.values()] == [None] * 3


def test_a_recorded_server_that_ends_during_a_run_is_named_at_once(recorded, home):
    """Prefect's client asks it again for minutes; one that is started meanwhile at the same address answers."""
    said: Queue[str] = Queue()
    with running_servers(home, said.put) as used:
        recorded["prefect"].kill()
        recorded["prefect"].wait()
        sentence = said.get(timeout=20)
    assert sentence.startswith(f"the prefect server of `glm46 up` has ended ({home.run_dir / 'prefect.log'}): this run")
    assert sentence.endswith(f"unless `glm46 up` starts it again at {used.prefect} and {used.mlflow}")


def test_beside_one_living_server_no_private_one_opens_its_database(recorded, home):
    recorded["mlflow"].kill()
    recorded["mlflow"].wait()
    with pytest.raises(ValueError, match=r"the mlflow server of `glm46 up` has ended .*mlflow\.log.*`glm46 down` ends"):
        running_servers(home, print).__enter__()
    assert bring_down(home) == 2 and read_recorded(home) is None


def test_servers_are_recorded_before_they_answer(home, monkeypatch):
    """So `glm46 down` finds them where `glm46 up` was killed in between; where it fails, it ends them itself."""
    ports = {"prefect": free_port(), "mlflow": free_port()}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    servers = [
        Server(name, url, pytest.fail, begin(home, "sleep", "600"), log_path(home, name)) for name, url in urls.items()
    ]
    found = []

    def fail(*arguments: object) -> ServerUrls:
        found.append(read_recorded(home))
        raise RuntimeError("the mlflow server has ended")

    monkeypatch.setattr(deployment, "start_servers", lambda *arguments, **named: servers)
    monkeypatch.setattr(deployment, "wait_until_healthy", fail)
    with patch.dict(os.environ), pytest.raises(RuntimeError, match="the mlflow server has ended"):
        bring_up(home, *ports.values())
    pids = {server.name: server.process.pid for server in servers}
    assert found == [ServerUrls(**urls, pids=pids)] and read_servers_file(home) is None
    assert all(server.process.poll() is not None for server in servers)


def test_a_server_killed_while_it_starts_is_started_again_and_one_that_gives_up_is_not(home):
    ports, said = (free_port(), free_port()), []
    killed, gives_up = begin(home, "sh", "-c", "kill -9 $$"), begin(home, "sh", "-c", "exit 3")
    for process in (killed, gives_up):
        process.wait()
    logs = {name: log_path(home, name) for name in ("prefect", "mlflow")}
    logs["prefect"].touch()
    logs["mlflow"].write_text("why it gave up")
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    first = Server("prefect", urls[0], partial(answering, home, ports[0]), killed, logs["prefect"])
    second = Server("mlflow", urls[1], partial(answering, home, ports[1]), answering(home, ports[1]), logs["mlflow"])
    servers = [first, second]
    try:
        started = wait_until_healthy(home, servers, said.append)
        assert said == ["the prefect server was killed by signal 9 while it started: it is started again"]
        assert started.pids == {server.name: server.process.pid for server in servers} and servers[0] is not first
        urllib.request.urlopen(urls[0], timeout=10).close()
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
    ended = [Server("mlflow", f"http://127.0.0.1:{free_port()}", pytest.fail, gives_up, logs["mlflow"])]
    with pytest.raises(
        RuntimeError, match=r"(?s)the mlflow server has ended: run again .*mlflow\.log:\nwhy it gave up"
    ):
        wait_until_healthy(home, ended, said.append)


def test_pages_of_a_private_mlflow_are_linked_where_up_shows_them(home, monkeypatch):
    private, lasting = "http://127.0.0.1:41234", ServerUrls(prefect="http://127.0.0.1:1", mlflow="http://b:2", pids={})
    assert lasting_mlflow(home, private) == private  # not of this home: of the site whose worker runs here
    monkeypatch.setenv(SERVER_HOME, str(home.root))
    assert lasting_mlflow(home, private) == "http://127.0.0.1:5000"
    record(home, lasting)
    assert lasting_mlflow(home, lasting.mlflow) == lasting.mlflow
    assert lasting_mlflow(home, private) == "http://127.0.0.1:5000"  # those of the file have ended


@pytest.mark.parametrize("text", ["", '{"prefect": 1}'])
def test_a_damaged_file_of_servers_is_named_with_the_fix(text, home):
    path = home.run_dir / "servers.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path} is damaged \(.*end those processes .* remove the file"):
        bring_down(home)


def test_servers_of_the_shell_that_a_run_does_not_use_are_named_without_a_password(home, monkeypatch, capsys):
    own = ServerUrls(prefect="http://127.0.0.1:1", mlflow="http://127.0.0.1:2", pids={})
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api/")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example")
    say_unused_servers(home, own)
    said = capsys.readouterr().err
    assert said == f"MLFLOW_TRACKING_URI is not used: runs of {home.root} are kept by its own server, {own.mlflow}\n"


def test_a_run_that_prefects_server_aborts_ends_with_its_reason(home, monkeypatch, capsys):
    """As where its database finds no room for temporary files. The abort is no Exception."""

    def aborted(**given) -> None:
        raise Abort("database or disk is full")

    monkeypatch.setattr(full_pipeline, "full_pipeline", aborted)
    monkeypatch.setattr(run_pipeline, "running_servers", lambda *given: nullcontext(read_servers_file(home)))
    with pytest.raises(typer.Exit), failures(home):
        run_pipeline.run_pipeline(home, "micro", None, None, None, None, None)
    assert "no space left on" in capsys.readouterr().err


def test_two_servers_are_given_two_ports(home):
    with pytest.raises(ValueError, match="--prefect-port and --mlflow-port are both 4200: name two ports"):
        bring_up(home, 4200, 4200)
