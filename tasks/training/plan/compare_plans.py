"""Sets the plans of scales side by side, beside the official weights, which nobody has to train."""

from __future__ import annotations

from pydantic import BaseModel

from configs.schema import Scale
from model.architecture.counts import count_parameters
from tasks.training.plan.planned import Plan
from tasks.training.plan.planned_needs import amount, size, table

OFFICIAL = "official weights"
PUBLISHED = {356_785_898_816: "GLM-4.5 and GLM-4.6", 109_227_310_848: "GLM-4.5-Air"}
"""Models whose weights are public under the MIT licence, by their number of parameters."""


class ComparedScale(BaseModel):
    """One column. Phases follow each other, so hours are their sum."""

    name: str
    parameters: int
    num_tokens: int
    most_ranks: int
    hours: float
    """Wall time of all phases that an engine can train, with what is lost to failures and saves."""
    rank_hours: float
    cost: float
    """Of the ranks."""
    kilowatt_hours: float
    data: float
    personnel: float
    weights_bytes: int
    """Of the last phase that leaves a language model; where all are reward models, of the last."""
    does_not_run: int
    """Phases that no engine can train or that have no code yet."""
    without_sampling: int
    """Phases whose hours or cost leave out sampling of answers (`not_counted` of the plan)."""

    @property
    def total(self) -> float:
        return self.cost + self.data + self.personnel


class OfficialServer(BaseModel):
    """What serves the official weights, on as few nodes of 8 GPUs as hold them."""

    stored_format: str
    num_gpus: int
    context: int
    """Tokens of one request, whose keys and values fit beside the weights."""
    gigabytes: float
    """On each GPU, in 1e9 bytes."""
    cost_per_hour: float
    """Of its GPUs, at the price of the ranks."""

    def describe(self, currency: str) -> str:
        """In one line."""
        return (
            f"served in {self.stored_format}: {self.num_gpus} GPUs, {self.gigabytes:.1f} GB each with a request of "
            f"{self.context:,} tokens, {amount(self.cost_per_hour)} {currency} an hour"
        )


class ComparedPlans(BaseModel):
    """Scales in the order asked for, then the official weights of the largest published model among them."""

    machine: str
    currency: str
    scales: tuple[ComparedScale, ...]
    official: str
    """The published model; empty where none of these is published, and there is no column of it."""
    servers: tuple[OfficialServer, ...]
    """Of the official weights, one per published format that fits."""

    def describe(self) -> str:
        """A table for the terminal."""
        rows = [
            ("", *(each.name for each in self.scales)),
            ("parameters", *(f"{each.parameters:,}" for each in self.scales)),
            ("tokens", *(f"{each.num_tokens:,}" for each in self.scales)),
            ("ranks, at most", *(f"{each.most_ranks:,}" for each in self.scales)),
            ("hours", *(f"{each.hours:,.1f}" for each in self.scales)),
            ("rank-hours", *(f"{each.rank_hours:,.1f}" for each in self.scales)),
            ("energy, kWh", *(amount(each.kilowatt_hours) for each in self.scales)),
            (f"ranks, {self.currency}", *(amount(each.cost) for each in self.scales)),
            (f"data, {self.currency}", *(amount(each.data) for each in self.scales)),
            (f"people, {self.currency}", *(amount(each.personnel) for each in self.scales)),
            (f"total, {self.currency}", *(amount(each.total) for each in self.scales)),
            ("weights", *(size(each.weights_bytes) for each in self.scales)),
            ("phases that do not run", *(str(each.does_not_run) for each in self.scales)),
            ("phases, sampling not counted", *(str(each.without_sampling) for each in self.scales)),
        ]
        published = f"{OFFICIAL}: {self.official}, public under the MIT licence; their column has no training"
        if not self.official:
            published = f"no {OFFICIAL}: none of these models is published"
        return "\n".join(
            [
                *table(rows),
                "",
                f"  hours are derived for {self.machine}; {published}",
                *(f"  {OFFICIAL} {each.describe(self.currency)}" for each in self.servers),
            ]
        )


def largest_published(scales: list[Scale]) -> Scale | None:
    """The one whose official weights are compared with, the first of equals; None where no model is published."""
    sizes = [count_parameters(each.model.recipe).total for each in scales]
    published = [number for number, size in enumerate(sizes) if size in PUBLISHED]
    return scales[max(published, key=lambda number: sizes[number])] if published else None


def compare_plans(plans: list[Plan], servers: tuple[OfficialServer, ...] = ()) -> ComparedPlans:
    """At least one plan; all of one machine and one list of prices. `servers`: of the largest published weights."""
    columns = [_column(plan) for plan in plans]
    published = [column for column in columns if column.parameters in PUBLISHED]
    official = ""
    if published:
        largest = max(published, key=lambda each: each.parameters)
        counts = dict.fromkeys(("num_tokens", "most_ranks", "does_not_run", "without_sampling"), 0)
        amounts = dict.fromkeys(("hours", "rank_hours", "cost", "kilowatt_hours", "data", "personnel"), 0.0)
        columns.append(largest.model_copy(update={"name": OFFICIAL, **counts, **amounts}))
        official = PUBLISHED[largest.parameters]
    return ComparedPlans(
        machine=plans[0].machine,
        currency=plans[0].cost.currency,
        scales=tuple(columns),
        official=official,
        servers=servers,
    )


def _column(plan: Plan) -> ComparedScale:
    released = next((phase for phase in reversed(plan.phases) if phase.objective != "reward"), plan.phases[-1])
    return ComparedScale(
        name=plan.scale,
        parameters=plan.parameters.total,
        num_tokens=sum(phase.num_tokens for phase in plan.phases),
        most_ranks=max(phase.num_ranks for phase in plan.phases),
        hours=sum(phase.hours + phase.needs.lost_hours for phase in plan.phases),
        rank_hours=plan.cost.rank_hours,
        cost=plan.cost.ranks,
        kilowatt_hours=plan.cost.kilowatt_hours,
        data=plan.cost.data,
        personnel=plan.cost.personnel,
        weights_bytes=released.needs.weights_bytes,
        does_not_run=sum(bool(phase.impossible or phase.not_available) for phase in plan.phases),
        without_sampling=sum(bool(phase.not_counted) for phase in plan.phases),
    )
