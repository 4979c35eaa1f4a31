"""The processes of a run, whatever started them."""

from __future__ import annotations

from pathlib import Path

import psutil

PROCESSES = {
    "main": "flows.cli.command",
    "rank": "tasks.training.worker",
    "supervisor": "infra.jobs.supervisor",
    "java": "org.apache.spark",
    "spark worker": "pyspark.daemon",
    "prefect": "prefect.server",
    "mlflow": "mlflow.server",
    "model server": "infra.serving.model_server",
}
"""Text in the command line of each kind of process."""


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process of a run, detached ones too: those whose environment names its home."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GLM46_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(processes, key=lambda process: process.pid)
