"""Long: what a run lives on goes away while it works: room on its disk as each step begins, its S3 server, the
Postgres of its servers, each service of `glm46 up`. It goes on, or ends in a clear sentence; run again, it ends in the
digests of an undisturbed run.

Run by `make test-long`. GLM46_KILL_SEED sets another seed of what is drawn, GLM46_FULL_SHARE the share of steps as
which the disk fills (1: every one, each a run of its own).
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from benchmarks.kills import POLL_SECONDS, RUN_SECONDS, check_whole, processes_of, run_under_fire
from infra.child_process import free_port
from infra.home import Home
from infra.monitoring.services import read_services
from infra.servers.databases import MLFLOW_DATABASE, PREFECT_DATABASE
from infra.storage.open_store import open_store
from tests.infra.test_launcher import wait_for
from tests.support.cluster.deployed import Deployed
from tests.support.cluster.small_disk import small_disk, used_kib
from tests.support.faulty_s3 import faulty
from tests.support.pipeline import glm46
from tests.support.postgres import kill_postgres, needs_postgres, postgres, start_postgres

SEED = int(os.environ.get("GLM46_KILL_SEED", "46"))
FULL_SHARE = float(os.environ.get("GLM46_FULL_SHARE", "0.2"))
SCALE = "micro"
ROOMY_KIB = 4 << 20
LEFT_KIB = (0, 64, 512, 4096)
"""What a disk has left when it counts as full: a step's first write fails, or a later one."""
SERVICES = {"exporter": 10, "worker": 25, "mlflow": 40, "prefect": 55}
"""Services of `glm46 up`, and the number of committed steps at which each is killed."""
ENDS_THE_RUN = ("mlflow", "prefect")
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
END_SECONDS = 400
"""In which a run ends after that."""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def calm_home(tmp_path_factory):
    return tmp_path_factory.mktemp("calm") / "home"


@pytest.fixture(scope="module")
def calm(calm_home):
    """A run to which nothing happens."""
    finished = glm46("run", SCALE, "--json", home=calm_home, timeout=RUN_SECONDS)
    assert finished.exit_code == 0, finished.stderr
    assert finished.outcome["promoted"]
    return finished


@dataclass
class Outage:
    """Begins when the run has said so many lines, and is over when it has ended."""

    begin: Callable[[], object]
    end: Callable[[], object]
    after_lines: list[int]
    seconds: list[float] = field(default_factory=list)
    """From its beginning to the end of the run."""

    def attend(self, run: subprocess.Popen[bytes], home: Path) -> int:
        said, begun = home.with_suffix(".err"), None
        while run.poll() is None:
            time.sleep(POLL_SECONDS)
            if begun is None and self.after_lines and said.read_bytes().count(b"\n") >= self.after_lines[0]:
                self.begin()
                begun, _ = time.monotonic(), self.after_lines.pop(0)
            assert begun is None or time.monotonic() - begun < END_SECONDS, "the run hangs"
        if begun is None:
            return 0
        self.seconds.append(time.monotonic() - begun)
        self.end()
        return 1


@dataclass
class FillingDisk:
    """Fills the home's disk as a step begins, but for a drawn rest; there is room again when the run has ended. Each
    step is drawn once, and `share` of them are so unlucky."""

    resize: Callable[[int], bool]
    draw: random.Random
    share: float
    met: dict[str, bool] = field(default_factory=dict)
    """Steps by key, and whether the disk became full at their beginning."""
    seconds: list[float] = field(default_factory=list)

    def attend(self, run: subprocess.Popen[bytes], home: Path) -> int:
        filled = None
        while run.poll() is None:
            time.sleep(0.005)
            for key in self._begun(home) if filled is None else ():
                self.met[key] = self.draw.random() < self.share
                if self.met[key]:
                    filled = time.monotonic()
                    self.resize(used_kib(home) + self.draw.choice(LEFT_KIB))
                    break
            assert filled is None or time.monotonic() - filled < END_SECONDS, "the run hangs"
        self.met |= dict.fromkeys(self._begun(home), True)
        assert self.resize(ROOMY_KIB)
        store = open_store(None, Home(home))
        for manifest in store.iterate_manifests():
            assert not store.broken_files(manifest, deep=True)
        if filled is None:
            return 0
        self.seconds.append(time.monotonic() - filled)
        return 1

    def _begun(self, home: Path) -> list[str]:
        """Keys of the steps that have begun and that it has not met."""
        return sorted({path.parent.name for path in home.glob("work/*/attempt")} - self.met.keys())


def test_a_disk_that_is_full_as_any_step_begins(calm, tmp_path):
    home = tmp_path / "home"
    with small_disk(home, ROOMY_KIB) as resize:
        disk = FillingDisk(resize, random.Random(SEED), FULL_SHARE)
        finished, ends = run_under_fire(SCALE, home, disk)
        print(f"\nfull as {len(disk.seconds)} of {len(disk.met)} steps began, ended after {disk.seconds} s: {ends}")
        for end in ends:
            assert end.startswith(f"1: glm46: no space left on {home} (free: "), end
            assert "make room, then run again to continue" in end, end
        check_whole(finished, calm, home)
        made = {manifest.key for manifest in open_store(None, Home(home)).iterate_manifests()}
        assert len(disk.met.keys() & made) >= 0.5 * len(made), "others end before a busy machine sees them begin"


def test_an_s3_server_that_dies_in_mid_run(calm, s3_server, tmp_path):
    home, is_down = tmp_path / "home", Event()
    options = ("--store", f"s3://glm46/{tmp_path.name}")
    with faulty(s3_server, lambda request: "reset" if is_down.is_set() else "") as server:
        outage = Outage(is_down.set, is_down.clear, [20, 45, 70])
        finished, ends = run_under_fire(SCALE, home, outage, *options, AWS_ENDPOINT_URL_S3=server.url)
        print(f"\nended after {outage.seconds} s: {ends}")
        said = "does not answer host .*; what is committed stays, .*: start it, or correct AWS_ENDPOINT_URL_S3"
        assert ends and all(re.search(said, end) for end in ends), ends
        check_whole(finished, calm, home, *options, AWS_ENDPOINT_URL_S3=server.url)


@needs_postgres
def test_a_postgres_that_dies_in_mid_run(calm, tmp_path_factory, tmp_path):
    home, root = tmp_path / "home", tmp_path_factory.mktemp("postgres")
    with postgres(root, "prefect", "mlflow") as (prefect, mlflow):
        urls = {PREFECT_DATABASE: prefect, MLFLOW_DATABASE: mlflow}
        outage = Outage(partial(kill_postgres, root), partial(start_postgres, root), [20, 45, 70])
        finished, ends = run_under_fire(SCALE, home, outage, **urls)
        print(f"\nended after {outage.seconds} s: {ends}")
        said = r"1: glm46: RuntimeError: (prefect|mlflow)'s database at \S+ does not answer .*: start it, or correct"
        assert ends and all(re.match(said, end) for end in ends), ends
        check_whole(finished, calm, home, **urls)


def test_services_of_up_that_are_killed_while_a_deployed_run_works(calm, calm_home, tmp_path):
    home, flow_run = tmp_path / "home", ""
    up = Deployed(home, (free_port(), free_port()))
    try:
        for service, num_steps in SERVICES.items():
            started = up.up("--monitoring", "--prometheus-port", str(free_port()))
            assert started.exit_code == 0, started.stderr
            if not flow_run or up.api(f"flow_runs/{flow_run}")["state"]["type"] != "RUNNING":
                flow_run = up.start(scale=SCALE)
            wait_for(lambda count=num_steps: len(digests_of(home)) >= count, seconds=RUN_SECONDS)
            os.kill(pid_of(up, service), signal.SIGKILL)
            killed = time.monotonic()
            if service in ENDS_THE_RUN:
                wait_for(lambda: not processes_of(home, "PREFECT__FLOW_RUN_ID"), seconds=END_SECONDS)
            said = "" if service == "prefect" else up.api(f"flow_runs/{flow_run}")["state"]["message"]
            print(f"{service} killed, {time.monotonic() - killed:.0f} s: {said}", flush=True)
            assert service != "mlflow" or re.search("the MLflow server at http.* does not answer .*: start it", said)
        started = up.up()
        assert started.exit_code == 0, started.stderr
        crashed, again = up.api(f"flow_runs/{flow_run}")["state"], up.start(scale=SCALE)
        assert crashed["type"] == "CRASHED" and "retry to continue" in crashed["message"]
        wait_for(lambda: up.api(f"flow_runs/{again}")["state"]["type"] in FINAL, seconds=RUN_SECONDS)
        assert up.api(f"flow_runs/{again}")["state"]["type"] == "COMPLETED"
        assert digests_of(home) == digests_of(calm_home)
        assert not os.listdir(home / "work")
    finally:
        assert glm46("down", home=home).exit_code == 0
    wait_for(lambda: not processes_of(home), seconds=END_SECONDS)  # a run that has just ended still looks for Prefect


def digests_of(home: Path) -> dict[str, str]:
    """Digest of every committed step by its key."""
    return {manifest.key: manifest.digest for manifest in open_store(None, Home(home)).iterate_manifests()}


def pid_of(up: Deployed, service: str) -> int:
    services = read_services(Home(up.home))
    return services[service].pid if service in services else up.recorded["pids"][service]
