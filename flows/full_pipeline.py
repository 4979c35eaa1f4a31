"""The flow `glm46`: from raw documents to a promoted, served model; deployment glm46/full-pipeline."""

from __future__ import annotations

import time

from prefect import State, flow, get_run_logger

from configs.load import load_scale
from flows.assess_suite import find_suite_files, with_suite_files
from flows.check_start import check_start, local_start, refuse_other_template
from flows.expect_cost import say_cost
from flows.mid_train_model import mid_train_model
from flows.parameters import DataAddress, ScaleName, StageName, StoreAddress
from flows.post_train_model import post_train_model
from flows.prepare_data import prepare_data
from flows.pretrain_model import pretrain_model
from flows.release_model import promote_release, release_model
from flows.running.run import ReleasedModel, Run
from flows.running.stage_log import StageLog
from flows.show.outcome import RunOutcome
from flows.show.report_failure import tell_failure, tell_refusal
from flows.show.report_run import PublishedReport, report_run
from flows.show.reported import reported_phases
from flows.show.say_left_out import say_unread
from flows.show.show_run import show_data, show_outcome, show_phases, show_release
from flows.show.show_trend import show_trend
from flows.show.track_run import (
    approve_inputs,
    end_tracking,
    finish_pipeline,
    log_outcome,
    name_flow_run,
    track_pipeline,
)
from flows.stages import (
    StageWindow,
    choose_stages,
    refuse_missing_inputs,
    require_programs,
    with_tokenizer_of_start,
    without_required_gains,
)
from flows.start_weights import find_start
from flows.train_phases import PhaseHistory, assess_start, pack_phases, pack_preferences
from infra.code_digest import read_code
from infra.home import open_home
from infra.machine.doctor import check_room, require
from infra.registry.experiment_tracking import connect
from infra.registry.model_registry import CHAMPION, model_name
from infra.servers.servers import refuse_unlinkable_weights, tracking_uri
from infra.storage.open_store import open_store
from tasks.data.seeds.seed_problems import require_sandbox
from tasks.data.sources.list_sources import list_sources
from tasks.prepared_data import PreparedData
from tasks.unread_data import unread_data


@flow(
    name="glm46",
    flow_run_name=name_flow_run,
    log_prints=False,
    on_failure=[tell_failure, end_tracking],
    on_crashed=[tell_failure, end_tracking],
    on_cancellation=[end_tracking],
)
def full_pipeline(
    scale: ScaleName = "tiny",
    store: StoreAddress | None = None,
    data: DataAddress | None = None,
    from_stage: StageName | None = None,
    start: str | None = None,
    until: StageName | None = None,
) -> RunOutcome | State[RunOutcome]:
    """Run a scale from raw documents to the alias `champion`.

    Args:
        scale: How large: micro, tiny, nightly, ...; a YAML file of your own is named by its path on the worker's
            machine, with its ending.
        store: Where artifacts are kept: a directory by its whole path (/...), or s3://bucket/prefix. Without one, the
            home's own store.
        data: Your documents: a directory or file of the worker's machine, s3://bucket/prefix or hf://owner/name.
            Without one, the documentation of Python on that machine.
        from_stage: Begin at this phase, or at release_model, with the weights that `start` names.
        start: The weights to begin with: a checkpoint key, a Hugging Face directory, hf://owner/name, or an alias of
            the scale's model.
        until: End after this stage. Without one, the run continues to the release.
    """
    started = time.monotonic()
    read_code()
    home = open_home()
    configuration = load_scale(scale)
    window = choose_stages(configuration, from_stage, start, until)
    start = local_start(configuration, start)
    configuration = with_tokenizer_of_start(configuration, start)
    configuration = configuration if data is None else without_required_gains(configuration)
    refuse_missing_inputs(configuration, window, data)
    needed = "pretrain" if window.reads_documents else "sft"
    sources = list_sources(data, get_run_logger().info, needed, configuration.data.recipe.ingest.max_record_bytes)
    suite_files = find_suite_files(configuration, sources)
    sources = with_suite_files(sources, suite_files)
    opened = open_store(store, home)
    refuse_unlinkable_weights(home, opened.uri)
    require_programs(configuration, window)
    require(*check_room(home, opened.staging_root))
    require_sandbox(sources.files)
    mlflow = tracking_uri()
    if start is not None:
        check_start(configuration, start, opened, lambda: connect(mlflow))
        if not window.phases:
            refuse_other_template(start)
    log = StageLog(get_run_logger().info)
    run = Run(configuration, home, opened, mlflow, track_pipeline(mlflow, configuration), log, suite_files)

    say_cost(run, window)
    prepared = prepare_data(run, sources, window.reads_documents, window.reads_pairs)
    approve_inputs(run, prepared.contracts)
    show_data(run, prepared)
    say_unread(run, prepared)
    history = _train(run, prepared, window, start)
    released, outcome = _conclude(run, prepared, window, history, started)
    while released is not None and not released.reasons and promote_release(run, prepared, released) == "overtaken":
        run.log.say("champion, version or block list changed during the comparison: this release is judged again")
        released, outcome = _conclude(run, prepared, window, history, started)
    finish_pipeline(run, outcome)
    outcome = outcome.model_copy(update={"stages": run.log.results})
    return tell_refusal(outcome) if outcome.reasons else outcome


def _train(run: Run, prepared: PreparedData, window: StageWindow, start: str | None) -> PhaseHistory:
    """Trains the phases of the window, one after the other; weights that are released without training are assessed."""
    rows = pack_phases(run, prepared, window.phases)
    pairs = pack_preferences(run, prepared, window.phases)
    history = PhaseHistory(None if start is None else find_start(run, start, prepared), rows, pairs)
    if window.pre_training:
        history = pretrain_model(run, prepared, window.pre_training, history)
    if window.mid_training:
        history = mid_train_model(run, prepared, window.mid_training, history)
    if window.post_training:
        history = post_train_model(run, prepared, window.post_training, history)
    if history.start is not None and not history.models:
        history = history.followed_by(assess_start(run, prepared, history.start))
    return history


def _conclude(
    run: Run, prepared: PreparedData, window: StageWindow, history: PhaseHistory, started: float
) -> tuple[ReleasedModel | None, RunOutcome]:
    """The release, judged and not promoted yet, with the outcome that report and servers show; no release where the
    run ends before it. Started: seconds of the monotonic clock."""
    candidate = history.candidate
    released = (
        release_model(run, prepared, candidate)
        if window.releases and candidate is not None and not history.reasons
        else None
    )
    if released is not None:
        show_release(run, released)
    phases = reported_phases(history.models, window.phases, unread_data(prepared, run.scale))
    report = report_run(run, prepared, phases, released) if phases.phases else None
    outcome = _outcome(run, history, released, report, time.monotonic() - started)
    if phases.phases:
        show_phases(run, prepared, phases)
    show_outcome(run, phases, outcome)
    log_outcome(run, outcome, () if report is None else report.files)
    if phases.phases:
        show_trend(run, phases, outcome)
    return released, outcome


def _outcome(
    run: Run, history: PhaseHistory, released: ReleasedModel | None, report: PublishedReport | None, seconds: float
) -> RunOutcome:
    """The result of the run, before an accepted release is promoted."""
    accepted = released is not None and released.promotion.record.accepted
    candidate = history.candidate
    return RunOutcome(
        promoted=accepted,
        model=model_name(run.scale.scale),
        alias=CHAMPION if accepted else "",
        version="" if candidate is None else candidate.version,
        seconds=round(seconds, 1),
        digest="" if candidate is None else candidate.checkpoint.record.export_digest,
        report="" if report is None else str(report.path),
        stages=run.log.results,
        reasons=[*history.reasons, *(released.reasons if released is not None else ())],
    )
