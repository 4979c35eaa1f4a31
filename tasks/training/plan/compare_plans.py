"""Sets the plans of scales side by side, beside the official weights, which nobody has to train."""

from __future__ import annotations

from pydantic import BaseModel

from configs.schema import Scale
from model.architecture.counts import count_parameters
from tasks.training.plan.planned import Plan
from tasks.training.plan.planned_needs import amount, size, table

OFFICIAL = "official weights"


class ComparedScale(BaseModel):
    """One column. Phases follow each other, so hours are their sum."""

    name: str
    parameters: int
    num_tokens: int
    most_ranks: int
    hours: float
    """Wall time of all phases, with what is lost to failures and saves."""
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
    """Scales in the order asked for, then the official weights of the largest model among them."""

    machine: str
    currency: str
    scales: tuple[ComparedScale, ...]
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
        ]
        return "\n".join(
            [
                *table(rows),
                "",
                f"  hours are derived for {self.machine}; {OFFICIAL}: GLM-4.6 is public under the MIT licence, and "
                "its column has no training",
                *(f"  {OFFICIAL} {each.describe(self.currency)}" for each in self.servers),
            ]
        )


def largest_scale(scales: list[Scale]) -> Scale:
    """The one whose official weights are compared with; the first of equals."""
    return max(scales, key=lambda each: count_parameters(each.model.recipe).total)


def compare_plans(plans: list[Plan], servers: tuple[OfficialServer, ...] = ()) -> ComparedPlans:
    """At least one plan; all of one machine and one list of prices. `servers`: of the largest model's weights."""
    columns = [_column(plan) for plan in plans]
    largest = max(columns, key=lambda each: each.parameters)
    counts = {"num_tokens": 0, "most_ranks": 0, "hours": 0.0, "rank_hours": 0.0, "does_not_run": 0}
    nothing = {**counts, "cost": 0.0, "kilowatt_hours": 0.0, "data": 0.0, "personnel": 0.0}
    official = largest.model_copy(update={"name": OFFICIAL, **nothing})
    return ComparedPlans(
        machine=plans[0].machine, currency=plans[0].cost.currency, scales=(*columns, official), servers=servers
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
    )
