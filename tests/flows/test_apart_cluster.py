"""Long: the data stages on a Spark cluster of machines without a common directory, with an S3 server between them that
checks signatures and fails at one request in ten, while a worker and the driver are killed in mid-stage.

The digests are those of `local[2]` with a directory as its store, and the server's log shows that the driver reads and
writes no part file.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import boto3
import pytest

from tests.support.cluster.apart_cluster import ApartCluster, apart_cluster, scale_on
from tests.support.cluster.nodes import missing_right
from tests.support.cluster.strict_s3 import REGION
from tests.support.data_inputs import write_corpus, write_packages
from tests.support.faulty_s3 import KINDS, Plan, Request, one_in
from tests.support.pipeline import Finished, glm46

SEED = int(os.environ.get("GLM46_KILL_SEED", "46"))
RUN_SECONDS = 1200
DATA, STORE = "s3://glm46/corpus", "s3://glm46/store"
PREPARE = ("--until", "prepare_data", "--data", DATA, "--json")
SCALE = "/tmp/cluster.yaml"
FAULTY_ONE_IN = 10
STEP_OF_THE_WORKER, STEP_OF_THE_DRIVER = 2, 3
"""The worker that writes the first part of this step is killed; then the driver, at the first part of a later one."""
PART = re.compile(r"/store/objects/(?P<key>\w+)/\w+/\w+/[^?]+")
"""A part is in a directory of its artifact. Tables of one small file are not: the driver checks their contracts."""
DRIVER_STEPS = ("synthesize_problems", "select_evaluation_items", "train_classifiers", "train_ngram_model")
"""Steps without Spark: the driver computes them, and writes what they make."""
MAX_EMPTY_TABLE_BYTES = 16384
"""Tables without rows, which no task writes."""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing_right()), reason=f"the machines are namespaces: {missing_right()}"),
]


class Incidents:
    """Faults of the server, and kills of machines at the requests that show what they are doing."""

    def __init__(self) -> None:
        self.cluster: ApartCluster | None = None
        self.killed: list[str] = []
        """Names of the machines on which kill -9 ended every process."""
        self._steps: list[str] = []
        self._faults: Plan = one_in(FAULTY_ONE_IN, SEED)
        self._one_at_a_time = threading.Lock()

    def plan(self, request: Request) -> str:
        """The fault of a request; the machines die before it is answered."""
        written = PART.match(request.path.removeprefix("/glm46"))
        if self.cluster is None:
            return ""
        if written and request.method == "PUT" and request.client != self.cluster.driver.address:
            with self._one_at_a_time:
                self._kill_at(written["key"], request.client)
        return self._faults(request)

    def _kill_at(self, key: str, client: str) -> None:
        assert self.cluster is not None
        if key in self._steps:
            return
        self._steps.append(key)
        if len(self._steps) == STEP_OF_THE_WORKER:
            (busy,) = (worker for worker in self.cluster.workers if worker.address == client)
            self._kill(busy)
        if len(self._steps) == STEP_OF_THE_DRIVER:
            self._kill(self.cluster.driver)

    def _kill(self, node) -> None:
        node.kill_processes()
        self.killed.append(node.name)


def client_of(cluster: ApartCluster):
    """A client of this machine, without the proxy."""
    keys = {name.lower(): value for name, value in cluster.credentials.items()}
    return boto3.client("s3", endpoint_url=cluster.server_url, region_name=REGION, **keys)


def upload_corpus(cluster: ApartCluster, directory: Path) -> None:
    """Sources in the bucket: no machine has them on its disk."""
    directory.mkdir()
    write_corpus(directory)
    write_packages(directory)
    for path in directory.rglob("*.*"):
        client_of(cluster).upload_file(str(path), "glm46", f"corpus/{path.relative_to(directory)}")


def run_here(cluster: ApartCluster, home: Path) -> Finished:
    """`local[2]` with a directory as its store."""
    settings = {"AWS_ENDPOINT_URL_S3": cluster.server_url, "AWS_DEFAULT_REGION": REGION}
    return glm46("run", "micro", *PREPARE, home=home, timeout=RUN_SECONDS, **settings, **cluster.credentials)


def parts_that_the_driver_touched(cluster: ApartCluster, driver_keys: set[str]) -> set[tuple[str, str]]:
    """(method, path) of part files of Spark steps in the requests of the driver's machine."""
    touched = set()
    for request in cluster.s3.requests:
        part = PART.match(request.path.removeprefix("/glm46"))
        is_empty = request.method == "PUT" and request.num_bytes < MAX_EMPTY_TABLE_BYTES
        if request.client == cluster.driver.address and part and part["key"] not in driver_keys and not is_empty:
            touched.add((request.method, request.path))
    return touched


def test_machines_apart_have_the_digests_of_one_machine_though_they_are_killed_and_the_store_fails(tmp_path):
    incidents = Incidents()
    with apart_cluster(tmp_path, incidents.plan) as cluster:
        upload_corpus(cluster, tmp_path / "corpus")
        for worker in cluster.workers:
            cluster.start_worker(worker, **cluster.credentials)
        cluster.await_workers(2)
        cluster.driver.write(SCALE, scale_on(cluster.address))
        incidents.cluster = cluster

        run = ("run", SCALE, *PREPARE, "--store", STORE)
        first = cluster.glm46(*run, timeout=RUN_SECONDS)
        assert first.exit_code != 0 and incidents.killed[1:] == ["driver"], first.stderr
        again = cluster.glm46(*run, timeout=RUN_SECONDS)
        failed = f"{len(cluster.s3.faults)} of {len(cluster.s3.requests)} requests failed"
        print(f"\nseed {SEED}: killed {incidents.killed}, {failed}", flush=True)
        assert again.exit_code == 0, f"{again.stderr}\nfaults: {cluster.s3.faults}"
        assert min(sum(fault.startswith(kind) for fault in cluster.s3.faults) for kind in KINDS) > 0
        stages = {stage["name"]: stage for stage in again.outcome["stages"]}
        assert sum(stage["cached"] for stage in stages.values()) >= STEP_OF_THE_DRIVER - 1
        here = run_here(cluster, tmp_path / "home")
    assert here.exit_code == 0, here.stderr
    assert again.digests == here.digests
    driver_keys = {stages[name]["key"] for name in DRIVER_STEPS}
    assert parts_that_the_driver_touched(cluster, driver_keys) == set()
