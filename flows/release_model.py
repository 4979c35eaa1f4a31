"""Release: GGUF files, their evaluation, the champion's rival comparison, a served smoke test, promotion or refusal."""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow

from flows.assess_checkpoint import AssessedModel, evaluate
from flows.run_step import Run, run_effect, run_step
from infra.experiment_tracking import connect
from infra.model_registry import (
    CHAMPION,
    GGUF_TAG,
    PROMOTION_TAG,
    RegisteredVersion,
    ensure_alias,
    ensure_registered,
    model_name,
    resolve_alias,
)
from infra.model_server import SERVED_TYPE, running_model_server
from infra.servers import artifact_root
from infra.step import Artifact
from tasks.data.prepared_data import PreparedData
from tasks.evaluation.decide_gate import GateDecision, decide_gate
from tasks.release.convert_to_gguf import GgufFiles, convert_to_gguf
from tasks.release.decide_release import decide_release
from tasks.release.evaluate_gguf import GgufEvaluation, evaluate_gguf
from tasks.release.generate_reference import Reference, generate_reference
from tasks.release.smoke_test import SmokeReport, smoke_test
from tasks.training.train_phase import TrainedCheckpoint


@dataclass(frozen=True)
class ReleasedModel:
    """The end of a release; `reasons` is empty unless a gate or the smoke test refused."""

    promoted: bool
    version: str
    reasons: tuple[str, ...]
    gguf_evaluation: Artifact[GgufEvaluation]
    release_decision: Artifact[GateDecision]
    """On the quantized files."""
    decision: Artifact[GateDecision]
    """On the comparison with the champion."""


@flow(name="release_model", flow_run_name="quantize, serve, compare, promote", validate_parameters=False)
def release_model(run: Run, prepared: PreparedData, assessed: AssessedModel) -> ReleasedModel:
    """Promote the last phase's checkpoint to the alias `champion`, or refuse it with reasons."""
    checkpoint = assessed.checkpoint
    recipe, serving = run.scale.release.recipe, run.scale.serving.resources
    client, name = connect(run.mlflow), model_name(run.scale.scale)

    gguf = run_step(run, convert_to_gguf, checkpoint=checkpoint, recipe=recipe)
    gguf_evaluation = run_step(run, evaluate_gguf, gguf=gguf, checkpoint=checkpoint, suite=prepared.suite, recipe=recipe, resources=serving)
    release_decision = run_step(run, decide_release, stage="gate release", gguf_evaluation=gguf_evaluation, recipe=recipe)
    reference = run_step(run, generate_reference, checkpoint=checkpoint, recipe=recipe)

    champion = run_effect(run, "look up champion", lambda: resolve_alias(client, name, CHAMPION), describe=_describe_champion)
    decision = judge_against_champion(run, prepared, assessed, champion)
    smoke = run_effect(run, "deploy and smoke-test", lambda: deploy_and_test(run, gguf, reference), describe=_describe_smoke)
    reasons = refusals(decision, release_decision, smoke)

    tags = {
        PROMOTION_TAG: decision.key,
        GGUF_TAG: gguf.key,
        "glm46.smoke_test": "passed" if smoke.passed else "failed",
    }
    version, _ = run_effect(
        run, "register release",
        lambda: ensure_registered(client, name, checkpoint, "hf", assessed.run_id, artifact_root(run.home), tags, ""),
        describe=lambda result: f"version {result[0]} {result[1]}",
    )  # fmt: skip
    if not reasons:
        run_effect(run, "promote", lambda: ensure_alias(client, name, CHAMPION, version))
    reigning = resolve_alias(client, name, CHAMPION)
    promoted = reigning is not None and reigning.digest == checkpoint.digest and not reasons
    return ReleasedModel(promoted, version, reasons, gguf_evaluation, release_decision, decision)


def judge_against_champion(
    run: Run, prepared: PreparedData, assessed: AssessedModel, champion: RegisteredVersion | None
) -> Artifact[GateDecision]:
    """Floors and the paired comparison with the champion on the candidate's items; the stored decision if the candidate is champion."""
    if champion is not None and champion.digest == assessed.checkpoint.digest:
        return run.store.load(champion.promotion_key, GateDecision)
    rival = None
    if champion is not None:
        rival = evaluate(run, prepared, run.store.load(champion.key, TrainedCheckpoint), "evaluate champion")
    gate = run.scale.phases[-1].recipe.gate
    return run_step(
        run, decide_gate, stage="gate champion", evaluation=assessed.evaluation, start_evaluation=None, champion_evaluation=rival,
        recipe=gate,
    )  # fmt: skip


def deploy_and_test(run: Run, gguf: Artifact[GgufFiles], reference: Artifact[Reference]) -> SmokeReport:
    """Serve the model with llama.cpp for as long as the smoke test takes."""
    path = gguf.path(gguf.record.file_names[SERVED_TYPE])
    with running_model_server(path, run.scale.serving.resources, run.home.run_dir / "model-server.log") as server:
        return smoke_test(server_url=server.url, reference=reference)


def refusals(decision: Artifact[GateDecision], release_decision: Artifact[GateDecision], smoke: SmokeReport) -> tuple[str, ...]:
    """Why the candidate may not become champion."""
    judged = [*decision.record.reasons, *release_decision.record.reasons]
    return tuple(reason for reason in judged if reason.startswith("refused")) + tuple(f"smoke test: {reason}" for reason in smoke.reasons)


def _describe_champion(champion: RegisteredVersion | None) -> str:
    return "none reigns" if champion is None else f"version {champion.version}"


def _describe_smoke(smoke: SmokeReport) -> str:
    return f"{'passed' if smoke.passed else 'failed'}, {smoke.num_compared_tokens} tokens compared"
