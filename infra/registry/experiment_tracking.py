"""Runs in MLflow, identified by the tag `glm46.key`, so that a restarted pipeline continues its run.

Every function talks to a tracking server by URI (http://127.0.0.1:PORT). `import mlflow` costs about 2.5 s and happens
in `connect`.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from infra.step import MetricRows

KEY_TAG = "glm46.key"
PARENT_TAG = "mlflow.parentRunId"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Value by which MLflow's UI opens the experiment as a table of runs with curves, not as traces of an application."""
MAX_METRICS_PER_REQUEST = 1000
MAX_PARAMETERS_PER_REQUEST = 100
"""Most metrics, and most parameters, that MLflow's log-batch endpoint takes at once."""
MAX_VALUE_CHARS = 500
"""Characters of a parameter or an input's tag; MLflow refuses longer tags."""
MAX_DATASET_DIGEST_CHARS = 36


@dataclass(frozen=True)
class DatasetInput:
    """A data set or tokenizer that a run read. The whole digest is in the tag glm46.digest: MLflow's own field is too
    short."""

    name: str
    digest: str
    source: str
    profile: Mapping[str, Any]
    """Counts, as the UI shows them."""
    tags: Mapping[str, str]


def connect(tracking_uri: str) -> MlflowClient:
    """A client of a tracking server that answers. Raises ValueError naming the URI when it does not: MLflow itself
    retries for minutes."""
    if not tracking_uri.startswith(("http://", "https://")):
        raise ValueError(
            f"MLflow tracking URI {tracking_uri} must be http(s)://host:port of a running server: registries need one"
        )
    try:
        with urllib.request.urlopen(f"{tracking_uri.rstrip('/')}/health", timeout=10):
            pass
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"the MLflow server at {tracking_uri} does not answer ({error}): start it, or give the URI of one that runs"
        ) from error
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def ensure_run(
    client: MlflowClient, experiment: str, name: str, key: str, parent_run_id: str | None, tags: Mapping[str, str]
) -> str:
    """Id of the experiment's run with this key, created below the parent if there is none; tags that differ are set.

    A run that exists stays below the parent under which it was created.
    """
    experiment_id = _ensure_experiment(client, experiment)
    runs = client.search_runs(
        [experiment_id], f"tags.`{KEY_TAG}` = '{key}'", order_by=["attributes.start_time ASC"], max_results=1
    )
    if not runs:
        parent = {} if parent_run_id is None else {PARENT_TAG: parent_run_id}
        return client.create_run(experiment_id, run_name=name, tags={**tags, KEY_TAG: key, **parent}).info.run_id
    run = runs[0]
    set_run_tags(
        client, run.info.run_id, {tag: value for tag, value in tags.items() if run.data.tags.get(tag) != value}
    )
    return run.info.run_id


def set_run_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags of a run in one request."""
    from mlflow.entities import RunTag

    if tags:
        client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()], synchronous=True)


def run_ids(client: MlflowClient, tag: str, value: str) -> list[str]:
    """Ids of the runs of any experiment that carry this tag."""
    return [run.info.run_id for run in _search(client, f"tags.`{tag}` = '{value}'")]


def running_runs(client: MlflowClient, tag: str) -> dict[str, str]:
    """Id and value of this tag for every run in state RUNNING that has it, in any experiment."""
    runs = _search(client, "attributes.status = 'RUNNING'")
    return {run.info.run_id: run.data.tags[tag] for run in runs if tag in run.data.tags}


def _search(client: MlflowClient, wanted: str) -> Iterator[Run]:
    """The runs of any experiment that fit, of all pages: MLflow gives a thousand at a time."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    page = client.search_runs(experiments, wanted)
    yield from page
    while page.token:
        page = client.search_runs(experiments, wanted, page_token=page.token)
        yield from page


def _ensure_experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, tags=EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
            assert experiment is not None, name
    if experiment.lifecycle_stage == "deleted":
        raise ValueError(
            f"MLflow experiment {name} was deleted: run `glm46 up`, source the environment.sh that it prints, then "
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
        )
    return experiment.experiment_id


def log_metrics(client: MlflowClient, run_id: str, rows: MetricRows) -> None:
    """Log the metrics of many steps, as many at a time as MLflow takes."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    entities = [Metric(name, float(value), now, step) for step, metrics in rows for name, value in metrics.items()]
    for start in range(0, len(entities), MAX_METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=entities[start : start + MAX_METRICS_PER_REQUEST], synchronous=True)


def log_figures(client: MlflowClient, run_id: str, figures: Mapping[str, float]) -> None:
    """Log the results of a run where it does not show them yet: those of another computation take the place of its
    earlier ones."""
    shown = client.get_run(run_id).data.metrics
    log_metrics(client, run_id, [(0, {name: value for name, value in figures.items() if shown.get(name) != value})])


class TrackedRun(NamedTuple):
    """A run as the server has it."""

    started: float
    """Seconds since the epoch."""
    metrics: dict[str, float]
    tags: dict[str, str]


def newest_runs(client: MlflowClient, wanted: str, most: int) -> list[TrackedRun]:
    """The newest runs of any experiment that fit MLflow's filter, the oldest first. The server chooses: every run comes
    with all its parameters and metrics."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, wanted, order_by=["attributes.start_time DESC"], max_results=most)
    return [TrackedRun(run.info.start_time / 1000, run.data.metrics, run.data.tags) for run in runs][::-1]


def log_new_parameters(client: MlflowClient, run_id: str, parameters: Mapping[str, str]) -> None:
    """Log the configuration of a run, unless that was done before; long values are cut."""
    from mlflow.entities import Param

    if client.get_run(run_id).data.params:
        return
    entities = [Param(name, value[:MAX_VALUE_CHARS]) for name, value in parameters.items()]
    for start in range(0, len(entities), MAX_PARAMETERS_PER_REQUEST):
        client.log_batch(run_id, params=entities[start : start + MAX_PARAMETERS_PER_REQUEST], synchronous=True)


def log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[DatasetInput]) -> None:
    """Log the inputs of a run in one request. Inputs that were logged before stay."""
    from mlflow.entities import Dataset, InputTag
    from mlflow.entities import DatasetInput as LoggedInput

    logged = [
        LoggedInput(
            Dataset(
                entry.name,
                entry.digest[:MAX_DATASET_DIGEST_CHARS],
                source_type="glm46",
                source=json.dumps({"uri": entry.source}),
                profile=json.dumps(dict(entry.profile)),
            ),
            [
                InputTag(name, value[:MAX_VALUE_CHARS])
                for name, value in {**entry.tags, "glm46.digest": entry.digest}.items()
            ],
        )
        for entry in inputs
    ]
    client.log_inputs(run_id, logged)


def log_evidence(client: MlflowClient, run_id: str, files: Sequence[Path], directory: str) -> None:
    """Upload files below a directory of the run's artifacts; a file of the same name is replaced."""
    for path in files:
        client.log_artifact(run_id, str(path), directory)


def log_text(client: MlflowClient, run_id: str, text: str, name: str) -> None:
    """Upload a text as a file of the run's artifacts."""
    client.log_text(run_id, text, name)


def run_page(client: MlflowClient, pages: str, run_id: str) -> str:
    """URL of a run in MLflow's UI at the address `pages`; with `/artifacts` appended, the URL of its artifacts."""
    return f"{pages.rstrip('/')}/#/experiments/{client.get_run(run_id).info.experiment_id}/runs/{run_id}"


def resume_run(client: MlflowClient, run_id: str) -> None:
    """Set a run to RUNNING, also where it had ended."""
    client.update_run(run_id, status="RUNNING")


def finish_run(client: MlflowClient, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Set a run's final status; a run that is continued later sets it again."""
    client.set_terminated(run_id, status)
