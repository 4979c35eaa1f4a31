"""Logs what this machine does while a phase trains on it: MLflow's own system metrics on the phase's run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.step import LogMetrics, MetricRows

SAMPLING_SECONDS = 5


@contextmanager
def logging_machine(tracking_uri: str, run_id: str, log_metrics: LogMetrics) -> Iterator[LogMetrics]:
    """A function that logs rows as `log_metrics` does, and whose first call begins to log processor, memory, disk,
    network, and the GPUs that NVIDIA's driver knows, as system/*; until the end of the block. A phase that is in the
    store logs no row, and so nothing."""
    monitors = []

    def log(rows: MetricRows) -> None:
        log_metrics(rows)
        if not monitors:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor = SystemMetricsMonitor(
                run_id, sampling_interval=SAMPLING_SECONDS, resume_logging=True, tracking_uri=tracking_uri
            )
            monitors.append(monitor)
            monitor.start()

    try:
        yield log
    finally:
        for monitor in monitors:
            monitor.finish()
