"""The temperature of a step's sampling, from the mean rewards of the phase's earlier steps: raised where the rewards
stop rising, so that answers keep differing (GLM-4.5 report, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from configs.schema import PolicyObjective


def step_temperature(objective: PolicyObjective, mean_rewards: Sequence[float]) -> float:
    """A function of the phase's rewards so far, which its position holds: a resumed phase samples as one that was
    never interrupted. The report takes the highest temperature that costs at most 1 % on held-out prompts; here the
    rewards of the training prompts decide."""
    rule, temperature = objective.dynamic_temperature, objective.temperature
    if rule is None:
        return temperature
    size = rule.window_steps
    means = [sum(mean_rewards[stop - size : stop]) / size for stop in range(size, len(mean_rewards) + 1, size)]
    before = temperature
    for earlier, mean in pairwise(means):
        if temperature > before and mean < earlier - rule.max_drop:
            return before
        before = temperature
        if mean < earlier + rule.min_gain:
            temperature = min(temperature * rule.factor, rule.max_temperature)
    return temperature
