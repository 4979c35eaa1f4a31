"""Tracks a pipeline run in MLflow: one parent run, identified by the Prefect flow run, and below it a run per phase.

A phase that is already in the store keeps its run below the parent that computed it. Every later parent names it by a
tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import Flow, State
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Crashed

from configs.schema import PhaseSection, Scale
from flows.running.run import Run
from flows.running.run_step import run_effect
from infra.registry.experiment_tracking import (
    DatasetInput,
    connect,
    ensure_run,
    finish_run,
    log_evidence,
    log_figures,
    log_inputs,
    log_new_parameters,
    log_text,
    resume_run,
    run_ids,
    running_runs,
    set_run_tags,
)
from infra.registry.model_registry import ensure_evidence, model_name
from infra.servers.servers import tracking_uri
from infra.step import Artifact, digest_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from flows.show.outcome import RunOutcome
    from tasks.data.validate_contract import ContractResult
    from tasks.evaluation.decide_gate import GateDecision
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.evaluation.evaluate_pairs import PairEvaluation
    from tasks.evaluation.sample_solutions import DomainSolutions, SampledSolutions
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

FLOW_RUN_TAG = "glm46.flow_run"
"""Id of the Prefect flow run, on a parent run."""
SCALE_TAG = "glm46.scale"
NOTE_TAG = "mlflow.note.content"
"""MLflow's page of a run shows this tag as the run's description, in Markdown."""
PROMOTED_TAG = "glm46.promoted"
EVIDENCE_DIR = "evidence"
OUTCOME_FILE = "outcome.json"
EXIT_MESSAGE = "Execution was aborted by Python system exit call."
WORKER_LOST = "the worker that started this run has ended: `glm46 up` starts one, then retry the run to continue"
LOGGED_EVIDENCE = {"spikes.jsonl": EVIDENCE_DIR, "profile/*": f"{EVIDENCE_DIR}/profile"}
"""Files of training that become artifacts of the phase's run, and their directories."""


def name_flow_run() -> str:
    """The name of a flow run: the scale before the words that Prefect drew, for example `tiny amber-bear`; a retried
    flow run keeps its name."""
    name, scale = str(this_flow_run.name), Path(this_flow_run.parameters["scale"]).stem
    return name if name.startswith(f"{scale} ") else f"{scale} {name}"


def name_phases() -> str:
    """Names of the phases that a flow was given, in order."""
    return ", ".join(phase.name for phase in this_flow_run.parameters["phases"])


def track_pipeline(mlflow_uri: str, scale: Scale) -> str:
    """Id of the MLflow run of this flow run; a retried flow run continues its MLflow run, unless its configuration was
    edited meanwhile."""
    client, experiment = connect(mlflow_uri), model_name(scale.scale)
    configuration = scale.model_dump(mode="json")
    flow_run_id = str(this_flow_run.id)
    key = f"{flow_run_id} {digest_of(configuration)[:12]}"
    run_id = ensure_run(
        client, experiment, this_flow_run.name, key, None, {FLOW_RUN_TAG: flow_run_id, SCALE_TAG: scale.scale}
    )
    log_new_parameters(client, run_id, flattened(configuration))
    resume_run(client, run_id)
    _end_abandoned_runs(client)
    return run_id


def _end_abandoned_runs(client: MlflowClient) -> None:
    """A killed process could not end its MLflow run: those of flow runs that have ended are set to KILLED."""
    with get_client(sync_client=True) as prefect:
        for run_id, flow_run_id in running_runs(client, FLOW_RUN_TAG).items():
            try:
                state = prefect.read_flow_run(UUID(flow_run_id)).state
            except ObjectNotFound:
                state = None
            if state is None or state.is_final():
                finish_run(client, run_id, "KILLED")


def track_phase(run: Run, phase: PhaseSection, key: str) -> str:
    """Id of the MLflow run of a phase's work, identified by the step key of that work."""
    client, experiment = connect(run.mlflow), model_name(run.scale.scale)
    recipe = flattened(run.scale.training_recipe(phase).model_dump(mode="json", exclude={"model"}))
    tags = {SCALE_TAG: run.scale.scale, "glm46.phase": phase.name}

    def track() -> str:
        run_id = ensure_run(client, experiment, phase.name, key, run.pipeline_run_id, tags)
        log_new_parameters(client, run_id, recipe)
        set_run_tags(client, run.pipeline_run_id, {f"glm46.phase.{phase.name}": run_id})
        return run_id

    return run_effect(run, f"track {phase.name}", track, describe=lambda run_id: f"MLflow run {run_id[:8]}")


def approve_inputs(run: Run, contracts: Mapping[str, tuple[Artifact[Any], Artifact[ContractResult] | None]]) -> None:
    """Log the inputs of training, each with its contract's result. Raises ValueError where there is no result, or it is
    for something else."""
    for name, (artifact, result) in contracts.items():
        if result is None or result.manifest.identity["inputs"]["subject"] != artifact.digest:
            seen = (
                "no result" if result is None else f"a result for {result.manifest.identity['inputs']['subject'][:12]}"
            )
            raise ValueError(
                f"{name} ({artifact.digest[:12]}) may not be trained on: its contract has {seen}; run again from "
                f"prepare_data, "
                f"which checks every hand-over"
            )
    inputs = [
        dataset_input(run, name, artifact, result)
        for name, (artifact, result) in contracts.items()
        if result is not None
    ]
    client = connect(run.mlflow)
    run_effect(
        run,
        "approve inputs",
        lambda: log_inputs(client, run.pipeline_run_id, inputs),
        describe=lambda _: f"{len(inputs)} with contracts",
    )


def dataset_input(run: Run, name: str, artifact: Artifact[Any], result: Artifact[ContractResult]) -> DatasetInput:
    """An artifact as a data set of MLflow, with its contract's result."""
    held = result.record
    return DatasetInput(
        name=name,
        digest=artifact.digest,
        source=f"{run.store.uri}/objects/{artifact.manifest.object_key}/{artifact.manifest.attempt}",
        profile={field: value for field, value in artifact.record if isinstance(value, int | float)},
        tags={
            "mlflow.data.context": "training",
            "glm46.contract": f"{held.contract}: {held.num_rows} rows met {held.num_expectations} expectations",
            "glm46.contract_digest": result.digest,
            "glm46.key": artifact.key,
        },
    )


def log_solutions(run: Run, phase: PhaseSection, run_id: str, solutions: Artifact[SampledSolutions]) -> None:
    """Log what was sampled before a phase with rejection sampling or distillation: counts, and pass@k for every k; by
    the phase and domain of who answered, too."""
    record = solutions.record
    figures = _sampling_figures(record)
    for domain in record.domains:
        own = {**_sampling_figures(domain), "kept_share": domain.num_kept / max(1, domain.num_answers)}
        figures |= {f"{domain.phase}/{domain.domain}/{name}": value for name, value in own.items()}
    client = connect(run.mlflow)
    log_figures(client, run_id, {f"sampling/{name}": value for name, value in figures.items()})


def _sampling_figures(record: SampledSolutions | DomainSolutions) -> dict[str, float]:
    counts = {name: float(value) for name, value in record if isinstance(value, int)}
    return counts | {f"pass_at_{point.k}": point.share for point in record.pass_at}


def finish_phase(
    run: Run,
    phase: PhaseSection,
    run_id: str,
    checkpoint: Artifact[TrainedCheckpoint],
    evaluation: Artifact[Evaluation] | Artifact[PairEvaluation],
    decision: Artifact[GateDecision],
) -> None:
    """Log a checkpoint's figures on the phase's MLflow run and the parent, with the evidence of spikes and profiled
    steps. Then end the phase's run: FINISHED where the gate accepted."""
    client = connect(run.mlflow)
    figures = _figures(evaluation.record.model_dump(mode="json"))
    log_figures(client, run_id, {f"evaluation/{name}": value for name, value in figures.items()})
    log_figures(client, run.pipeline_run_id, {f"{phase.name}/{name}": value for name, value in figures.items()})
    log_training_evidence(client, run_id, checkpoint)
    set_run_tags(
        client, run_id, {NOTE_TAG: _as_list([f"{bound.outcome}: {bound.sentence}" for bound in decision.record.bounds])}
    )
    finish_run(client, run_id, "FINISHED" if decision.record.accepted else "FAILED")


def log_training_evidence(client: MlflowClient, run_id: str, checkpoint: Artifact[Any]) -> None:
    """Upload the evidence of spikes and profiled steps as artifacts of the phase's run; nothing for imported
    weights."""
    for pattern, directory in LOGGED_EVIDENCE.items():
        names = [name for name in checkpoint.manifest.evidence if fnmatchcase(name, pattern)]
        log_evidence(client, run_id, [checkpoint.path(name) for name in names], directory)


def log_outcome(run: Run, outcome: RunOutcome, evidence: Sequence[Path]) -> None:
    """Log outcome, report and cards on the parent run, and name them on the version, before it is promoted."""
    client = connect(run.mlflow)
    log_text(client, run.pipeline_run_id, outcome.model_dump_json(indent=1), f"{EVIDENCE_DIR}/{OUTCOME_FILE}")
    log_evidence(client, run.pipeline_run_id, evidence, EVIDENCE_DIR)
    if outcome.version:
        ensure_evidence(client, outcome.model, outcome.version, f"runs:/{run.pipeline_run_id}/{EVIDENCE_DIR}")


def finish_pipeline(run: Run, outcome: RunOutcome) -> None:
    """End the parent run with the verdict, when the alias has moved; a refusal by a gate is a finished run."""
    client = connect(run.mlflow)
    verdict = (
        f"Promoted: version {outcome.version} has the alias {outcome.alias}."
        if outcome.promoted
        else "Nothing was promoted."
    )
    tags = {PROMOTED_TAG: str(outcome.promoted).lower(), NOTE_TAG: "\n\n".join([verdict, _as_list(outcome.reasons)])}
    set_run_tags(client, run.pipeline_run_id, tags)
    finish_run(client, run.pipeline_run_id, "FINISHED")


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record, those by domain under names of their own; counts and intervals are only in the
    report."""
    figures = {name: value for name, value in record.items() if isinstance(value, float)}
    for name, values in record.items():
        if isinstance(values, Mapping):
            figures |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, float)}
    return figures


def _as_list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def end_tracking(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of the flow: its MLflow run ends as FAILED, or KILLED where the flow crashed or was cancelled, and has
    promoted nothing.

    A run that ended because its worker died crashes with Prefect's general message for an exit: it is replaced by what
    to do.
    """
    if state.message == EXIT_MESSAGE:
        with get_client(sync_client=True) as prefect:
            prefect.set_flow_run_state(flow_run.id, Crashed(message=WORKER_LOST), force=True)
    client = connect(tracking_uri())
    for run_id in run_ids(client, FLOW_RUN_TAG, str(flow_run.id)):
        ended = "was cancelled" if state.is_cancelling() else "failed"
        set_run_tags(client, run_id, {PROMOTED_TAG: "false", NOTE_TAG: f"The run {ended}: nothing was promoted."})
        finish_run(client, run_id, "FAILED" if state.is_failed() else "KILLED")


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A configuration as dotted names; sections in lists go by their own name."""
    values: dict[str, str] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            values |= flattened(value, f"{path}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                values |= flattened(item, f"{path}.{item.get('name', number)}.")
        else:
            values[path] = str(value)
    return values
