"""Release: GGUF files, quantized checkpoints, comparison with champion and anchors, smoke test, promotion, refusal."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefect import flow

from flows.ask_approval import find_approval
from flows.assess_checkpoint import evaluate
from flows.assess_suite import answer_suite, format_margins, judge_suite, suite_figures
from flows.find_taken_down import change_of_block_list
from flows.quantize_model import (
    calibration_texts,
    calibrations_of,
    quantize_model,
    register_formats,
    releases_on_nodes,
    write_gguf_files,
)
from flows.running.branches import Branches
from flows.running.run import AssessedModel, QuantizedModel, ReleasedModel
from flows.running.run_step import run_effect, run_step
from infra.registry.experiment_tracking import connect
from infra.registry.model_registry import (
    ANCHOR_PREFIX,
    CANDIDATE,
    FIGURES_TAG,
    GGUF_TAG,
    PROMOTION_DECISION_TAG,
    PROMOTION_TAG,
    QUANTIZED_TAG,
    SUITE_TAG,
    RegisteredVersion,
    ensure_alias,
    ensure_registered,
    find_version,
    model_name,
)
from infra.registry.promotion import Promotion, Rivals, look_up_rivals, promote, refusal_of
from infra.servers.servers import artifact_root
from infra.step import Artifact
from tasks.evaluation.comparisons import FIGURES, ServedFigures
from tasks.evaluation.decide_gate import Anchors, GateDecision, decide_gate
from tasks.evaluation.evaluate_checkpoint import Evaluation
from tasks.prepared_data import PreparedData
from tasks.release.check_parity import check_parity, optional_engines
from tasks.release.convert_to_gguf import GgufFiles
from tasks.release.decide_contamination import decide_contamination
from tasks.release.decide_promotion import Withdrawal, decide_promotion, refusals_of
from tasks.release.decide_quantization import QuantizedEvaluations, decide_quantization
from tasks.release.evaluate_gguf import GgufEvaluation, evaluate_gguf
from tasks.release.evaluate_quantized import AnsweredSuite
from tasks.release.generate_reference import Reference, generate_reference
from tasks.release.measure_importance import ImportanceMatrix
from tasks.release.smoke_test import SmokeReport, smoke_test
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from flows.running.run import Run


@flow(name="release_model", flow_run_name="quantize, serve, compare", validate_parameters=False)
def release_model(run: Run, prepared: PreparedData, assessed: AssessedModel) -> ReleasedModel:
    """Register a phase's checkpoint as a release, and accept it for the alias `champion` or refuse it with
    reasons."""
    checkpoint = assessed.checkpoint
    recipe, job = run.scale.release.recipe, run.scale.release.resources
    client, name = connect(run.mlflow), model_name(run.scale.scale)

    evaluates_on_nodes = run.scale.evaluation.resources.launcher != "local"
    with Branches(run, are_side_by_side=releases_on_nodes(run) or evaluates_on_nodes) as branches:
        answering = branches.begin("suite", lambda: answer_suite(run, checkpoint))
        formats = convert_and_quantize(run, prepared, assessed, answering)
    answered = answering.result()
    rivals = _look_up_rivals(run, client)
    if not rivals.is_champion(checkpoint):
        run_effect(run, "alias candidate", lambda: ensure_alias(client, name, CANDIDATE, assessed.version))
    served = formats.gguf_evaluation.record.served
    decision = judge_against_rivals(run, prepared, assessed, rivals, served)
    suite = judge_suite(run, checkpoint, answered, rivals, served)
    contamination = _judge_contamination(run, prepared)
    parity = run_step(
        run,
        check_parity,
        reference=formats.reference,
        checkpoint=checkpoint,
        gguf=formats.gguf,
        optional=optional_engines(),
        recipe=recipe.parity_recipe(),
        resources=run.scale.serving.resources,
        job=job,
    )
    served_files = {"gguf": formats.gguf, "reference": formats.reference}
    smoke = run_step(
        run, smoke_test, stage="deploy and smoke-test", resources=run.scale.serving.resources, **served_files
    )
    withdrawal = find_withdrawal(run, prepared, checkpoint)
    judged = (decision, suite and suite.decision, formats.decision, contamination)
    gates = [gate for gate in judged if gate is not None]
    is_refused = bool(refusals_of((*gates, parity), smoke, withdrawal))
    promotion = run_step(
        run,
        decide_promotion,
        stage="gate promotion",
        comparison=decision,
        benchmarks=None if suite is None else suite.decision,
        quantization=formats.decision,
        contamination=contamination,
        parity=parity,
        smoke=smoke,
        withdrawal=withdrawal,
        approval=None if is_refused else find_approval(run, assessed, rivals, gates),
    )

    decisions = {PROMOTION_TAG: decision.key, PROMOTION_DECISION_TAG: promotion.key}
    decisions |= {} if suite is None else {SUITE_TAG: suite.decision.key}
    version = _register(run, assessed, formats, decisions, smoke)
    compared = () if rivals.is_champion(checkpoint) else (decision, *([] if suite is None else [suite.decision]))
    scored = (formats.gguf_evaluation, formats.quantized, formats.decision, contamination)
    return ReleasedModel(version, rivals, _anchors(version, rivals, compared), *scored, decision, promotion, suite)


def _anchors(version: str, rivals: Rivals, compared: Iterable[Artifact[GateDecision]]) -> dict[str, str]:
    """By figure, what becomes its anchor with the promotion: the version, or the champion before it."""
    records = [gate.record for gate in compared]
    own = {figure: version for record in records for figure in record.anchored}
    if rivals.champion is None:
        return own
    return own | {figure: rivals.champion.version for record in records for figure in record.champion_anchored}


def _look_up_rivals(run: Run, client: MlflowClient) -> Rivals:
    name, figures = model_name(run.scale.scale), (*FIGURES, *suite_figures(run.scale))
    return run_effect(
        run,
        "look up champion",
        lambda: look_up_rivals(client, run.store, name, figures, run.log.say),
        describe=_describe_rivals,
    )


def _register(
    run: Run, assessed: AssessedModel, formats: ReleasedFormats, decisions: dict[str, str], smoke: Artifact[SmokeReport]
) -> str:
    """The version of the release, with its decisions as tags, and a version of each format."""
    client, name, root = connect(run.mlflow), model_name(run.scale.scale), artifact_root(run.home)
    tags = {**formats.tags, **decisions, "glm46.smoke_test": "passed" if smoke.record.passed else "failed"}
    version, _ = run_effect(
        run,
        "register release",
        lambda: ensure_registered(client, name, assessed.checkpoint, "hf", assessed.run_id, root, tags, ""),
        describe=lambda result: f"version {result[0]} {result[1]}",
    )
    run_effect(
        run,
        "register formats",
        lambda: register_formats(client, f"{name}/{version}", formats.quantized, assessed.run_id, root),
    )
    return version


def _judge_contamination(run: Run, prepared: PreparedData) -> Artifact[GateDecision]:
    return run_step(
        run,
        decide_contamination,
        stage="gate contamination",
        contamination=prepared.contamination,
        recipe=run.scale.release.recipe.contamination_bound(),
    )


@dataclass(frozen=True)
class ReleasedFormats:
    """A checkpoint in every format of the release, and whether each lost little enough."""

    reference: Artifact[Reference]
    """The checkpoint's own answers, with which those of a server are compared."""
    gguf: Artifact[GgufFiles]
    gguf_evaluation: Artifact[GgufEvaluation]
    quantized: dict[str, QuantizedModel]
    decision: Artifact[GateDecision]

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the version that name the keys of its formats and of what was measured of them."""
        keys = {f"{QUANTIZED_TAG}{name}": model.checkpoint.key for name, model in self.quantized.items()}
        figures = {f"{FIGURES_TAG}{name}": model.evaluation.key for name, model in self.quantized.items()}
        return {GGUF_TAG: self.gguf.key, **keys, f"{FIGURES_TAG}GGUF": self.gguf_evaluation.key, **figures}


def convert_and_quantize(
    run: Run, prepared: PreparedData, assessed: AssessedModel, answered: Future[AnsweredSuite | None]
) -> ReleasedFormats:
    """Write GGUF files and quantized checkpoints, evaluate each, and judge what the conversion costs; beside them the
    reference answers, where they are jobs on nodes."""
    recipe, job = run.scale.release.recipe, run.scale.release.resources
    checkpoint, texts = assessed.checkpoint, calibration_texts(run, prepared)

    def convert() -> tuple[Artifact[GgufFiles], Artifact[ImportanceMatrix] | None, Artifact[GgufEvaluation]]:
        gguf, importance = write_gguf_files(run, checkpoint, texts)
        evaluation = run_step(
            run,
            evaluate_gguf,
            gguf=gguf,
            checkpoint=checkpoint,
            suite=prepared.suite,
            evaluation=assessed.evaluation,
            recipe=recipe.format_recipe(run.scale.evaluation.recipe),
            resources=run.scale.serving.resources,
            job=job,
        )
        return gguf, importance, evaluation

    def answer() -> Artifact[Reference]:
        asked = recipe.reference_recipe()
        return run_step(
            run, generate_reference, checkpoint=checkpoint, suite=prepared.suite, recipe=asked, resources=job, job=job
        )

    with Branches(run, are_side_by_side=releases_on_nodes(run)) as branches:
        converting = branches.begin("GGUF", convert)
        answering = branches.begin("reference", answer)
        quantized = quantize_model(run, prepared, assessed, answered, texts)
    gguf, importance, evaluation = converting.result()
    decision = run_step(
        run,
        decide_quantization,
        stage="gate quantization",
        gguf_evaluation=evaluation,
        quantized=QuantizedEvaluations({name: model.evaluation for name, model in quantized.items()}),
        calibrations=calibrations_of(quantized, importance),
        recipe=recipe,
        benchmarks=format_margins(run.scale),
    )
    return ReleasedFormats(answering.result(), gguf, evaluation, quantized, decision)


def find_withdrawal(run: Run, prepared: PreparedData, checkpoint: Artifact[TrainedCheckpoint]) -> Withdrawal:
    """Whether somebody has rolled back the version of this checkpoint, or taken down a text of it, also since this run
    filtered its documents."""
    version = find_version(connect(run.mlflow), model_name(run.scale.scale), checkpoint.digest)
    refusal = "" if version is None else refusal_of(version)
    return Withdrawal(reason=refusal or change_of_block_list(run, prepared))


def judge_against_rivals(
    run: Run, prepared: PreparedData, assessed: AssessedModel, rivals: Rivals, served: ServedFigures
) -> Artifact[GateDecision]:
    """Floors and the paired comparisons on the candidate's items, and on its answers as served; the stored decision if
    the candidate is champion."""
    if rivals.champion is not None and rivals.is_champion(assessed.checkpoint):
        return run.store.load(rivals.champion.promotion_key, GateDecision)
    evaluations: dict[str, Artifact[Evaluation]] = {assessed.checkpoint.digest: assessed.evaluation}

    def evaluated(version: RegisteredVersion, stage: str) -> Artifact[Evaluation]:
        if version.digest not in evaluations:
            evaluations[version.digest] = evaluate(run, prepared, run.store.load(version.key, TrainedCheckpoint), stage)
        return evaluations[version.digest]

    champion = None if rivals.champion is None else evaluated(rivals.champion, "evaluate champion")
    anchors = {
        figure: evaluated(version, f"evaluate {ANCHOR_PREFIX}{figure}")
        for figure, version in rivals.anchors.items()
        if figure in FIGURES
    }
    return run_step(
        run,
        decide_gate,
        stage="gate champion",
        evaluation=assessed.evaluation,
        start_evaluation=None,
        champion_evaluation=champion,
        anchors=Anchors(anchors),
        recipe=assessed.phase.recipe.gate,
        served=served,
    )


def promote_release(run: Run, prepared: PreparedData, released: ReleasedModel) -> Promotion:
    """Give an accepted release the alias `champion`, as the last act of a run: everything that can fail was done
    before. `overtaken` where it must be judged again, because champion, version or block list changed meanwhile."""
    client, name = connect(run.mlflow), model_name(run.scale.scale)

    def act() -> Promotion:
        if change_of_block_list(run, prepared):
            return "overtaken"
        return promote(client, run.store, name, released.version, released.anchors, released.rivals, run.log.say)

    return run_effect(run, "promote", act)


def _describe_rivals(rivals: Rivals) -> str:
    if rivals.champion is None:
        return "none reigns"
    anchors = sorted({version.version for version in rivals.anchors.values()}, key=int)
    return f"version {rivals.champion.version}" + (f", anchored by {', '.join(anchors)}" if anchors else "")
