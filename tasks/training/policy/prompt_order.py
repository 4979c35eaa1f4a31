"""Which prompt each group of a policy phase asks: domains in the shares of the phase's mixture, shuffled in each, or
from easy to hard.

Depends on the prompts, their measured pass rates, the recipe, and the number of further prompts that replaced groups
without signal: a resumed phase asks as an uninterrupted one does.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from configs.schema import MixtureWaypoint, PolicyObjective, TrainingRecipe
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.packing.mixture_shares import MixtureSchedule
from tasks.data.packing.row_order import shuffled_rows
from tasks.training.policy.prompt_difficulty import MeasuredPrompts, read_pass_rates
from tasks.training.policy.prompts import Prompt, read_prompts, refuse_without_room, with_room

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from infra.step import Artifact
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

    I64 = NDArray[np.int64]


class PromptOrder:
    """The prompts of a phase by the number of the group that asks them."""

    def __init__(
        self, prompts_path: Path, tokenizer: Tokenizer, recipe: TrainingRecipe, solved_path: Path | None = None
    ) -> None:
        """Leaves out prompts that leave no room for an answer (`num_too_long`), and by the pass rates of `solved_path`
        those that objective.difficulty does not want (`num_too_easy`, `num_too_hard`). Raises ValueError where a
        domain's prompts are asked more often than max_epochs, and where the mixture's domains have none, or none that
        is wanted."""
        objective = recipe.objective
        assert isinstance(objective, PolicyObjective), objective
        by_domain, too_long = askable_prompts(recipe, prompts_path, tokenizer)
        self.num_too_long = too_long.total()
        self.num_too_easy = self.num_too_hard = 0
        self._levels = {domain: [prompts] for domain, prompts in by_domain.items()}
        """Of each domain its prompts in the order in which they are asked; those of a level are shuffled."""
        if objective.difficulty is not None:
            assert solved_path is not None, "prompts are measured before the phase trains"
            measured = MeasuredPrompts(read_pass_rates(solved_path), objective.difficulty, recipe.phase)
            self._levels = {domain: measured.levels(domain, prompts) for domain, prompts in by_domain.items()}
            self.num_too_easy, self.num_too_hard = measured.num_too_easy, measured.num_too_hard
        self._seed = recipe.seed
        available = {domain: sum(map(len, levels)) for domain, levels in sorted(self._levels.items())}
        self._domains = [*available]
        self._domain_of = assign_domains(recipe, available)
        self.num_groups = len(self._domain_of)
        self._number_of = np.zeros(self.num_groups, dtype=np.int64)
        self._spare: dict[str, int] = {}
        """Further prompts of each domain that max_epochs allows."""
        for index, domain in enumerate(self._domains):
            own = self._domain_of == index
            self._number_of[own] = np.arange(own.sum())
            self._spare[domain] = int(recipe.max_epochs * available[domain]) - int(own.sum())

    def groups(self, start: int, stop: int, refilled: Mapping[str, int]) -> list[Prompt]:
        """Prompts of the groups start..stop-1 after the given number of further prompts by domain."""
        domains = [self._domains[index] for index in self._domain_of[start:stop]]
        numbers = self._number_of[start:stop].tolist()
        return [
            self._prompt(domain, number + refilled.get(domain, 0))
            for domain, number in zip(domains, numbers, strict=True)
        ]

    def further(self, stop: int, domains: Sequence[str], refilled: Mapping[str, int]) -> list[Prompt]:
        """A further prompt of each of the domains, those of groups that had no signal, after the prompts of the groups
        up to `stop`. It is left out where max_epochs leaves none that no later group needs."""
        asked, prompts = Counter(refilled), []
        for domain in domains:
            if asked[domain] < self._spare[domain]:
                before = int((self._domain_of[:stop] == self._domains.index(domain)).sum())
                prompts.append(self._prompt(domain, before + asked[domain]))
                asked[domain] += 1
        return prompts

    def asked(self, refilled: Mapping[str, int]) -> list[Prompt]:
        """The prompts of a whole phase, each once, further ones last."""
        further = [domain for domain, number in refilled.items() for _ in range(number)]
        prompts = [*self.groups(0, self.num_groups, {}), *self.further(self.num_groups, further, {})]
        return list({prompt.id: prompt for prompt in prompts}.values())

    def _prompt(self, domain: str, number: int) -> Prompt:
        levels = self._levels[domain]
        epoch, index = divmod(number, sum(map(len, levels)))
        for prompts in levels:
            if index < len(prompts):
                break
            index -= len(prompts)
        return prompts[int(shuffled_rows(np.array([index]), len(prompts), self._seed + epoch)[0])]


def wanted_domains(recipe: TrainingRecipe) -> set[str]:
    """Domains with a weight at some position of the phase."""
    return {domain for point in recipe.prompt_mixture for domain, weight in point.mixture.items() if weight}


def askable_prompts(
    recipe: TrainingRecipe, prompts_path: Path, tokenizer: Tokenizer
) -> tuple[dict[str, list[Prompt]], Counter[str]]:
    """Prompts of the mixture's domains, by domain: those that leave room for an answer, and the number of others.
    Raises ValueError where all are too long."""
    assert isinstance(recipe.objective, PolicyObjective), recipe.objective
    wanted = wanted_domains(recipe)
    asked = [prompt for prompt in read_prompts(prompts_path) if prompt.domain in wanted]
    kept = with_room(asked, tokenizer, recipe.sequence_length, recipe.objective)
    if asked and not kept:
        refuse_without_room(f"phase {recipe.phase}", asked, recipe.sequence_length, recipe.objective)
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in kept:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    return by_domain, Counter(prompt.domain for prompt in asked) - Counter(prompt.domain for prompt in kept)


class LeftOutPrompts(NamedTuple):
    """What a phase's mixture asks for and is not asked."""

    too_long: dict[str, int]
    """Prompts that leave no room for an answer, by domain."""
    absent_domains: tuple[str, ...]
    """Domains that have no other prompts."""


def refuse_missing_prompts(
    recipe: TrainingRecipe, prompts: Artifact[DecontaminatedDocuments], tokenizer: Artifact[TrainedTokenizer]
) -> LeftOutPrompts:
    """Raises ValueError as PromptOrder would, before anything is trained."""
    opened = tokenizer_for_text(str(tokenizer.path("tokenizer.json")))
    by_domain, too_long = askable_prompts(recipe, prompts.path("prompts.parquet"), opened)
    assign_domains(recipe, {domain: len(own) for domain, own in sorted(by_domain.items())})
    return LeftOutPrompts(dict(sorted(too_long.items())), tuple(sorted(wanted_domains(recipe) - {*by_domain})))


def assign_domains(recipe: TrainingRecipe, available: Mapping[str, int]) -> I64:
    """The index in `available` (prompts by domain) of each group's domain. Raises ValueError where prompts of one are
    asked more often than max_epochs, and where no domain has any."""
    assert isinstance(recipe.objective, PolicyObjective), recipe.objective
    hint = "" if recipe.objective.difficulty is None else ", widen the band of objective.difficulty"
    num_groups = recipe.num_tokens // recipe.sequence_length // recipe.objective.samples_per_prompt
    chosen = domains_of_groups(recipe.phase, recipe.prompt_mixture, [*available], num_groups)
    for (domain, num_prompts), asked in zip(
        available.items(), np.bincount(chosen, minlength=len(available)).tolist(), strict=True
    ):
        if asked > recipe.max_epochs * num_prompts:
            raise ValueError(
                f"phase {recipe.phase}: {asked} groups of answers need {asked / num_prompts:.1f} passes over "
                f"{num_prompts} prompts of domain {domain}, max_epochs is {recipe.max_epochs}: raise it, add prompts "
                f"(synthesize.num_prompts for generated ones){hint}, or lower num_tokens or the domain's weight"
            )
    return chosen


def domains_of_groups(phase: str, mixture: tuple[MixtureWaypoint, ...], domains: Sequence[str], num_groups: int) -> I64:
    """The index in `domains`, those with prompts, of each group's: always the one that is furthest behind its share, so
    a step has every domain in about its share. Weights are normalised over these domains, as in packing. Raises
    ValueError with the phase where there is none."""
    weights = np.array([[{**point.mixture}.get(domain, 0.0) for domain in domains] for point in mixture])
    empty = next((point for point, row in zip(mixture, weights, strict=True) if not row.sum()), None)
    if empty is not None:
        raise ValueError(
            f"phase {phase}: none of the mixture's domains {', '.join(empty.mixture)} has prompts: name domains that "
            f"have some (synthetic: generated problems), or add files of role prompts"
        )
    positions = np.array([point.at_share for point in mixture])
    schedule = MixtureSchedule(tuple(domains), positions, weights / weights.sum(axis=1, keepdims=True))
    chosen = np.zeros(num_groups, dtype=np.int64)
    given = np.zeros(len(domains))
    for group in range(num_groups):
        behind = num_groups * schedule.until((group + 1) / num_groups) - given
        chosen[group] = behind.argmax()
        given[chosen[group]] += 1
    return chosen
