"""The Prefect and MLflow servers of a home: those in run/servers.json that live, else private ones for one run.

Both bind to loopback. Prefect's API asks for a password (infra/servers/server_password.py), since its worker starts
programs. MLflow answers no request with a foreign Host or Origin. Private servers end with the process that started
them. Only one process at a time may have them: an exclusive lock on the home makes a second run wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from infra.child_process import die_with_parent, free_port
from infra.failure_webhook import failure, post_failure
from infra.file_lock import locked
from infra.home import Home, private_file
from infra.servers.databases import mlflow_database, open_databases, prefect_database
from infra.servers.recorded_servers import ServerUrls, ended_servers, log_path, read_recorded, refuse_half
from infra.servers.server_answers import ask_databases, wait_for_answer, wait_for_recorded
from infra.servers.server_password import SERVER_HOME, SERVER_VARIABLE, api_password

HOST = "127.0.0.1"
WATCH_INTERVAL_SECONDS = 0.5
TELEMETRY_OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "GX_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
MAX_STATES_PER_WRITE = 100
HEARTBEAT_SECONDS = 30
"""Seconds between two heartbeats of a flow run: the fewest that Prefect allows."""


@dataclass(frozen=True)
class Server:
    """One server process while it starts."""

    name: str
    url: str
    begin: Callable[[], subprocess.Popen[bytes]]
    """Starts its process."""
    process: subprocess.Popen[bytes]
    log_path: Path


def artifact_root(home: Home) -> Path:
    """Directory that `mlflow-artifacts:/` names."""
    return home.mlflow_dir / "artifacts"


def tracking_uri() -> str:
    """URI of the MLflow server that this process was given. Raises ValueError where none was."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ValueError(
            "MLFLOW_TRACKING_URI is not set: start the pipeline with `glm46 run`, or set it to the URI of an MLflow "
            "server"
        )
    return uri


def refuse_unlinkable_weights(home: Home, store_uri: str) -> None:
    """Raises ValueError where a version's weights could not be registered: MLflow reads them in S3, or in the home of
    its server, where they are linked."""
    server_home = os.environ.get(SERVER_HOME, str(home.root))
    if not home.is_at(server_home) and not store_uri.startswith("s3://"):
        raise ValueError(
            f"GLM46_HOME is {home.root}, the servers are those of {server_home}: name a store that both reach "
            f"(store s3://bucket/prefix), or set GLM46_HOME of this worker to {server_home}, mounted here"
        )


@contextmanager
def running_servers(
    home: Home, say: Callable[[str], None], prepare: Callable[[ServerUrls], None] = lambda urls: None
) -> Iterator[ServerUrls]:
    """URLs of servers that answer: recorded ones, or private ones that end with the block. `prepare` is called once
    with the URLs, while private servers start. Raises ValueError where one of the recorded servers has ended and the
    other lives, RuntimeError where one does not answer."""
    recorded = read_recorded(home)
    if recorded is None:
        with exclusive(home, say):
            recorded = read_recorded(home)  # perhaps it was `glm46 up` that was waited for
            if recorded is None:
                refuse_half(home)
                with _private_servers(home, say, prepare) as urls:
                    yield urls
                return
    wait_for_recorded(home, recorded, say)
    prepare(recorded)
    is_over = threading.Event()
    threading.Thread(target=_say_when_one_ends, args=(home, recorded, say, is_over), daemon=True).start()
    try:
        yield recorded
    finally:
        is_over.set()


def _say_when_one_ends(home: Home, urls: ServerUrls, say: Callable[[str], None], is_over: threading.Event) -> None:
    """Prefect's client asks an ended server again for minutes, without a word; one that is started meanwhile
    answers."""
    while not is_over.wait(WATCH_INTERVAL_SECONDS):
        if ended := ended_servers(home, urls):
            logs = ", ".join(str(log_path(home, name)) for name in ended)
            say(
                f"the {' and '.join(ended)} server of `glm46 up` has ended ({logs}): this run fails when it next "
                f"needs it, unless `glm46 up` starts it again at {urls.prefect} and {urls.mlflow}"
            )
            return


@contextmanager
def _private_servers(
    home: Home, say: Callable[[str], None], prepare: Callable[[ServerUrls], None]
) -> Iterator[ServerUrls]:
    servers = start_servers(home, free_port(), free_port(), detached=False)
    is_over = threading.Event()
    try:
        prepare(urls_of(servers))
        urls = wait_until_healthy(home, servers, say)
        threading.Thread(target=_leave_when_one_dies, args=(servers, is_over), daemon=True).start()
        yield urls
    finally:
        is_over.set()
        stop_servers(servers)


def _leave_when_one_dies(servers: list[Server], is_over: threading.Event) -> None:
    """End the process with a clear message: nothing can be recorded any more, and clients would try again for
    minutes."""
    while not is_over.wait(WATCH_INTERVAL_SECONDS):
        for server in servers:
            if server.process.poll() is not None and not is_over.is_set():
                reason = f"the {server.name} server stopped during the run ({server.log_path}): run again to continue"
                print(f"\nglm46: {reason}", file=sys.stderr, flush=True)
                post_failure(failure("Crashed", "", "", {}, reason), partial(print, file=sys.stderr, flush=True))
                os._exit(1)


def start_servers(home: Home, prefect_port: int, mlflow_port: int, detached: bool) -> list[Server]:
    """Start both servers on the home's databases and return at once; detached ones outlive this process.

    Each has a session of its own, so that Ctrl-C and a closed terminal reach only the run, which still needs the
    servers to end. Raises ValueError for a database that cannot be used.
    """
    open_databases(home)
    artifact_root(home).mkdir(parents=True, exist_ok=True)
    prefect_url, mlflow_url = f"http://{HOST}:{prefect_port}", f"http://{HOST}:{mlflow_port}"
    prefect = _start(
        "prefect",
        "prefect.server.api.server:create_app",
        ["--factory"],
        prefect_url,
        home,
        detached,
        {
            "PREFECT_HOME": str(home.prefect_dir),
            "PREFECT_UI_API_URL": f"{prefect_url}/api",
            "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": prefect_database(home).uri,
            SERVER_VARIABLE: api_password(home),
            # One transaction per second for the states of tasks, not one per state: a third of the server's work.
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": str(MAX_STATES_PER_WRITE),
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{prefect_url},http://localhost:{prefect_port}",
        },
    )
    mlflow = _start(
        "mlflow",
        "mlflow.server.fastapi_app:app",
        [],
        mlflow_url,
        home,
        detached,
        {
            # what `mlflow server --serve-artifacts` hands to its own uvicorn child (mlflow/server/__init__.py,
            # _run_server)
            "_MLFLOW_SERVER_FILE_STORE": mlflow_database(home).uri,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(artifact_root(home)),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SGI_NAME": "uvicorn",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        },
    )
    return [prefect, mlflow]


def _start(
    name: str, app: str, options: list[str], url: str, home: Home, detached: bool, env: Mapping[str, str]
) -> Server:
    log = private_file(log_path(home, name))
    command = [sys.executable, "-m", "uvicorn", app, *options, "--host", HOST]
    command += ["--port", url.rsplit(":", 1)[1], "--log-level", "warning"]

    environment = {**os.environ, **TELEMETRY_OFF, "GLM46_HOME": str(home.root), **env}

    def begin() -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=home.root,
                preexec_fn=None if detached else die_with_parent,
                start_new_session=True,
                env=environment,
            )

    return Server(name, url, begin, begin(), log)


def wait_until_healthy(home: Home, servers: list[Server], say: Callable[[str], None]) -> ServerUrls:
    """Block until every server answers, from its database too. One that is killed meanwhile is started again, once, and
    replaced in the list; `say` gets that. Raises RuntimeError with the log's end if one ends or does not answer."""
    for number, server in enumerate(servers):
        try:
            _wait_for(home, server)
        except RuntimeError:
            killed_by = -(server.process.poll() or 0)
            if killed_by <= 0:
                raise
            say(f"the {server.name} server was killed by signal {killed_by} while it started: it is started again")
            servers[number] = replace(server, process=server.begin())
            _wait_for(home, servers[number])
    urls = urls_of(servers)
    ask_databases(home, urls)
    return urls


def _wait_for(home: Home, server: Server) -> None:
    wait_for_answer(home, server.name, server.url, lambda: server.process.poll() is not None)


def urls_of(servers: list[Server]) -> ServerUrls:
    """Addresses and processes of started servers."""
    addresses = {server.name: server.url for server in servers}
    return ServerUrls(**addresses, pids={server.name: server.process.pid for server in servers})


def stop_servers(servers: list[Server]) -> None:
    """End the servers; their databases stay."""
    for server in servers:
        server.process.terminate()
    for server in servers:
        try:
            server.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def exclusive(home: Home, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Take the exclusive right to start servers on the home's databases; waits for a run that has private ones."""
    return locked(
        home.run_dir / "servers.lock", say, f"another run has the servers of {home.root}; waiting for it to end"
    )
