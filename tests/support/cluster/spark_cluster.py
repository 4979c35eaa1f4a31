"""A real standalone Spark cluster on this machine: one master, two workers with one core each, as processes that tests
may kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.child_process import die_with_parent, free_port

NUM_WORKERS = 2
START_SECONDS = 180


@dataclass(frozen=True)
class SparkCluster:
    """Addresses and processes."""

    master: str
    """spark://host:port."""
    status_url: str
    workers: tuple[subprocess.Popen[bytes], ...]

    def num_alive_workers(self) -> int:
        """As the master sees it."""
        with urllib.request.urlopen(self.status_url, timeout=5) as response:
            return json.load(response)["aliveworkers"]

    def kill_worker(self, number: int) -> None:
        """kill -9 of a worker and of the executors that it started."""
        import psutil

        worker = psutil.Process(self.workers[number].pid)
        for process in [worker, *worker.children(recursive=True)]:
            os.kill(process.pid, signal.SIGKILL)


@contextmanager
def spark_cluster(directory: Path) -> Iterator[SparkCluster]:
    """Start the cluster and stop it with everything that it started."""
    port, status_port = free_port(), free_port()
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: object) -> subprocess.Popen[bytes]:
        processes.append(_start_daemon(directory / f"{name}.log", *arguments))
        return processes[-1]

    try:
        start(
            "master",
            "org.apache.spark.deploy.master.Master",
            "-h",
            "127.0.0.1",
            "-p",
            port,
            "--webui-port",
            status_port,
        )
        workers = tuple(
            start(
                f"worker-{number}",
                "org.apache.spark.deploy.worker.Worker",
                "-h",
                "127.0.0.1",
                "--webui-port",
                free_port(),
                "-c",
                1,
                "-m",
                "1g",
                "-d",
                directory / f"worker-{number}",
                f"spark://127.0.0.1:{port}",
            )
            for number in range(NUM_WORKERS)
        )
        cluster = SparkCluster(f"spark://127.0.0.1:{port}", f"http://127.0.0.1:{status_port}/json/", workers)
        _await_workers(cluster, directory)
        yield cluster
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def daemon_command(*arguments: object) -> list[str]:
    """The command line of one of Spark's daemons."""
    import pyspark

    return [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), *(str(argument) for argument in arguments)]


def daemon_environment(address: str) -> dict[str, str]:
    """Settings of a daemon on the machine of an address."""
    import pyspark

    return {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": address,
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_MEMORY": "512m",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.worker.timeout=10",
    }


def _start_daemon(log_path: Path, *arguments: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **daemon_environment("127.0.0.1")}
    with open(log_path, "wb") as log:
        return subprocess.Popen(
            daemon_command(*arguments), env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent
        )


def _await_workers(cluster: SparkCluster, directory: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if cluster.num_alive_workers() == NUM_WORKERS:
                return
        except OSError:
            pass
        time.sleep(0.2)
    logs = "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in sorted(directory.glob("*.log")))
    raise AssertionError(f"no {NUM_WORKERS} workers after {START_SECONDS} s\n{logs}")
