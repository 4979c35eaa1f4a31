"""Refuses a phase of rejection sampling or distillation that has too few right answers to train on, nobody to give
them, or prompts without room for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from configs.schema import PhaseSection, mixture_waypoints
from infra.step import Artifact
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
from tasks.data.environments.environments import OPENERS
from tasks.data.records.documents import CHAT
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
from tasks.evaluation.sample_solutions import SampledSolutions
from tasks.training.policy.prompts import read_prompts, refuse_lost_domains, refuse_without_room, with_room


def refuse_too_few_solutions(phase: PhaseSection, solutions: SampledSolutions) -> None:
    """Raises ValueError where the phase would read the kept answers more often than max_epochs, or none is kept."""
    recipe = phase.recipe
    shares = [point.mixture[CHAT] / sum(point.mixture.values()) for point in mixture_waypoints(recipe.mixture)]
    least = math.ceil(recipe.num_tokens * min(shares) / recipe.max_epochs)
    if solutions.num_kept and solutions.num_kept_tokens >= least:
        return
    reached = ", ".join(f"pass@{point.k} {point.share:.4f}" for point in solutions.pass_at)
    raise ValueError(
        f"phase {phase.name}: {solutions.num_right} of {solutions.num_answers} answers to {solutions.num_prompts} "
        f"prompts are right ({reached or 'no prompt leaves room for an answer'}); {solutions.num_kept} of them are "
        f"kept and hold {solutions.num_kept_tokens} tokens, num_tokens ({recipe.num_tokens}) in max_epochs "
        f"({recipe.max_epochs:g}) needs at least {least}: raise objective.samples_per_prompt, max_kept_per_prompt or "
        f"max_epochs, bring more prompts (synthesize.num_prompts for generated ones), lower num_tokens, or let weights "
        f"answer that do it better"
    )


def refuse_long_prompts(
    phase: PhaseSection, prompts: Artifact[DecontaminatedDocuments], tokenizer: Artifact[TrainedTokenizer]
) -> None:
    """Raises ValueError, before anything is trained, where no prompt leaves room for an answer; of distillation none of
    a domain of an expert."""
    recipe = phase.recipe.solution_recipe
    opened, room = tokenizer_for_text(str(tokenizer.path("tokenizer.json"))), (recipe.sequence_length, recipe.objective)
    every = read_prompts(prompts.path("prompts.parquet"))
    for expert in phase.recipe.experts:
        own = [prompt for prompt in every if prompt.domain in expert.domains]
        refuse_lost_domains(expert.phase, own, with_room(own, opened, *room), *room)
    asked = [prompt for prompt in every if prompt.kind not in OPENERS]
    if not phase.recipe.experts and asked and not with_room(asked, opened, *room):
        refuse_without_room(f"phase {phase.name}", asked, *room)


def refuse_unanswered_domains(phase: PhaseSection, prompts_by_domain: Mapping[str, int]) -> None:
    """Raises ValueError where prompts of a domain have no expert in a phase of distillation, or an expert has a domain
    without prompts, which would have no verifier."""
    answered = {domain: expert.phase for expert in phase.recipe.experts for domain in expert.domains}
    unanswered = [domain for domain in prompts_by_domain if domain not in answered]
    if unanswered:
        raise ValueError(
            f"phase {phase.name}: no expert answers the {prompts_by_domain[unanswered[0]]} prompts of domain "
            f"{unanswered[0]}: name it among the domains of an expert in objective.experts (the phase that "
            f"{phase.name} starts from can be one), or bring no such prompts"
        )
    empty = [domain for domain in answered if not prompts_by_domain.get(domain)]
    if empty:
        raise ValueError(
            f"phase {phase.name}: the expert {answered[empty[0]]} is to answer domain {empty[0]}, which has no prompts "
            f"to verify answers by: bring some (files of role prompts, or synthesize), or leave the domain out"
        )
