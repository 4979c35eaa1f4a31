"""Refuses what a phase names and cannot have: its reward model, its reference, its experts, its own model."""

from __future__ import annotations

from configs.schema.model import ModelRecipe
from configs.schema.phases import PhaseSection


def refuse_wrong_reward_model(
    phase: PhaseSection, earlier: tuple[PhaseSection, ...], scorer: ModelRecipe | None
) -> None:
    """Raises ValueError where no earlier phase trains the reward model, or `scorer`, its architecture, has fewer
    positions than the rows that it scores."""
    named = phase.recipe.reward_model
    models = [section.name for section in earlier if not section.recipe.trains_language_model]
    if named is not None and named not in models:
        fix = f"set it to {' or '.join(models)}" if models else "put a phase of objective reward before it"
        raise ValueError(
            f"phase {phase.name}: objective.reward_model {named} is no earlier phase of objective reward: {fix}"
        )
    if scorer is not None and phase.recipe.sequence_length > scorer.max_position_embeddings:
        raise ValueError(
            f"phase {phase.name}: its rows of {phase.recipe.sequence_length} tokens exceed the "
            f"max_position_embeddings of {named} ({scorer.max_position_embeddings}), which scores them: lower "
            f"sequence_length, or take another own_model"
        )


def refuse_wrong_reference(phase: PhaseSection, earlier: tuple[PhaseSection, ...]) -> None:
    """Raises ValueError where the reference is no earlier language model, or the policy itself without its adapter."""
    named = phase.recipe.reference
    models = [section.name for section in earlier if section.recipe.trains_language_model]
    if named is not None and named not in models:
        raise ValueError(
            f"phase {phase.name}: objective.reference {named} is no earlier phase that leaves a language model: "
            f"set it to {' or '.join([*models, 'null'])}"
        )
    if named is not None and phase.recipe.samples_answers and phase.recipe.adapter.kind != "none":
        raise ValueError(
            f"phase {phase.name}: objective.reference {named} with adapter.kind {phase.recipe.adapter.kind}, whose "
            f"reference is the policy without its adapter: set it to null, or train all weights"
        )


def refuse_wrong_experts(phase: PhaseSection, earlier: tuple[PhaseSection, ...]) -> None:
    """Raises ValueError where an expert is no earlier language model."""
    models = [section.name for section in earlier if section.recipe.trains_language_model]
    for expert in phase.recipe.experts:
        if expert.phase not in models:
            fix = f"name {' or '.join(models)}" if models else "put the phases of its experts before it"
            raise ValueError(
                f"phase {phase.name}: the expert {expert.phase} of objective.experts is no earlier phase that "
                f"leaves a language model: {fix}"
            )


def refuse_wrong_own_model(phase: PhaseSection, vocab_size: int) -> None:
    """Raises ValueError where a model of its own has a start that is a phase, or reads other tokens."""
    own = phase.recipe.own_model
    if own is not None and phase.start is not None:
        raise ValueError(
            f"phase {phase.name}: start {phase.start} with objective.own_model, whose weights it starts from: set "
            f"start to null, or own_model"
        )
    if own is not None and own.architecture.vocab_size != vocab_size:
        raise ValueError(
            f"phase {phase.name}: objective.own_model has a vocabulary of {own.architecture.vocab_size}, the scale "
            f"one of {vocab_size}: it would read other tokens than the answers it scores; take weights of the same "
            f"tokenizer"
        )
