"""`glm46 up` and `glm46 down`: servers that outlive a run, a work pool, the deployments of prefect.yaml and a worker, all on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from flows.run_pipeline import set_environment
from infra.child_process import take_port
from infra.code_digest import ROOT
from infra.home import Home
from infra.servers import ServerUrls, exclusive, read_recorded, record, start_servers, stop_servers, wait_until_healthy

POOL = "glm46"
STOP_TIMEOUT_SECONDS = 15


def bring_up(home: Home, prefect_port: int, mlflow_port: int) -> ServerUrls:
    """Start what is not running and deploy; what runs already is left alone. Raises ValueError for a port in use."""
    recorded = read_recorded(home)
    if recorded is not None:
        return recorded
    with exclusive(home, print):
        servers = start_servers(home, take_port(prefect_port), take_port(mlflow_port), detached=True)
        try:
            urls = wait_until_healthy(servers)
            set_environment(home, urls.prefect, urls.mlflow)
            _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
            _prefect("--no-prompt", "deploy", "--all")
            worker = _start_worker(home)
        except BaseException:
            stop_servers(servers)
            raise
        record(home, urls.model_copy(update={"pids": (*urls.pids, worker)}))
    return urls


def bring_down(home: Home) -> int:
    """End the worker and the servers that `bring_up` recorded; returns how many processes were ended. Databases stay."""
    path = home.run_dir / "servers.json"
    if not path.exists():
        return 0
    urls = ServerUrls.model_validate_json(path.read_text())
    processes = [process for pid in reversed(urls.pids) if (process := _ours(pid, home)) is not None]
    for process in processes:
        process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)
    for process in alive:
        process.kill()
    path.unlink()
    return len(processes)


def _ours(pid: int, home: Home) -> psutil.Process | None:
    """The recorded process, unless its number has gone to another one."""
    try:
        process = psutil.Process(pid)
        return process if process.environ().get("GLM46_HOME") == str(home.root) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _prefect(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(f"prefect {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _start_worker(home: Home) -> int:
    log_path = home.run_dir / "worker.log"
    with open(log_path, "ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", f"glm46-{os.getpid()}"],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    time.sleep(1)
    if worker.poll() is not None:
        raise RuntimeError(f"the Prefect worker stopped at once; the end of {log_path}:\n{Path(log_path).read_text()[-2000:]}")
    return worker.pid
