"""Trains phases one after the other: each reads its data, trains and is assessed, until a gate refuses.

The flows of pre-, mid- and post-training share this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from configs.schema import PhaseSection
from flows.assess_checkpoint import assess_checkpoint, evaluate
from flows.check_contract import check_contract
from flows.running.run import AssessedModel, Run
from flows.running.run_step import run_step
from flows.show.show_run import show_phase
from flows.show.track_run import track_phase
from infra.registry.experiment_tracking import connect, log_metrics
from infra.step import Artifact
from infra.storage.store import step_key
from tasks.data.packing.pack_phase import PackedPhase, pack_phase
from tasks.data.shards.shard_chats import ChatShards
from tasks.evaluation.evaluate_checkpoint import Evaluation
from tasks.prepared_data import PreparedData
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import train_phase


@dataclass(frozen=True)
class PhaseHistory:
    """What this run has trained so far, in order, and the weights that it started from."""

    start: Artifact[TrainedCheckpoint] | None
    rows: Mapping[str, Artifact[PackedPhase]]
    """The rows that each phase reads, by its name; a phase that samples its own answers has none."""
    models: tuple[AssessedModel, ...] = ()

    @property
    def last(self) -> AssessedModel | None:
        """The newest model; None before the first."""
        return self.models[-1] if self.models else None

    @property
    def checkpoint(self) -> Artifact[TrainedCheckpoint] | None:
        """The checkpoint that the next phase starts from; None for random weights."""
        return self.models[-1].checkpoint if self.models else self.start

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the last gate refused; empty while all accepted."""
        return self.models[-1].reasons if self.models else ()

    def followed_by(self, model: AssessedModel) -> PhaseHistory:
        return replace(self, models=(*self.models, model))


def pack_phases(run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...]) -> dict[str, Artifact[PackedPhase]]:
    """The rows of these phases by name, packed before anything is trained: so a lack of text for the last one is known
    at the start.

    A phase continues where the course's earlier phases stopped, so those are packed too where the run begins after
    them.
    """
    rows: dict[str, Artifact[PackedPhase]] = {}
    for phase in phases:
        if not phase.recipe.samples_answers:
            _pack(run, prepared, phase, rows)
    return rows


def train_phases(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...], history: PhaseHistory
) -> PhaseHistory:
    """Train the phases one after the other; after a refusal the rest is left out."""
    for phase in phases:
        if history.reasons:
            break
        model = _train(run, prepared, phase, history)
        show_phase(run, model)
        history = history.followed_by(model)
    return history


def _train(run: Run, prepared: PreparedData, phase: PhaseSection, history: PhaseHistory) -> AssessedModel:
    packed, inputs = _training_inputs(run, prepared, phase, history)
    validation = None if prepared.documents is None else prepared.documents.validation
    inputs |= {"validation": validation, "tokenizer": prepared.tokenizer, "start": history.checkpoint}
    recipe = run.scale.training_recipe(phase)
    run_id = track_phase(run, phase, step_key(train_phase.identity(recipe, inputs)))
    checkpoint = run_step(
        run,
        train_phase,
        stage=f"train {phase.name}",
        recipe=recipe,
        resources=phase.resources,
        log_metrics=partial(log_metrics, connect(run.mlflow), run_id),
        **inputs,
    )
    return assess_checkpoint(
        run, prepared, phase, checkpoint, packed, _start_evaluation(run, prepared, history), run_id
    )


def _training_inputs(
    run: Run, prepared: PreparedData, phase: PhaseSection, history: PhaseHistory
) -> tuple[Artifact[PackedPhase] | None, dict[str, Any]]:
    """The packed rows of the phase, or the prompts of one that samples its own answers."""
    if phase.recipe.samples_answers:
        assert prepared.documents is not None, "prompts are decontaminated with the documents"
        prompts = prepared.documents.decontaminated
        return None, {"packed": None, "shards": None, "chats": None, "prompts": prompts}
    packed = history.rows[phase.name]
    return packed, {"packed": packed, "shards": prepared.shards, "chats": _chats_of(prepared, phase), "prompts": None}


def _pack(
    run: Run, prepared: PreparedData, phase: PhaseSection, rows: dict[str, Artifact[PackedPhase]]
) -> Artifact[PackedPhase]:
    before = run.scale.packed_before(phase)
    previous = _pack(run, prepared, before[-1], rows) if before else None
    if phase.name not in rows:
        rows[phase.name] = run_step(
            run,
            pack_phase,
            stage=f"pack {phase.name}",
            shards=prepared.shards,
            chats=_chats_of(prepared, phase),
            previous=previous,
            tokenizer=prepared.tokenizer if phase.recipe.fim_rate else None,
            recipe=phase.recipe.packing_recipe,
        )
        check_contract(run, rows[phase.name], "packed", stage=f"contract packed {phase.name}")
    return rows[phase.name]


def _chats_of(prepared: PreparedData, phase: PhaseSection) -> Artifact[ChatShards] | None:
    return prepared.chat_shards if phase.recipe.reads_chats else None


def _start_evaluation(run: Run, prepared: PreparedData, history: PhaseHistory) -> Artifact[Evaluation] | None:
    """The evaluation of the phase's start weights on the same suite; None for random weights."""
    if history.last is not None:
        return history.last.evaluation
    return None if history.start is None else evaluate(run, prepared, history.start, "evaluate start")


def assess_start(run: Run, prepared: PreparedData, start: Artifact[TrainedCheckpoint]) -> AssessedModel:
    """Judge weights that are released without training by the gate of the scale's last phase."""
    phase = run.scale.phases[-1]
    return assess_checkpoint(run, prepared, phase, start, None, None, track_phase(run, phase, start.key))
