"""Refuses inputs of a phase that do not belong together, before anything starts.

Each reason names both sides and the fix.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from configs.schema import ModelRecipe, PolicyObjective, PpoObjective, TrainingRecipe
from infra.step import Artifact

if TYPE_CHECKING:
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

OF_THE_PHASE = ("rope_theta", "max_position_embeddings")
"""What a phase may raise of the architecture that it starts from, as the report does for longer sequences; the weights
keep their own values until a phase changes them."""


def refuse_foreign_inputs(
    recipe: TrainingRecipe,
    tokenizer: Artifact[TrainedTokenizer],
    start: Artifact[TrainedCheckpoint] | None,
    tokenized: dict[str, Artifact[Any] | None],
) -> None:
    """`tokenized` are the inputs that hold token ids. Raises ValueError."""
    if tokenizer.record.num_tokens > recipe.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.record.num_tokens} ids, the model {recipe.model.vocab_size} rows: raise "
            f"model.vocab_size"
        )
    if recipe.sequence_length > recipe.model.max_position_embeddings:
        raise ValueError(
            f"phase {recipe.phase}: sequence_length ({recipe.sequence_length}) exceeds the model's "
            f"max_position_embeddings "
            f"({recipe.model.max_position_embeddings}): lower the first or raise the second"
        )
    for name, artifact in tokenized.items():
        used = None if artifact is None else artifact.manifest.identity["inputs"].get("tokenizer")
        if used is not None and used != tokenizer.digest:
            raise ValueError(
                f"{name} were made with tokenizer {used[:12]}, the phase is given {tokenizer.digest[:12]}: their ids "
                f"mean other text; "
                "shard the documents again with this tokenizer"
            )
    if (recipe.reads_pairs or isinstance(recipe.objective, PpoObjective)) and start is None:
        raise ValueError(
            f"phase {recipe.phase}: objective {recipe.objective.kind} needs weights that answer: train a phase of "
            f"objective sft before it, or start with `--from {recipe.phase} --start DIR`"
        )
    if start is not None:
        refuse_wrong_start(start.record, recipe)
        refuse_other_architecture(start, recipe)
        if start.record.tokenizer_digest != tokenizer.digest:
            raise ValueError(
                f"phase {start.record.phase} was trained with tokenizer {start.record.tokenizer_digest[:12]}, this "
                f"one is given "
                f"{tokenizer.digest[:12]}: its embedding means other tokens; start from weights of the same tokenizer"
            )


def refuse_wrong_reward_model(
    recipe: TrainingRecipe, tokenizer: Artifact[TrainedTokenizer], reward_model: Artifact[TrainedCheckpoint] | None
) -> None:
    """Raises ValueError where the model that scores the answers is not the one that the objective names, scores
    nothing, or reads other tokens."""
    named = recipe.objective.reward_model if isinstance(recipe.objective, PolicyObjective) else None
    if reward_model is None:
        assert named is None, (recipe.phase, named)
        return
    record = reward_model.record
    if record.phase != named or record.objective != "reward":
        raise ValueError(
            f"phase {recipe.phase}: objective.reward_model is {named}, and the model that is given is of phase "
            f"{record.phase} with objective {record.objective}: give the checkpoint of the phase that is named"
        )
    if record.tokenizer_digest != tokenizer.digest:
        raise ValueError(
            f"phase {record.phase} was trained with tokenizer {record.tokenizer_digest[:12]}, phase {recipe.phase} is "
            f"given {tokenizer.digest[:12]}: train the reward model with the same tokenizer"
        )


def refuse_foreign_expert(
    recipe: TrainingRecipe, tokenizer: Artifact[TrainedTokenizer], expert: Artifact[TrainedCheckpoint]
) -> None:
    """Raises ValueError where a model whose answers a phase would learn reads other tokens than the phase, or is of
    another architecture."""
    record = expert.record
    if record.tokenizer_digest != tokenizer.digest:
        raise ValueError(
            f"the expert {record.phase} was trained with tokenizer {record.tokenizer_digest[:12]}, phase "
            f"{recipe.phase} is given {tokenizer.digest[:12]}: train the expert with the same tokenizer"
        )
    refuse_other_architecture(expert, recipe)


def refuse_wrong_start(start: TrainedCheckpoint, recipe: TrainingRecipe) -> None:
    """Raises ValueError where a phase would start from a reward model, or continue its course at another token than
    the one at which its start ended."""
    if start.objective == "reward" != recipe.objective.kind:
        raise ValueError(
            f"phase {recipe.phase} starts from {start.phase}, a reward model, which does not answer: start from the "
            f"weights that {start.phase} started from"
        )
    if start.course == recipe.course.name and start.course_tokens != recipe.course_start_tokens:
        raise ValueError(
            f"phase {recipe.phase} starts at {recipe.course_start_tokens} tokens of course {recipe.course.name}, but "
            f"phase {start.phase} "
            f"ended at {start.course_tokens}: start from the phase before it"
        )


def refuse_other_architecture(start: Artifact[TrainedCheckpoint], recipe: TrainingRecipe) -> None:
    """Raises ValueError where config.json of the start names another value: some (the number of experts per token) show
    in no tensor's shape. The RoPE base may be raised, not lowered."""
    left_out = ("num_nextn_predict_layers",) if recipe.is_scored else ()
    ours, theirs = recipe.model, json.loads(start.path("hf/config.json").read_text())
    differing = [
        name
        for name in ModelRecipe.model_fields
        if name not in (*OF_THE_PHASE, *left_out) and name in theirs and theirs[name] != getattr(ours, name)
    ]
    if differing:
        parts = ", ".join(f"{name} {theirs[name]} (the configuration has {getattr(ours, name)})" for name in differing)
        raise ValueError(f"config.json of phase {start.record.phase} says {parts}: continue with the same architecture")
    if theirs["rope_theta"] > recipe.rope_theta:
        raise ValueError(
            f"phase {recipe.phase}: rope_theta {recipe.rope_theta:,.0f} is below the {theirs['rope_theta']:,.0f} that "
            f"its start, phase "
            f"{start.record.phase}, was trained with: set the phase's rope_theta to at least that"
        )
