"""The critic of PPO as a model in training: built beside the policy, started, and updated on a step's answers.

Its trunk is its own, so that a value loss of any size does not change the policy, and it can start
from a reward model. It has the policy's optimizer, at its own learning rate.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes
from model.formats.hf_checkpoint import CheckpointTensors, read_config
from tasks.training.loop.training_step import take_step
from tasks.training.state.state import load_master
from tasks.training.state.tensor_sources import RewardModelStart, open_weights

if TYPE_CHECKING:
    from configs.schema import TrainingRecipe
    from tasks.training.parallel.micro_batch import MicroBatch
    from tasks.training.parallel.trainable import Trainable
    from tasks.training.schedule.schedules import StepPlan
    from tasks.training.state.job import TrainingJob


def start_critic(job: TrainingJob, critic: Trainable) -> None:
    """The reward model's weights where one scores the answers, else those that the phase starts from with a fresh
    scalar head. Raises ValueError where the reward model has another architecture."""
    recipe = job.recipe.critic_recipe.model
    if job.reward_model_dir:
        weights = CheckpointTensors(Path(job.reward_model_dir), recipe, is_scored=True)
        load_master(critic, weights, f"the reward model in {job.reward_model_dir}")
        return
    with torch.device("meta"):
        shapes = checkpoint_shapes(Glm4Moe(recipe, is_scored=True))
    weights_dir = Path(job.start_weights_dir)
    language_model = open_weights(Path(job.start_dir), weights_dir, read_config(weights_dir))
    start = RewardModelStart(shapes, language_model, recipe, job.recipe.seed)
    load_master(critic, start, f"the state in {job.start_dir}")


def update_critic(
    critic: Trainable, recipe: TrainingRecipe, plan: StepPlan, updates: list[list[MicroBatch]], step: int
) -> dict[str, float]:
    """Take an optimizer step on the micro-batches of each update: means of their losses and gradient norms. Raises
    SpikeError where one is not finite."""
    own = recipe.critic_recipe
    results = [take_step(critic, own, plan, micro_batches, step) for micro_batches in updates]
    return {
        "value_loss": sum(result.losses.lm for result in results) / len(results),
        "critic_grad_norm": sum(result.grad_norm for result in results) / len(results),
    }
