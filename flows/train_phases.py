"""Trains phases: each reads its data, trains and is assessed, until a gate refuses.

A phase starts from the weights of the phase that its `start` names, and its gate compares it with those.

The flows of pre-, mid- and post-training share this.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from configs.schema import PairPackingRecipe, PhaseSection
from flows.assess_checkpoint import assess_checkpoint, evaluate
from flows.assess_pairs import assess_pairs, assess_reward_model
from flows.check_contract import check_contract
from flows.running.branches import Branches
from flows.running.run import AssessedModel, AssessedRewardModel, Run
from flows.running.run_step import run_step
from flows.show.say_left_out import say_left_out, say_unasked
from flows.show.show_run import show_phase
from flows.show.track_run import log_solutions, track_phase
from flows.solution_rules import refuse_long_prompts, refuse_too_few_solutions, refuse_unanswered_domains
from flows.start_weights import import_own_model
from infra.machine.spark import stop_spark
from infra.registry.experiment_tracking import connect, log_metrics
from infra.registry.machine_metrics import logging_machine
from infra.step import Artifact
from infra.storage.store import step_key
from tasks.data.packing.pack_pairs import PackedPairs, pack_pairs
from tasks.data.packing.pack_phase import PackedPhase, pack_phase
from tasks.data.shards.shard_chats import ChatShards, shard_chats
from tasks.evaluation.evaluate_checkpoint import Evaluation
from tasks.evaluation.sample_solutions import SampledSolutions, sample_solutions
from tasks.prepared_data import PreparedData
from tasks.training.input_rules import refuse_foreign_expert
from tasks.training.policy.prompt_order import refuse_missing_prompts
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import train_phase


@dataclass(frozen=True)
class PhaseHistory:
    """What this run has trained so far, in order, and the weights that it started from."""

    start: Artifact[TrainedCheckpoint] | None
    rows: Mapping[str, Artifact[PackedPhase]]
    """The rows that each phase reads, by its name; a phase that samples answers, or solutions, has none yet."""
    pairs: Mapping[str, Artifact[PackedPairs]] = field(default_factory=dict)
    """The preference pairs that each phase reads, by its name; only reward and DPO phases have some."""
    models: tuple[AssessedModel | AssessedRewardModel, ...] = ()

    @property
    def candidate(self) -> AssessedModel | None:
        """The newest language model, which a release takes; None where there is none yet."""
        return next((model for model in reversed(self.models) if isinstance(model, AssessedModel)), None)

    def model_of(self, phase: PhaseSection | None) -> AssessedModel | AssessedRewardModel | None:
        """The model that this run made in a phase; None where `start` replaces it."""
        return next((model for model in self.models if phase is not None and model.phase.name == phase.name), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why gates refused; empty while all accepted."""
        return tuple(reason for model in self.models for reason in model.reasons)

    def followed_by(self, model: AssessedModel | AssessedRewardModel) -> PhaseHistory:
        return replace(self, models=(*self.models, model))


def pack_phases(run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...]) -> dict[str, Artifact[PackedPhase]]:
    """The rows of these phases by name, packed before anything is trained: so a lack of text for the last one is known
    at the start, as is a lack of prompts, or of room for their answers. Only the rows of rejection sampling and
    distillation wait for the weights that answer.

    A phase continues where the course's earlier phases stopped, so those are packed too where the run begins after
    them.
    """
    rows: dict[str, Artifact[PackedPhase]] = {}
    for phase in phases:
        if phase.recipe.reads_rows and not phase.recipe.samples_solutions:
            _pack(run, prepared, phase, rows)
        elif phase.recipe.samples_answers and prepared.documents is not None:
            recipe, prompts = run.scale.training_recipe(phase), prepared.documents.decontaminated
            say_unasked(run, phase, refuse_missing_prompts(recipe, prompts, prepared.tokenizer))
        elif phase.recipe.samples_solutions and prepared.documents is not None:
            if phase.recipe.experts:
                refuse_unanswered_domains(phase, prepared.documents.decontaminated.record.prompts_by_domain)
            refuse_long_prompts(phase, prepared.documents.decontaminated, prepared.tokenizer)
    return rows


def pack_preferences(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...]
) -> dict[str, Artifact[PackedPairs]]:
    """The preference pairs of these phases by name, packed before anything is trained."""
    packed: dict[str, Artifact[PackedPairs]] = {}
    for phase in phases:
        if phase.recipe.reads_pairs:
            recipe = PairPackingRecipe(sequence_length=phase.recipe.sequence_length)
            packed[phase.name] = run_step(
                run,
                pack_pairs,
                stage=f"pack {phase.name}",
                preferences=prepared.preferences,
                tokenizer=prepared.tokenizer,
                recipe=recipe,
            )
            check_contract(run, packed[phase.name], "packed_pairs", stage=f"contract pairs {phase.name}")
    return packed


def train_phases(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...], history: PhaseHistory
) -> PhaseHistory:
    """Train the phases, each after those that it needs; as jobs on nodes, others are trained beside it. After a refusal
    no further one begins, also of other branches."""
    begun: dict[str, Future[AssessedModel | AssessedRewardModel | None]] = {}
    on_nodes = any(phase.resources.launcher != "local" for phase in phases)
    with Branches(run, are_side_by_side=on_nodes) as branches:
        for phase in phases:
            needed = [begun[name] for name in _needs(run, phase) if name in begun]
            train = partial(_train_after, run, prepared, phase, needed, begun, history)
            begun[phase.name] = branches.begin(phase.name, train)
    return _continued(history, begun)


def _needs(run: Run, phase: PhaseSection) -> tuple[str, ...]:
    """Names of the phases whose models a phase reads."""
    start, named = run.scale.start_of(phase), (phase.recipe.reward_model, phase.recipe.reference)
    experts = (expert.phase for expert in phase.recipe.experts)
    return (*(() if start is None else (start.name,)), *(name for name in named if name is not None), *experts)


def _train_after(
    run: Run,
    prepared: PreparedData,
    phase: PhaseSection,
    needed: list[Future[AssessedModel | AssessedRewardModel | None]],
    begun: dict[str, Future[AssessedModel | AssessedRewardModel | None]],
    history: PhaseHistory,
) -> AssessedModel | AssessedRewardModel | None:
    """The model of a phase, trained when those that it needs are there; None where a gate has refused meanwhile."""
    wait(needed)
    history = _continued(history, {name: future for name, future in list(begun.items()) if future.done()})
    if history.reasons or any(future.result() is None for future in needed):
        return None
    model = _train(run, prepared, phase, history)
    show_phase(run, model)
    return model


def _continued(
    history: PhaseHistory, ended: Mapping[str, Future[AssessedModel | AssessedRewardModel | None]]
) -> PhaseHistory:
    """The history with the models of these phases, in their order."""
    for future in ended.values():
        if future.exception() is None and (model := future.result()) is not None:
            history = history.followed_by(model)
    return history


def _train(
    run: Run, prepared: PreparedData, phase: PhaseSection, history: PhaseHistory
) -> AssessedModel | AssessedRewardModel:
    before = history.model_of(run.scale.start_of(phase))
    start = history.start if before is None else before.checkpoint
    if (own := phase.recipe.own_model) is not None:
        start = import_own_model(run, phase, prepared, own)
    solutions = None
    if phase.recipe.asks_models:
        solutions = _sample(run, prepared, phase, _answering(phase, start, history))
    pairs = history.pairs.get(phase.name)
    packed, inputs = _training_inputs(run, prepared, phase, history, solutions)
    validation = None if prepared.documents is None else prepared.documents.validation
    inputs |= {"validation": validation, "tokenizer": prepared.tokenizer, "start": start}
    inputs |= {
        "pairs": pairs,
        "reward_model": _checkpoint_of(phase.recipe.reward_model, history),
        "reference_model": _checkpoint_of(phase.recipe.reference, history),
        "pass_rates": solutions if phase.recipe.samples_answers else None,
    }
    run_id = track_phase(run, phase, step_key(train_phase.identity(run.scale.training_recipe(phase), inputs)))
    checkpoint = _train_tracked(run, phase, run_id, inputs)
    if pairs is not None and not phase.recipe.trains_language_model:
        return assess_reward_model(run, phase, checkpoint, pairs, run_id)
    preferred = None if pairs is None else assess_pairs(run, phase, checkpoint, pairs)
    evaluated = before.evaluation if isinstance(before, AssessedModel) else _evaluate_given(run, prepared, history)
    model = assess_checkpoint(run, prepared, phase, checkpoint, packed, evaluated, run_id, preferred)
    if solutions is None:
        return model
    log_solutions(run, phase, run_id, solutions)
    return replace(model, solutions=solutions)


def _train_tracked(run: Run, phase: PhaseSection, run_id: str, inputs: dict[str, Any]) -> Artifact[TrainedCheckpoint]:
    """Train with metrics on the phase's MLflow run; with those of this machine where the ranks are here."""
    log = partial(log_metrics, connect(run.mlflow), run_id)
    is_here = phase.resources.launcher == "local"
    with logging_machine(run.mlflow, run_id, log) if is_here else nullcontext(log) as logged:
        return run_step(
            run,
            train_phase,
            stage=f"train {phase.name}",
            recipe=run.scale.training_recipe(phase),
            resources=phase.resources,
            log_metrics=logged,
            **inputs,
        )


def _checkpoint_of(name: str | None, history: PhaseHistory) -> Artifact[TrainedCheckpoint] | None:
    """The model that this run made in the phase of this name; None for None."""
    if name is None:
        return None
    return next(model.checkpoint for model in history.models if model.phase.name == name)


def _training_inputs(
    run: Run,
    prepared: PreparedData,
    phase: PhaseSection,
    history: PhaseHistory,
    solutions: Artifact[SampledSolutions] | None,
) -> tuple[Artifact[PackedPhase] | None, dict[str, Any]]:
    """The packed rows of the phase, or the prompts of one that samples its own answers; neither for preference
    pairs."""
    inputs: dict[str, Any] = dict.fromkeys(("packed", "shards", "chats", "prompts"))
    if phase.recipe.samples_answers:
        assert prepared.documents is not None, "prompts are decontaminated with the documents"
        return None, inputs | {"prompts": prepared.documents.decontaminated}
    if phase.recipe.reads_pairs:
        return None, inputs
    if solutions is None:
        packed, chats = history.rows[phase.name], _chats_of(prepared, phase)
    else:
        packed, chats = _pack_solutions(run, prepared, phase, solutions)
    return packed, inputs | {"packed": packed, "shards": prepared.shards, "chats": chats}


def _answering(
    phase: PhaseSection, start: Artifact[TrainedCheckpoint] | None, history: PhaseHistory
) -> dict[str, Artifact[TrainedCheckpoint]]:
    """The models whose right answers a phase trains on, by their names as inputs of the step: its start, or experts by
    their phases."""
    if phase.recipe.experts:
        experts = {expert.phase for expert in phase.recipe.experts}
        return {model.phase.name: model.checkpoint for model in history.models if model.phase.name in experts}
    assert start is not None, phase.name
    return {"checkpoint": start}


def _sample(
    run: Run, prepared: PreparedData, phase: PhaseSection, models: Mapping[str, Artifact[TrainedCheckpoint]]
) -> Artifact[SampledSolutions]:
    """Right answers of the models, counted for each prompt. Raises ValueError where they are too few to train on, and
    for an expert that does not fit."""
    assert prepared.documents is not None, phase.name
    for expert in models.values() if phase.recipe.experts else ():
        refuse_foreign_expert(run.scale.training_recipe(phase), prepared.tokenizer, expert)
    inputs: dict[str, Any] = {**models, "prompts": prepared.documents.decontaminated}
    job = run.scale.evaluation.resources
    solutions = run_step(
        run,
        sample_solutions,
        stage=f"sample {phase.name}",
        recipe=phase.recipe.solution_recipe,
        resources=job.model_copy(update={"rollout_server": phase.resources.rollout_server}),
        job=job,
        **inputs,
    )
    if phase.recipe.samples_solutions:
        refuse_too_few_solutions(phase, solutions.record)
    check_contract(run, solutions, "sampled_solutions", stage=f"contract solutions {phase.name}")
    return solutions


def _pack_solutions(
    run: Run, prepared: PreparedData, phase: PhaseSection, solutions: Artifact[SampledSolutions]
) -> tuple[Artifact[PackedPhase], Artifact[ChatShards]]:
    """The rows of a phase that reads sampled answers, and the shards of these."""
    chats = run_step(
        run,
        shard_chats,
        stage=f"shard {phase.name}",
        chats=solutions,
        tokenizer=prepared.tokenizer,
        recipe=run.scale.data.recipe.shards,
        resources=run.scale.data.resources,
    )
    check_contract(run, chats, "chat_shards", stage=f"contract shards {phase.name}")
    packed = _pack_rows(run, prepared, phase, chats, None)
    stop_spark()
    return packed, chats


def _pack(
    run: Run, prepared: PreparedData, phase: PhaseSection, rows: dict[str, Artifact[PackedPhase]]
) -> Artifact[PackedPhase]:
    before = run.scale.packed_before(phase)
    previous = _pack(run, prepared, before[-1], rows) if before else None
    if phase.name not in rows:
        rows[phase.name] = _pack_rows(run, prepared, phase, _chats_of(prepared, phase), previous)
    return rows[phase.name]


def _pack_rows(
    run: Run,
    prepared: PreparedData,
    phase: PhaseSection,
    chats: Artifact[ChatShards] | None,
    previous: Artifact[PackedPhase] | None,
) -> Artifact[PackedPhase]:
    packed = run_step(
        run,
        pack_phase,
        stage=f"pack {phase.name}",
        shards=prepared.shards,
        chats=chats,
        previous=previous,
        tokenizer=prepared.tokenizer if phase.recipe.fim_rate else None,
        recipe=phase.recipe.packing_recipe,
    )
    check_contract(run, packed, "packed", stage=f"contract packed {phase.name}")
    say_left_out(run, phase, packed)
    return packed


def _chats_of(prepared: PreparedData, phase: PhaseSection) -> Artifact[ChatShards] | None:
    return prepared.chat_shards if phase.recipe.reads_chats else None


def _evaluate_given(run: Run, prepared: PreparedData, history: PhaseHistory) -> Artifact[Evaluation] | None:
    """The evaluation of the weights that the run started with, on the same suite; None for random weights."""
    return None if history.start is None else evaluate(run, prepared, history.start, "evaluate start")


def assess_start(run: Run, prepared: PreparedData, start: Artifact[TrainedCheckpoint]) -> AssessedModel:
    """Judge weights that are released without training by the gate of the phase that the scale releases."""
    phase = run.scale.released_phase
    assert phase is not None, "a window with a release has a phase to release"
    return assess_checkpoint(run, prepared, phase, start, None, None, track_phase(run, phase, start.key))
