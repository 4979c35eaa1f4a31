"""The servers that `glm46 up` started, as run/servers.json names them: they live as long as their processes, whether
they answer at this moment or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from configs.files.atomic_files import replace_durably
from infra.home import Home
from infra.servers.server_password import SERVER_HOME, environment_path

SERVERS = ("prefect", "mlflow")
WORKER = "worker"
PORTS = {"prefect": 4200, "mlflow": 5000}
"""Ports on which `glm46 up` starts its servers by default."""


class ServerUrls(BaseModel):
    """Where the servers of a home listen, and their processes."""

    prefect: str
    """Base URL; the API is below /api."""
    mlflow: str
    pids: dict[str, int]
    """Process id by name: prefect, mlflow, and worker where `glm46 up` started one."""

    def address(self, server: str) -> str:
        """Base URL of a server by name."""
        return {"prefect": self.prefect, "mlflow": self.mlflow}[server]


def read_recorded(home: Home) -> ServerUrls | None:
    """The servers that run/servers.json names, if the processes of both live, whether they answer at this moment or
    not."""
    urls = read_servers_file(home)
    return None if urls is None or ended_servers(home, urls) else urls


def read_servers_file(home: Home) -> ServerUrls | None:
    """The servers that run/servers.json names, whether they run or not. Raises ValueError for a damaged file."""
    path = _servers_path(home)
    with refusing_damage(path):
        return ServerUrls.model_validate_json(path.read_bytes()) if path.exists() else None


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    """Raises ValueError with the fix where a file of processes cannot be read."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(
            f"{path} is damaged ({error.errors()[0]['msg']}): end those processes of `glm46 up` that still run, and "
            f"remove the file"
        ) from error


def lasting_mlflow(home: Home, uri: str) -> str:
    """Address of MLflow's pages after the run that uses the server at `uri`. A private server ends with its run;
    `glm46 up` shows the same pages at its own port."""
    recorded = read_servers_file(home)
    is_private = home.is_at(os.environ.get(SERVER_HOME, "")) and (recorded is None or recorded.mlflow != uri)
    return f"http://127.0.0.1:{PORTS['mlflow']}" if is_private else uri


def log_path(home: Home, server: str) -> Path:
    return home.run_dir / f"{server}.log"


def _servers_path(home: Home) -> Path:
    return home.run_dir / "servers.json"


def ended_servers(home: Home, urls: ServerUrls) -> list[str]:
    """Names of the servers whose process has ended."""
    return [name for name in SERVERS if not _lives(home, urls, name)]


def refuse_half(home: Home) -> None:
    """Raises ValueError where one recorded server lives: private ones would use its database beside it, and take its
    runs for dead."""
    urls = read_servers_file(home)
    ended = [] if urls is None else ended_servers(home, urls)
    if len(ended) == 1:
        raise ValueError(
            f"the {ended[0]} server of `glm46 up` has ended ({log_path(home, ended[0])}), the other one lives: "
            f"`glm46 up` ends it and starts both, `glm46 down` ends it"
        )


def recorded_process(pid: int, home: Home) -> psutil.Process | None:
    """The recorded process, unless it has ended or another process has its id."""
    try:
        process = psutil.Process(pid)
        is_ours = home.is_at(process.environ().get("GLM46_HOME", "")) and process.status() != psutil.STATUS_ZOMBIE
        return process if is_ours else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def worker_lives(home: Home, urls: ServerUrls) -> bool:
    """Whether the worker that `glm46 up` started runs: without it requested runs stay in state Late."""
    return _lives(home, urls, WORKER)


def _lives(home: Home, urls: ServerUrls, name: str) -> bool:
    return name in urls.pids and recorded_process(urls.pids[name], home) is not None


def record(home: Home, urls: ServerUrls) -> None:
    """Write run/servers.json: from here on every command of this home uses these servers."""
    replace_durably(_servers_path(home), urls.model_dump_json(indent=1).encode())


def forget(home: Home) -> None:
    """Remove run/servers.json: from here on every run has private servers."""
    _servers_path(home).unlink(missing_ok=True)
    environment_path(home).unlink(missing_ok=True)
