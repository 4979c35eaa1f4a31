"""A standalone Spark cluster whose master, driver and two workers are machines without a common directory
(tests/support/cluster/nodes.py). Between them is an S3 server that checks signatures, and a log of its requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.code_digest import ROOT
from tests.support.cluster.nodes import Node, network_of_nodes
from tests.support.cluster.spark_cluster import daemon_command, daemon_environment
from tests.support.cluster.strict_s3 import REGION, strict_server
from tests.support.faulty_s3 import FaultyServer, Plan, faulty
from tests.support.pipeline import Finished, command

MASTER_PORT, STATUS_PORT = 7077, 8080
START_SECONDS = 180
SPARK_CONF_DIR = "/tmp/spark-conf"
SPARK_DEFAULTS = """spark.sql.adaptive.enabled false
spark.sql.codegen.wholeStage false
spark.sql.codegen.factoryMode NO_CODEGEN
spark.executor.extraJavaOptions -XX:+UseSerialGC -XX:TieredStopAtLevel=1
"""
"""For many short jobs, as infra/machine/spark.py does on one machine."""
HOME = "/tmp/home"
"""GLM46_HOME of the driver, on its own disk."""


@dataclass(frozen=True)
class ApartCluster:
    """Machines, and the server between them."""

    master: Node
    driver: Node
    workers: tuple[Node, ...]
    s3: FaultyServer
    credentials: dict[str, str]
    """The environment of a client that the server knows."""
    logs: Path

    @property
    def address(self) -> str:
        """data.resources.master."""
        return f"spark://{self.master.address}:{MASTER_PORT}"

    @property
    def server_url(self) -> str:
        """The server without the proxy: no log, no faults."""
        return self.s3.upstream.geturl()

    def start_worker(self, worker: Node, **credentials: str) -> None:
        """With the credentials in its environment, which executors inherit."""
        self._start_daemon(
            worker,
            "org.apache.spark.deploy.worker.Worker",
            *("-h", worker.address, "-c", 1, "-m", "1g", "-d", "/tmp/spark", self.address),
            **credentials,
        )

    def start_master(self) -> None:
        """The first of the daemons."""
        self._start_daemon(
            self.master,
            "org.apache.spark.deploy.master.Master",
            *("-h", self.master.address, "-p", MASTER_PORT, "--webui-port", STATUS_PORT),
        )

    def _start_daemon(self, node: Node, *arguments: object, **more: str) -> None:
        environment = {**_plain_environment(), **daemon_environment(node.address), **more}
        node.start(*daemon_command(*arguments), log=self.logs / f"{node.name}.log", environment=environment)

    def await_workers(self, count: int) -> None:
        """Until the master knows so many."""
        deadline = time.monotonic() + START_SECONDS
        read = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
        while time.monotonic() < deadline:
            answer = self.master.run(
                sys.executable, "-c", read, f"http://{self.master.address}:{STATUS_PORT}/json/"
            ).stdout
            if answer and json.loads(answer)["aliveworkers"] == count:
                return
            time.sleep(0.3)
        logs = "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in sorted(self.logs.glob("*.log")))
        raise AssertionError(f"no {count} workers after {START_SECONDS} s\n{logs}")

    def glm46(self, *arguments: str, timeout: float, **more: str) -> Finished:
        """Run a command on the driver's machine to its end."""
        done = subprocess.run(
            self.driver.command(*command(*arguments)),
            env=self.driver_environment(**more),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def driver_environment(self, **more: str) -> dict[str, str]:
        """What a user sets on the driver's machine."""
        own = {
            "GLM46_HOME": HOME,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": self.driver.address,
            "SPARK_CONF_DIR": SPARK_CONF_DIR,
            "AWS_ENDPOINT_URL_S3": self.s3.url,
            "AWS_DEFAULT_REGION": REGION,
        }
        return {**_plain_environment(), **own, **self.credentials, **more}


def _plain_environment() -> dict[str, str]:
    """This process's, without what says where things are and who asks."""
    foreign = ("AWS_", "GLM46_", "PREFECT_", "MLFLOW_TRACKING", "PYTEST_", "TMPDIR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "HOME": "/tmp"}


@contextmanager
def apart_cluster(directory: Path, plan: Plan) -> Iterator[ApartCluster]:
    """Start machines and server; the master runs, the workers do not yet."""
    names = {"master": False, "driver": True, "worker-1": False, "worker-2": False}
    with strict_server() as server, network_of_nodes(names) as network, faulty(server.url, plan, network.host) as s3:
        master, driver, *workers = network.nodes
        cluster = ApartCluster(master, driver, tuple(workers), s3, server.credentials, directory)
        driver.run("mkdir", SPARK_CONF_DIR)
        driver.write(f"{SPARK_CONF_DIR}/spark-defaults.conf", SPARK_DEFAULTS)
        cluster.start_master()
        yield cluster


def scale_on(master: str) -> str:
    """Micro as YAML on a Spark master, with small executors."""
    scale = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    sizes = {"driver_memory": "1g", "executor_memory": "600m", "shuffle_partitions": 3}
    scale["data"]["resources"] = {"master": master, **sizes}
    return yaml.safe_dump(scale, sort_keys=False)
