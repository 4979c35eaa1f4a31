"""`glm46 up`, `down` and `worker`: lasting servers, work pools, the deployments of prefect.yaml and workers.

All servers listen on loopback. Each site has a work pool: a flow run of it is a process beside the site's worker, and
what the configuration sends to nodes is submitted there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import NoReturn

import psutil
import yaml

from flows.cli.run_pipeline import set_environment
from infra.child_process import take_port
from infra.code_digest import ROOT
from infra.home import Home, private_file
from infra.servers.recorded_servers import (
    WORKER,
    ServerUrls,
    forget,
    read_recorded,
    read_servers_file,
    record,
    recorded_process,
    worker_lives,
)
from infra.servers.server_answers import wait_for_recorded
from infra.servers.server_password import API_URL, ENVIRONMENT, MLFLOW_URL, write_environment
from infra.servers.servers import exclusive, start_servers, stop_servers, urls_of, wait_until_healthy

SITES = ("local", "slurm", "kubernetes")
"""Work pools; the worker of the first is that of `glm46 up`."""
JOB_TEMPLATE = {
    "job_configuration": {"stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""Template of the work pools: a run sets parameters of the flow and nothing of its process. Prefect's own template lets
a run set its command and environment."""
WORKER_LOG = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"}
WORKER_START_SECONDS = 1
STOP_TIMEOUT_SECONDS = 15


def bring_up(home: Home, prefect_port: int, mlflow_port: int) -> ServerUrls:
    """Start and deploy what is not running. What runs stays as it is, also on other ports. Raises ValueError for a port
    in use.

    Where the process of a server has ended, the rest is ended and everything starts again: a worker does not connect
    to another server. A server that lives is waited for, however late it answers. Of two processes that bring up one
    home, the second waits and finds everything running.
    """
    if prefect_port == mlflow_port:
        raise ValueError(f"--prefect-port and --mlflow-port are both {mlflow_port}: name two ports")
    with exclusive(home, print):
        urls = read_recorded(home)
        if urls is None:
            bring_down(home)
            urls = _start_servers(home, prefect_port, mlflow_port)
        set_environment(home, urls.prefect, urls.mlflow)
        wait_for_recorded(home, urls, print)
        if not worker_lives(home, urls):
            _deploy(home)
            urls = urls.model_copy(update={"pids": {**urls.pids, WORKER: _start_worker(home)}})
            record(home, urls)
        write_environment(home, f"{urls.prefect}/api", urls.mlflow)
    return urls


def _start_servers(home: Home, prefect_port: int, mlflow_port: int) -> ServerUrls:
    """Recorded before they answer: `glm46 down` ends them if this process is killed while it waits."""
    servers = start_servers(home, take_port(prefect_port), take_port(mlflow_port), detached=True)
    try:
        record(home, urls_of(servers))
        urls = wait_until_healthy(home, servers, print)
        record(home, urls)
    except BaseException:
        stop_servers(servers)
        forget(home)
        raise
    return urls


def _deploy(home: Home) -> None:
    """Set runs of a worker that has ended to Crashed, and bring the work pools and the deployments to this version.
    Schedules of a deployment that is there stay as they are: somebody may have paused or moved them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    from flows.cli.silent_runs import crash_dead_runs, ensure_silence_automation, lost_its_process

    ensure_silence_automation()
    crash_dead_runs(lambda flow_run: flow_run.work_pool_name == SITES[0] and lost_its_process(flow_run))
    with get_client(sync_client=True) as client:
        for site in SITES:
            pool = WorkPoolCreate(name=site, type="process", base_job_template=JOB_TEMPLATE)
            client.create_work_pool(pool, overwrite=True)
        known = {deployment.name for deployment in client.read_deployments()}
    described = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    for deployment in described["deployments"]:
        if deployment["name"] in known:
            deployment.pop("schedules", None)
    path = home.run_dir / "prefect.yaml"
    path.write_text(yaml.safe_dump(described))
    _prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(path))


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


def worker_command(site: str) -> list[str]:
    """The worker of a site's pool, named after its machine."""
    name = f"{site}-{os.uname().nodename}-{os.getpid()}"
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", site, "--name", name]


def become_worker(home: Home, site: str) -> NoReturn:
    """Replace this process by the worker of a site, on the servers that the environment names. Raises ValueError for
    another site, and where the environment names none."""
    if site not in SITES[1:]:
        raise ValueError(f"site {site}: those with a worker of their own are {', '.join(SITES[1:])}")
    given = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    missing = [name for name in ENVIRONMENT if name not in given]
    if missing:
        raise ValueError(
            f"{missing[0]} is not set: source the file run/environment.sh of the home where `glm46 up` runs "
            f"(docs/cluster.md, A worker per site)"
        )
    set_environment(home, given[API_URL].removesuffix("/api"), given[MLFLOW_URL])
    os.environ.update({**given, **WORKER_LOG})
    os.chdir(ROOT)
    command = worker_command(site)
    os.execv(command[0], command)


def _start_worker(home: Home) -> int:
    log_path = home.run_dir / "worker.log"
    with open(private_file(log_path), "ab") as log:
        worker = subprocess.Popen(
            worker_command(SITES[0]),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **WORKER_LOG},
        )
    time.sleep(WORKER_START_SECONDS)
    if worker.poll() is not None:
        raise RuntimeError(
            f"the Prefect worker stopped at once; the end of {log_path}:\n{log_path.read_text()[-2000:]}"
        )
    return worker.pid
