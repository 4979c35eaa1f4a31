"""Processes that watch a home: started detached, found again by run/monitoring.json, ended by `glm46 down`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import BaseModel, TypeAdapter

from configs.files.atomic_files import replace_durably
from infra.code_digest import ROOT
from infra.home import Home, private_file
from infra.servers.recorded_servers import recorded_process, refusing_damage

HOST = "127.0.0.1"
START_SECONDS = 60
POLL_SECONDS = 0.1
STOP_SECONDS = 15


@dataclass(frozen=True)
class Service:
    """A process to start, which listens on loopback."""

    name: str
    command: tuple[str, ...]
    port: int
    health_path: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class RunningService(BaseModel):
    """A process that was started."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def address(self) -> str:
        """As Prometheus names a target."""
        return f"{HOST}:{self.port}"


RECORDED = TypeAdapter(dict[str, RunningService])


def find_program(*names: str) -> str | None:
    """The path of the first program that is installed: distributions name some otherwise than their projects."""
    return next((path for name in names if (path := shutil.which(name))), None)


def read_services(home: Home) -> dict[str, RunningService]:
    """The recorded services that still run, by name."""
    path = _path(home)
    with refusing_damage(path):
        recorded = RECORDED.validate_json(path.read_bytes()) if path.exists() else {}
    return {name: service for name, service in recorded.items() if recorded_process(service.pid, home) is not None}


def start_service(home: Home, service: Service) -> RunningService:
    """Start a process, record it and wait until it answers. Raises RuntimeError with the end of its log if it ends or
    does not answer; then it is ended."""
    log_path = home.run_dir / f"{service.name}.log"
    with open(private_file(log_path), "ab") as log:
        process = subprocess.Popen(
            service.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "GLM46_HOME": str(home.root), **service.environment},
        )
    started = RunningService(pid=process.pid, port=service.port)
    _record(home, {**read_services(home), service.name: started})
    deadline = time.monotonic() + START_SECONDS
    while not _answers(service.url + service.health_path):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "stopped" if process.poll() is not None else f"did not answer within {START_SECONDS} s"
            process.kill()
            process.wait()
            _record(home, read_services(home))
            last_lines = "\n".join(log_path.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{service.name} {state}; the end of {log_path}:\n{last_lines}")
        time.sleep(POLL_SECONDS)
    return started


def stop_services(home: Home) -> int:
    """End all recorded services; returns how many. What they wrote stays."""
    num_ended = _end(home, read_services(home).values())
    _path(home).unlink(missing_ok=True)
    return num_ended


def stop_service(home: Home, name: str) -> None:
    """End one recorded service."""
    services = read_services(home)
    _end(home, [services.pop(name)])
    _record(home, services)


def started_with(home: Home, service: RunningService) -> list[str]:
    """The command of a running service; empty where it has ended."""
    process = recorded_process(service.pid, home)
    return [] if process is None else process.cmdline()


def _end(home: Home, services: Iterable[RunningService]) -> int:
    processes = [process for each in services if (process := recorded_process(each.pid, home)) is not None]
    for process in processes:
        process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    for process in alive:
        process.kill()
    return len(processes)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _record(home: Home, services: Mapping[str, RunningService]) -> None:
    replace_durably(_path(home), RECORDED.dump_json(dict(services), indent=1))


def _path(home: Home) -> Path:
    return home.run_dir / "monitoring.json"
