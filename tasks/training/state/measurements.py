"""Measurements of held-out documents or preference pairs while a phase trains: when one is due, which was the best."""

from __future__ import annotations

from configs.schema import Frozen, TrainingRecipe
from tasks.training.schedule.schedules import StepPlan


class Measurement(Frozen):
    """The held-out documents, or the held-out pairs of a phase that trains on pairs, after a step."""

    step: int
    bits_per_byte: dict[str, float]
    """By domain."""
    nats_per_token: dict[str, float]
    pair_loss: float | None = None
    """Mean loss of the held-out pairs; None where documents were measured."""

    @property
    def mean(self) -> float:
        """The loss of the pairs, or the mean bits per byte with equal weight for every domain; lowest for the best
        measurement."""
        if self.pair_loss is not None:
            return self.pair_loss
        return sum(self.bits_per_byte.values()) / len(self.bits_per_byte)

    def metrics(self) -> dict[str, float]:
        if self.pair_loss is not None:
            return {"validation_pair_loss": self.pair_loss}
        by_domain = {f"validation_bits_per_byte_{domain}": value for domain, value in self.bits_per_byte.items()}
        losses = {f"validation_loss_{domain}": value for domain, value in self.nats_per_token.items()}
        return {"validation_bits_per_byte": self.mean, **by_domain, **losses}


def is_due(recipe: TrainingRecipe, plan: StepPlan) -> bool:
    """Whether the weights after this step are measured: where it reaches another multiple of the interval, and at the
    phase's end."""
    interval = recipe.validation.interval_tokens
    before, after = plan.start_tokens - recipe.course_start_tokens, plan.end_tokens - recipe.course_start_tokens
    return after // interval > before // interval or after >= recipe.num_tokens


def better(before: Measurement | None, measured: Measurement) -> Measurement:
    """The one with the lower mean; of two alike the earlier."""
    return measured if before is None or measured.mean < before.mean else before
