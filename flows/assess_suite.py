"""Judges a release by the suite of benchmarks that its scale names: the candidate's answers, and those of the champion
and of the anchors to the same items."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.load import load_suite
from configs.schema import SuiteGateRecipe, SuiteRecipe
from flows.running.run import JudgedSuite, Run
from flows.running.run_step import run_step
from infra.registry.model_registry import ANCHOR_PREFIX, CHAMPION, SUITE_TAG, RegisteredVersion
from infra.step import Artifact
from tasks.data.sources.list_sources import SourceListing, list_hub_files
from tasks.evaluation.benchmarks.benchmark_items import files_of
from tasks.evaluation.benchmarks.decide_suite import anchored_figure, decide_suite
from tasks.evaluation.benchmarks.evaluate_suite import SuiteEvaluation, evaluate_suite
from tasks.evaluation.benchmarks.run_suite import read_listed_items
from tasks.evaluation.comparisons import ServedFigures
from tasks.evaluation.decide_gate import Anchors, GateDecision
from tasks.release.decide_quantization import SuiteBounds
from tasks.release.evaluate_quantized import AnsweredSuite
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

if TYPE_CHECKING:
    from configs.schema import Scale
    from infra.registry.promotion import Rivals


def find_suite_files(scale: Scale, sources: SourceListing) -> SourceListing | None:
    """The files of the suite, of the hub and among the run's sources; None where the scale has none. Raises ValueError
    for a file that is not there, for records that do not fit, and for bounds on other benchmarks than the suite's."""
    wanted = scale.evaluation.suite
    if wanted is None:
        return None
    suite = load_suite(wanted.name)
    names = {benchmark.name for benchmark in suite.benchmarks}
    if others := sorted(names ^ wanted.bounds.keys()):
        raise ValueError(
            f"evaluation.suite.bounds must have a bound for each benchmark of suite {wanted.name} and no other "
            f"({', '.join(sorted(names))}): correct {others[0]}"
        )
    needed = suite.own_files
    meant = {name: files_of(name, sources) for name in needed}
    own = tuple({file.name: file for found in meant.values() for file in found}.values())
    if absent := sorted(name for name, found in meant.items() if not found):
        raise ValueError(
            f"benchmark {needed[absent[0]]} of suite {wanted.name} (evaluation.suite) reads {absent[0]}, which the "
            f"run's data do not hold: add it with the role evaluation to the directory that --data names, or set "
            f"evaluation.suite to null"
        )
    files = SourceListing(own + list_hub_files(suite.hub_files).files)
    read_listed_items(wanted.name, suite, files, wanted.limit)
    return files


def with_suite_files(sources: SourceListing, suite_files: SourceListing | None) -> SourceListing:
    """The sources with what the suite asks, so that training text is decontaminated against it. Files of examples have
    another role and are not added: nothing trains on them."""
    known = {file.name for file in sources.files}
    asked = [file for file in (() if suite_files is None else suite_files.files) if file.role == "evaluation"]
    added = [file for file in asked if file.name not in known]
    return SourceListing(tuple(sorted((*sources.files, *added), key=lambda file: file.name)))


def suite_figures(scale: Scale) -> tuple[str, ...]:
    """The figures of the scale's suite that have anchors; none where it has no suite."""
    suite = scale.evaluation.suite
    return () if suite is None else tuple(map(anchored_figure, suite.bounds))


def answer_suite(run: Run, checkpoint: Artifact[TrainedCheckpoint]) -> AnsweredSuite | None:
    """A release's answers to the suite, which its formats are asked, too; None where the scale has none."""
    if run.scale.evaluation.suite is None:
        return None
    assert run.suite_files is not None, "the files are found where a suite is named"
    return AnsweredSuite(_evaluate(run, checkpoint, "evaluate suite"), run.suite_files, _recipe(run))


def format_margins(scale: Scale) -> SuiteBounds:
    """How much a format may lose in each benchmark: as much as a release may against the champion."""
    wanted = scale.evaluation.suite
    return SuiteBounds({} if wanted is None else {name: bound.margin for name, bound in wanted.bounds.items()})


def judge_suite(
    run: Run,
    checkpoint: Artifact[TrainedCheckpoint],
    answered: AnsweredSuite | None,
    rivals: Rivals,
    served: ServedFigures,
) -> JudgedSuite | None:
    """Bounds on every benchmark, and the paired comparisons with champion and anchors; None where the scale has no
    suite. The reigning champion's own decision is the stored one, unless the suite has asked other questions since:
    then bounds and anchors judge its answers to those."""
    wanted = run.scale.evaluation.suite
    if wanted is None or answered is None:
        return None
    evaluation, champion = answered.evaluation, rivals.champion
    if champion is not None and rivals.is_champion(checkpoint) and SUITE_TAG in champion.tags:
        own = run.store.load(champion.tag(SUITE_TAG), GateDecision)
        if own.record.candidate_digest == evaluation.digest:
            return JudgedSuite(evaluation, own)

    def evaluated(version: RegisteredVersion, name: str) -> Artifact[SuiteEvaluation]:
        return _evaluate(run, run.store.load(version.key, TrainedCheckpoint), f"evaluate suite of {name}")

    theirs = None if champion is None or rivals.is_champion(checkpoint) else evaluated(champion, CHAMPION)
    anchors = {
        figure: evaluated(rivals.anchors[figure], f"{ANCHOR_PREFIX}{figure}")
        for figure in suite_figures(run.scale)
        if figure in rivals.anchors
    }
    decision = run_step(
        run,
        decide_suite,
        stage="gate suite",
        evaluation=evaluation,
        champion_evaluation=theirs,
        anchors=Anchors(anchors),
        recipe=SuiteGateRecipe(bounds=wanted.bounds),
        served=served,
    )
    return JudgedSuite(evaluation, decision)


def _recipe(run: Run) -> SuiteRecipe:
    section = run.scale.evaluation
    assert section.suite is not None, "a suite is asked where the scale has one"
    return SuiteRecipe(
        suite=load_suite(section.suite.name),
        limit=section.suite.limit,
        num_threads=section.recipe.num_threads,
        rollouts=section.recipe.rollouts,
    )


def _evaluate(run: Run, checkpoint: Artifact[TrainedCheckpoint], stage: str) -> Artifact[SuiteEvaluation]:
    resources = run.scale.evaluation.resources
    assert run.suite_files is not None, "the files are found where a suite is named"
    return run_step(
        run,
        evaluate_suite,
        stage=stage,
        checkpoint=checkpoint,
        files=run.suite_files,
        recipe=_recipe(run),
        resources=resources,
        job=resources,
    )
