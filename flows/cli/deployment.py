"""`glm46 up` and `glm46 down`: lasting servers, a work pool, the deployments of prefect.yaml and a worker.

All of them listen on loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from flows.cli.run_pipeline import set_environment
from infra.child_process import take_port
from infra.code_digest import ROOT
from infra.home import Home, private_file
from infra.servers.server_password import write_environment
from infra.servers.servers import (
    WORKER,
    ServerUrls,
    ask_databases,
    exclusive,
    forget,
    read_recorded,
    read_servers_file,
    record,
    recorded_process,
    start_servers,
    stop_servers,
    wait_until_healthy,
    worker_lives,
)

POOL = "glm46"
JOB_TEMPLATE = {
    "job_configuration": {"stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""Template of the work pool: a run sets parameters of the flow and nothing of its process. Prefect's own template lets
a run set its command and environment."""
WORKER_START_SECONDS = 1
STOP_TIMEOUT_SECONDS = 15


def bring_up(home: Home, prefect_port: int, mlflow_port: int) -> ServerUrls:
    """Start and deploy what is not running. What runs stays as it is, also on other ports. Raises ValueError for a port
    in use.

    Where a server has died, the rest is ended and everything starts again: a worker does not connect to another server.
    Of two processes that bring up one home, the second waits and finds everything running.
    """
    with exclusive(home, print):
        urls = read_recorded(home)
        if urls is None:
            bring_down(home)
            urls = _start_servers(home, prefect_port, mlflow_port)
        set_environment(home, urls.prefect, urls.mlflow)
        ask_databases(home, urls)
        if not worker_lives(home, urls):
            _deploy()
            urls = urls.model_copy(update={"pids": {**urls.pids, WORKER: _start_worker(home)}})
            record(home, urls)
        write_environment(home, f"{urls.prefect}/api", urls.mlflow)
    return urls


def _start_servers(home: Home, prefect_port: int, mlflow_port: int) -> ServerUrls:
    servers = start_servers(home, take_port(prefect_port), take_port(mlflow_port), detached=True)
    try:
        urls = wait_until_healthy(home, servers)
        record(home, urls)
    except BaseException:
        stop_servers(servers)
        raise
    return urls


def _deploy() -> None:
    """Set runs of a worker that has ended to Crashed, and bring the work pool and the deployments to this version."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    from flows.cli.silent_runs import crash_dead_runs, ensure_silence_automation, lost_its_process

    ensure_silence_automation()
    crash_dead_runs(lost_its_process)
    with get_client(sync_client=True) as client:
        client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", base_job_template=JOB_TEMPLATE), overwrite=True
        )
    _prefect("--no-prompt", "deploy", "--all")


def bring_down(home: Home) -> int:
    """End the worker and the servers that `bring_up` recorded; returns how many processes were ended. Databases
    stay."""
    urls = read_servers_file(home)
    if urls is None:
        return 0
    processes = [
        process for pid in reversed(urls.pids.values()) if (process := recorded_process(pid, home)) is not None
    ]
    for process in processes:
        process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)
    for process in alive:
        process.kill()
    forget(home)
    return len(processes)


def _prefect(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"prefect {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _start_worker(home: Home) -> int:
    log_path = home.run_dir / "worker.log"
    with open(private_file(log_path), "ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", f"glm46-{os.getpid()}"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"},
        )
    time.sleep(WORKER_START_SECONDS)
    if worker.poll() is not None:
        raise RuntimeError(
            f"the Prefect worker stopped at once; the end of {log_path}:\n{log_path.read_text()[-2000:]}"
        )
    return worker.pid
