"""How hard prompts are for the weights at a phase's start: the share of their answers that were right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import DifficultyRecipe
from tasks.training.policy.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOLVED_FILE = "solved.parquet"
"""Of the step sample_solutions: how many answers to each prompt were right."""


def read_pass_rates(solved_path: Path) -> dict[str, float]:
    """The share of right answers to each prompt, by its id."""
    import pyarrow.parquet as pq

    rows = pq.read_table(solved_path, columns=["id", "num_samples", "num_right"]).to_pylist()
    return {row["id"]: row["num_right"] / row["num_samples"] for row in rows}


class MeasuredPrompts:
    """Chooses prompts by their pass rates, and counts those that it leaves out."""

    def __init__(self, rates: Mapping[str, float], difficulty: DifficultyRecipe, phase: str) -> None:
        self.rates, self.difficulty, self.phase = rates, difficulty, phase
        self.num_too_easy = self.num_too_hard = 0

    def levels(self, domain: str, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """The wanted prompts of a domain: of falling pass rate for easy_first, else in one level. Raises ValueError
        where none is wanted, and for prompts without a pass rate, which only tasks of environments lack."""
        unmeasured = sorted({prompt.kind for prompt in prompts if prompt.id not in self.rates})
        if unmeasured:
            raise ValueError(
                f"phase {self.phase}: prompts of domain {domain} are tasks of environments ({', '.join(unmeasured)}), "
                f"whose pass rate is not measured: set objective.difficulty to null, or take the domain out of the "
                f"mixture"
            )
        low, high = self.difficulty.min_pass_rate, self.difficulty.max_pass_rate
        num_easy = sum(self.rates[prompt.id] > high for prompt in prompts)
        num_hard = sum(self.rates[prompt.id] < low for prompt in prompts)
        if num_easy + num_hard == len(prompts):
            raise ValueError(
                f"phase {self.phase}: none of the {len(prompts)} prompts of domain {domain} has a pass rate of {low:g} "
                f"to {high:g} (objective.difficulty): {num_easy} are too easy, {num_hard} too hard. Widen the band, "
                f"raise samples_per_prompt, or bring other prompts"
            )
        self.num_too_easy += num_easy
        self.num_too_hard += num_hard
        by_rate: dict[float, list[Prompt]] = {}
        for prompt in prompts:
            rate = self.rates[prompt.id]
            if low <= rate <= high:
                by_rate.setdefault(rate if self.difficulty.order == "easy_first" else high, []).append(prompt)
        return [by_rate[rate] for rate in sorted(by_rate, reverse=True)]
