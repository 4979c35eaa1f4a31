"""The Prometheus exporter of a home: serves /metrics on loopback, from files that runs write anyway.

In: run/identities/ (which stage is which work), work/<key>/ (jobs, steps, checkpoints), manifests of the store, saved
outputs of nccl-tests in run/nccl-tests/. It writes nothing. Command: `glm46 exporter`.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterable

from prometheus_client import start_http_server
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from infra.home import Home, open_home
from infra.step import Manifest
from infra.storage.open_store import open_store
from infra.storage.store import Store
from tasks.monitoring.metric_table import Figures
from tasks.monitoring.nccl_tests import add_nccl_tests
from tasks.monitoring.phase_figures import NOT_UNDERSTOOD, CommittedPhases, JobFigures
from tasks.monitoring.stage_figures import add_evaluation, add_stage, is_comparable
from tasks.monitoring.stage_runs import StageRun, StageRuns

HOST = "127.0.0.1"
NCCL_TESTS_DIR = "nccl-tests"


class HomeCollector(Collector):
    """Looks at the home's files at each scrape; one scrape at a time."""

    def __init__(self, home: Home, store: Store) -> None:
        self.home, self.store = home, store
        self._runs = StageRuns(home.run_dir / "identities")
        self._jobs, self._phases = JobFigures(home), CommittedPhases(store)
        self._manifests: dict[str, Manifest] = {}
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._one_at_a_time:
            figures = Figures()
            runs = self._runs.look(figures)
            known = {key: run for run in runs for key in run.keys}
            jobs = self._jobs.add(figures, known)
            for run in runs:
                if run.keys[0] in jobs:
                    continue  # not committed, or its directory goes at this moment: a sample is shown once
                try:
                    self._add_committed(figures, run)
                except NOT_UNDERSTOOD:
                    figures.unreadable(f"{self.store.uri}/manifests/{run.keys[0]}.json")
            add_nccl_tests(figures, self.home.run_dir / NCCL_TESTS_DIR)
            return list(figures.families())

    def _add_committed(self, figures: Figures, run: StageRun) -> None:
        manifest = self._manifest(run.keys[0])
        if manifest is None:
            return
        add_stage(figures, run, manifest)
        if run.step == "train_phase":
            self._phases.add(figures, run, manifest)
        if run.step == "evaluate_checkpoint":
            others = (self._manifest(key) for key in run.keys[1:])
            before = next((other for other in others if other is not None and is_comparable(manifest, other)), None)
            add_evaluation(figures, run, manifest, before)

    def _manifest(self, key: str) -> Manifest | None:
        """A committed manifest stays what it is."""
        if key not in self._manifests:
            manifest = self.store.read_manifest(key)
            if manifest is None:
                return None
            self._manifests[key] = manifest
        return self._manifests[key]


def registry_of(home: Home, store: Store) -> CollectorRegistry:
    """A registry that has only the home's metrics."""
    registry = CollectorRegistry()
    registry.register(HomeCollector(home, store))
    return registry


def serve(home: Home, store: Store, port: int) -> None:
    """Serve until the process ends."""
    _, thread = start_http_server(port, addr=HOST, registry=registry_of(home, store))
    thread.join()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--port", type=int, required=True)
    arguments.add_argument("--store")
    given = arguments.parse_args()
    home = open_home()
    # `glm46 up` may start it before the first run has made the store
    serve(home, open_store(given.store, home), given.port)


if __name__ == "__main__":
    main()
