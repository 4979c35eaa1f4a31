"""The Prefect and MLflow servers of a home: those in run/servers.json that answer, else private ones for one run.

Both bind to loopback. Prefect's API asks for a password (infra/servers/server_password.py), since its worker starts
programs. MLflow answers no request with a foreign Host or Origin. Private servers end with the process that started
them. Only one process at a time may have them: an exclusive lock on the home makes a second run wait.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel

from configs.files.atomic_files import replace_durably
from infra.child_process import die_with_parent, free_port
from infra.file_lock import locked
from infra.home import Home, private_file
from infra.servers.databases import databases, mlflow_database, open_databases, prefect_database
from infra.servers.server_password import SERVER_HOME, SERVER_VARIABLE, api_password, environment_path

HOST = "127.0.0.1"
WORKER = "worker"
STARTUP_TIMEOUT_SECONDS = 180
WATCH_INTERVAL_SECONDS = 0.5
ANSWER_TIMEOUT_SECONDS = 120
"""MLflow creates its tables at the first request."""
QUESTIONS = {"prefect": ("/api/flows/count", {}), "mlflow": ("/api/2.0/mlflow/experiments/search", {"max_results": 1})}
"""A request for each server that reads its database; the health checks do not read it."""
TELEMETRY_OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "GX_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
HEARTBEAT_SECONDS = 30
"""Seconds between two heartbeats of a flow run: the fewest that Prefect allows."""


class ServerUrls(BaseModel):
    """Where the servers of a home listen, and their processes."""

    prefect: str
    """Base URL; the API is below /api."""
    mlflow: str
    pids: dict[str, int]
    """Process id by name: prefect, mlflow, and worker where `glm46 up` started one."""


@dataclass(frozen=True)
class Server:
    """One server process while it starts."""

    name: str
    url: str
    health_path: str
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
    if server_home != str(home.root) and not store_uri.startswith("s3://"):
        raise ValueError(
            f"GLM46_HOME is {home.root}, the servers are those of {server_home}: name a store that both reach "
            f"(store s3://bucket/prefix), or set GLM46_HOME of this worker to {server_home}, mounted here"
        )


@contextmanager
def running_servers(
    home: Home, say: Callable[[str], None], prepare: Callable[[ServerUrls], None] = lambda urls: None
) -> Iterator[ServerUrls]:
    """URLs of servers that answer: recorded ones, or private ones that end with the block. `prepare` is called once
    with the URLs, while private servers start."""
    recorded = read_recorded(home)
    if recorded is None:
        with exclusive(home, say):
            recorded = read_recorded(home)  # perhaps it was `glm46 up` that was waited for
            if recorded is None:
                with _private_servers(home, prepare) as urls:
                    yield urls
                return
    ask_databases(home, recorded)
    prepare(recorded)
    yield recorded


@contextmanager
def _private_servers(home: Home, prepare: Callable[[ServerUrls], None]) -> Iterator[ServerUrls]:
    servers = start_servers(home, free_port(), free_port(), detached=False)
    is_over = threading.Event()
    try:
        prepare(_urls_of(servers))
        urls = wait_until_healthy(home, servers)
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
                print(
                    f"\nglm46: the {server.name} server stopped during the run ({server.log_path}): run again to "
                    f"continue",
                    file=sys.stderr,
                )
                sys.stderr.flush()
                os._exit(1)


def read_recorded(home: Home) -> ServerUrls | None:
    """The servers that run/servers.json names, if both answer."""
    urls = read_servers_file(home)
    return None if urls is None or silent_servers(urls) else urls


def read_servers_file(home: Home) -> ServerUrls | None:
    """The servers that run/servers.json names, whether they run or not."""
    path = _servers_path(home)
    return ServerUrls.model_validate_json(path.read_text()) if path.exists() else None


def _servers_path(home: Home) -> Path:
    return home.run_dir / "servers.json"


def silent_servers(urls: ServerUrls) -> list[str]:
    """Names of the servers that do not answer."""
    checks = {"prefect": f"{urls.prefect}/api/health", "mlflow": f"{urls.mlflow}/health"}
    return [name for name, url in checks.items() if not _healthy(url)]


def recorded_process(pid: int, home: Home) -> psutil.Process | None:
    """The recorded process, unless it has ended or another process has its id."""
    try:
        process = psutil.Process(pid)
        is_ours = process.environ().get("GLM46_HOME") == str(home.root) and process.status() != psutil.STATUS_ZOMBIE
        return process if is_ours else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def worker_lives(home: Home, urls: ServerUrls) -> bool:
    """Whether the worker that `glm46 up` started runs: without it requested runs stay in state Late."""
    return WORKER in urls.pids and recorded_process(urls.pids[WORKER], home) is not None


def record(home: Home, urls: ServerUrls) -> None:
    """Write run/servers.json: from here on every command of this home uses these servers."""
    replace_durably(_servers_path(home), urls.model_dump_json(indent=1).encode())


def forget(home: Home) -> None:
    """Remove run/servers.json: from here on every run has private servers."""
    _servers_path(home).unlink(missing_ok=True)
    environment_path(home).unlink(missing_ok=True)


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
        "/api/health",
        home,
        detached,
        {
            "PREFECT_HOME": str(home.prefect_dir),
            "PREFECT_UI_API_URL": f"{prefect_url}/api",
            "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": prefect_database(home).uri,
            SERVER_VARIABLE: api_password(home),
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{prefect_url},http://localhost:{prefect_port}",
        },
    )
    mlflow = _start(
        "mlflow",
        "mlflow.server.fastapi_app:app",
        [],
        mlflow_url,
        "/health",
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
    name: str,
    app: str,
    options: list[str],
    url: str,
    health_path: str,
    home: Home,
    detached: bool,
    env: Mapping[str, str],
) -> Server:
    log_path = home.run_dir / f"{name}.log"
    command = [sys.executable, "-m", "uvicorn", app, *options, "--host", HOST]
    command += ["--port", url.rsplit(":", 1)[1], "--log-level", "warning"]
    with open(private_file(log_path), "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.root,
            preexec_fn=None if detached else die_with_parent,
            start_new_session=True,
            env={**os.environ, **TELEMETRY_OFF, "GLM46_HOME": str(home.root), **env},
        )
    return Server(name, url, health_path, process, log_path)


def wait_until_healthy(home: Home, servers: list[Server]) -> ServerUrls:
    """Block until every server answers, from its database too. Raises RuntimeError with the log's end if one ends or
    does not answer."""
    deadline = time.monotonic() + STARTUP_TIMEOUT_SECONDS
    for server in servers:
        while not _healthy(server.url + server.health_path):
            if server.process.poll() is not None or time.monotonic() > deadline:
                last_lines = "\n".join(server.log_path.read_text(errors="replace").splitlines()[-8:])
                state = (
                    "stopped"
                    if server.process.poll() is not None
                    else f"did not answer within {STARTUP_TIMEOUT_SECONDS} s"
                )
                raise RuntimeError(f"the {server.name} server {state}; the end of {server.log_path}:\n{last_lines}")
            time.sleep(0.1)
    urls = _urls_of(servers)
    ask_databases(home, urls)
    return urls


def _urls_of(servers: list[Server]) -> ServerUrls:
    addresses = {server.name: server.url for server in servers}
    return ServerUrls(**addresses, pids={server.name: server.process.pid for server in servers})


def ask_databases(home: Home, urls: ServerUrls) -> None:
    """Ask each server for something that its database holds. Raises RuntimeError naming the database that gives no
    answer."""
    addresses = {"prefect": urls.prefect, "mlflow": urls.mlflow}
    authorization = f"Basic {base64.b64encode(api_password(home).encode()).decode()}"
    for database in databases(home):
        path, body = QUESTIONS[database.server]
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": authorization} if database.server == "prefect" else {}),
        }
        request = urllib.request.Request(addresses[database.server] + path, json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_SECONDS).close()
        except OSError as error:
            log = home.run_dir / f"{database.server}.log"
            raise RuntimeError(
                f"the {database.server} server answers, but not from its database ({error}; {log}): {database.fix}"
            ) from error


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


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
