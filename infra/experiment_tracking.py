"""Runs in MLflow: found again by the tag `glm46.key`, so that a restarted pipeline continues the run it had.

Every function talks to a tracking server by URI (http://127.0.0.1:PORT); `import mlflow` costs about 2.5 s and happens in `connect`.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY_TAG = "glm46.key"
PARENT_TAG = "mlflow.parentRunId"
MAX_METRICS_PER_REQUEST = 1000
"""What MLflow's log-batch endpoint takes."""


def connect(tracking_uri: str) -> MlflowClient:
    """A client of a tracking server that answers. Raises ValueError naming the URI when it does not: MLflow itself retries for minutes."""
    if not tracking_uri.startswith(("http://", "https://")):
        raise ValueError(f"MLflow tracking URI {tracking_uri} must be http(s)://host:port of a running server: registries need one")
    try:
        with urllib.request.urlopen(f"{tracking_uri.rstrip('/')}/health", timeout=10):
            pass
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"the MLflow server at {tracking_uri} does not answer ({error}): start it, or give the URI of one that runs"
        ) from error
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def ensure_run(client: MlflowClient, experiment: str, name: str, key: str, parent_run_id: str | None, tags: Mapping[str, str]) -> str:
    """Id of the experiment's run with this key under this parent, created if there is none; tags that differ are set."""
    wanted = {**tags, KEY_TAG: key} | ({} if parent_run_id is None else {PARENT_TAG: parent_run_id})
    experiment_id = _ensure_experiment(client, experiment)
    condition = " and ".join(f"tags.`{tag}` = '{wanted[tag]}'" for tag in (KEY_TAG, PARENT_TAG) if tag in wanted)
    found = client.search_runs([experiment_id], condition, order_by=["attributes.start_time ASC"], max_results=1)
    if not found:
        return client.create_run(experiment_id, run_name=name, tags=wanted).info.run_id
    run = found[0]
    for tag, value in wanted.items():
        if run.data.tags.get(tag) != value:
            client.set_tag(run.info.run_id, tag, value)
    return run.info.run_id


def _ensure_experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
            assert experiment is not None, name
    if experiment.lifecycle_stage == "deleted":
        raise ValueError(f"MLflow experiment {name} was deleted: restore it (mlflow experiments restore) or remove it for good (mlflow gc)")
    return experiment.experiment_id


def log_metrics(client: MlflowClient, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
    """Log the metrics of one optimizer step in one request."""
    log_metric_rows(client, run_id, [(step, metrics)])


def log_metric_rows(client: MlflowClient, run_id: str, rows: list[tuple[int, Mapping[str, float]]]) -> None:
    """Log the metrics of many steps, as many at a time as MLflow takes."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    entities = [Metric(name, float(value), now, step) for step, metrics in rows for name, value in metrics.items()]
    for start in range(0, len(entities), MAX_METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=entities[start : start + MAX_METRICS_PER_REQUEST], synchronous=True)


def log_parameters(client: MlflowClient, run_id: str, parameters: Mapping[str, object]) -> None:
    """Log what a run was configured with; a value that was logged before must be equal."""
    from mlflow.entities import Param

    entities = [Param(name, str(value)) for name, value in parameters.items()]
    for start in range(0, len(entities), 100):
        client.log_batch(run_id, params=entities[start : start + 100], synchronous=True)


def finish_run(client: MlflowClient, run_id: str, succeeded: bool) -> None:
    """Set a run's final status; a run that is continued later is set again."""
    client.set_terminated(run_id, "FINISHED" if succeeded else "FAILED")
