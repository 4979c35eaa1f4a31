"""Judges phases that train on preference pairs: by a DPO phase's implicit reward, or a reward model's verdict."""

from __future__ import annotations

from configs.schema import DpoObjective, PairEvaluationRecipe, PhaseSection
from flows.running.run import AssessedRewardModel, Run
from flows.running.run_step import run_step
from flows.show.track_run import finish_phase
from infra.step import Artifact
from tasks.data.packing.pack_pairs import PackedPairs
from tasks.evaluation.decide_gate import decide_gate
from tasks.evaluation.evaluate_pairs import PairEvaluation, evaluate_pairs
from tasks.training.state.trained_checkpoint import TrainedCheckpoint


def assess_pairs(
    run: Run, phase: PhaseSection, checkpoint: Artifact[TrainedCheckpoint], pairs: Artifact[PackedPairs]
) -> Artifact[PairEvaluation]:
    """Accuracy and calibration of a checkpoint on the pairs to test by."""
    objective = phase.recipe.objective
    return run_step(
        run,
        evaluate_pairs,
        stage=f"evaluate pairs {phase.name}",
        checkpoint=checkpoint,
        pairs=pairs,
        recipe=PairEvaluationRecipe(beta=objective.beta if isinstance(objective, DpoObjective) else 1.0),
    )


def assess_reward_model(
    run: Run, phase: PhaseSection, checkpoint: Artifact[TrainedCheckpoint], pairs: Artifact[PackedPairs], run_id: str
) -> AssessedRewardModel:
    """Judge a reward model by the bounds on pairs. It is not registered: no version of the scale's model scores."""
    evaluation = assess_pairs(run, phase, checkpoint, pairs)
    decision = run_step(
        run,
        decide_gate,
        stage=f"gate {phase.name}",
        evaluation=None,
        start_evaluation=None,
        champion_evaluation=None,
        anchors=None,
        recipe=phase.recipe.gate,
        pairs=evaluation,
    )
    finish_phase(run, phase, run_id, checkpoint, evaluation, decision)
    return AssessedRewardModel(phase, checkpoint, evaluation, decision, run_id, decision.record.refusals)
