"""Derives what a phase needs beside its ranks: hours lost, checkpoints, disk, data and network. Pure arithmetic."""

from __future__ import annotations

from configs.schema import PpoObjective, Prices, Scale, TrainingRecipe, TrainingResources
from model.architecture.counts import count_parameters, count_trained, unembedding_saved
from tasks.data.shards.token_shard import token_dtype
from tasks.training.plan.machine import (
    HOST_COPY_BYTES_PER_SECOND,
    HOURS_TO_FAILURE,
    MEMORY_USED,
    RESTART_SECONDS,
    Machine,
)
from tasks.training.plan.planned_needs import PlannedCost, PlannedNeeds
from tasks.training.plan.save_interval import SaveInterval, save_interval
from tasks.training.plan.search import least_memory
from tasks.training.plan.step_time import StepTime
from tasks.training.schedule.phase_steps import summarize_steps

BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4


def num_trained(recipe: TrainingRecipe, *, is_critic: bool = False) -> int:
    """Parameters that a phase trains; reward model and critic have a scalar head in place of the unembedding."""
    saved = unembedding_saved(recipe.model) * (recipe.is_scored or is_critic)
    return count_trained(recipe.model, recipe.adapter).total(recipe.model) - saved


def state_bytes(recipe: TrainingRecipe, *, is_critic: bool = False) -> int:
    """Of one checkpoint of what is trained: master and momentum in float32, and the second moment of what AdamW
    updates: under Muon the embedding."""
    counts, trained = count_parameters(recipe.model), num_trained(recipe, is_critic=is_critic)
    if recipe.optimizer.kind == "adamw":
        return 12 * trained
    return 8 * trained + 4 * (counts.embeddings // 2) * (recipe.adapter.kind == "none")


def phase_needs(
    recipe: TrainingRecipe,
    resources: TrainingResources,
    step: StepTime | None,
    hours: float,
    prices: Prices,
    machine: Machine,
) -> PlannedNeeds:
    """Of a phase that takes these hours without failures and saves, 0 where it is impossible; `step` where it was
    derived for accelerators."""
    steps = summarize_steps(recipe)
    seconds_per_step = hours * 3600 / steps.num_steps
    phases_per_second = 1 / (hours * 3600) if hours else 0.0
    state = _state_bytes_with_critic(recipe)
    num_weights = count_parameters(recipe.model).total - unembedding_saved(recipe.model) * recipe.is_scored
    weights = (BFLOAT16_BYTES if recipe.dtype == "bfloat16" else FLOAT32_BYTES) * num_weights
    num_checkpoints = -(-steps.num_steps // resources.save_interval_steps)
    save_hours = failure_hours = num_failures = 0.0
    if step is not None:
        # Each rank copies its share to host memory; everything else is done while training goes on.
        save_hours = num_checkpoints * state / resources.num_ranks / HOST_COPY_BYTES_PER_SECOND / 3600
        num_failures = resources.num_ranks * (hours + save_hours) / HOURS_TO_FAILURE
        per_failure = RESTART_SECONDS + resources.save_interval_steps * seconds_per_step / 2
        failure_hours = num_failures * per_failure / 3600
    rank_hours = resources.num_ranks * (hours + save_hours + failure_hours)
    data_bytes = recipe.num_tokens * token_dtype(recipe.model.vocab_size).itemsize
    return PlannedNeeds(
        rank_hours=rank_hours,
        cost=rank_hours * price_of_rank(prices, resources, machine),
        num_failures=num_failures,
        failure_hours=failure_hours,
        save_hours=save_hours,
        num_checkpoints=num_checkpoints,
        weights_bytes=weights,
        state_bytes=state,
        disk_bytes=(resources.num_kept_checkpoints + 1) * state + weights,
        save_bytes_per_second=state
        * phases_per_second
        * steps.num_steps
        / min(resources.save_interval_steps, steps.num_steps),
        data_bytes=data_bytes,
        data_bytes_per_second=data_bytes * phases_per_second,
        sent_bytes_per_second={} if step is None else _sent(step),
        smallest_world=0,
    )


def phase_save_interval(recipe: TrainingRecipe, resources: TrainingResources, hours: float) -> SaveInterval:
    """The configured interval beside the best one, for a phase on accelerators that takes these hours without failures
    and saves."""
    num_steps = summarize_steps(recipe).num_steps
    return save_interval(_state_bytes_with_critic(recipe), resources, hours * 3600 / num_steps, num_steps)


def _state_bytes_with_critic(recipe: TrainingRecipe) -> int:
    critic = isinstance(recipe.objective, PpoObjective)
    return state_bytes(recipe) + (state_bytes(recipe.critic_recipe, is_critic=True) if critic else 0)


def _sent(step: StepTime) -> dict[str, float]:
    names = ("tensor", "context", "expert", "stage", "gradient")
    return {name: getattr(step, f"{name}_bytes") / step.seconds for name in names}


def price_of_rank(prices: Prices, resources: TrainingResources, machine: Machine) -> float:
    """For an hour. Raises ValueError where the prices do not name the machine."""
    return _of_rank(prices, "rank_hour", resources, machine)


def _of_rank(prices: Prices, kind: str, resources: TrainingResources, machine: Machine) -> float:
    return named_price(prices, kind, machine.name.lower() if resources.device == "cuda" else "cpu")


def named_price(prices: Prices, kind: str, name: str) -> float:
    """An entry of the prices. Raises ValueError where they have none."""
    values: dict[str, float] = getattr(prices, kind)
    if name not in values:
        raise ValueError(f"the prices have no {kind}.{name}, they have {', '.join(values)}: add it")
    return values[name]


def scale_cost(scale: Scale, needs: list[PlannedNeeds], prices: Prices, machine: Machine) -> PlannedCost:
    """Of all phases, with the data and the people that the prices name for the scale."""
    watts = [_of_rank(prices, "rank_watts", phase.resources, machine) for phase in scale.phases]
    return PlannedCost(
        currency=prices.currency,
        rank_hour=max(price_of_rank(prices, phase.resources, machine) for phase in scale.phases),
        rank_hours=sum(each.rank_hours for each in needs),
        ranks=sum(each.cost for each in needs),
        kilowatt_hours=sum(power * each.rank_hours for power, each in zip(watts, needs, strict=True)) / 1000,
        data=prices.data.get(scale.scale, 0.0),
        personnel=prices.engineer_months.get(scale.scale, 0.0) * prices.engineer_month,
    )


def smallest_world(recipe: TrainingRecipe, resources: TrainingResources) -> int:
    """The fewest ranks that hold the phase in any topology, as a power of two up to its own number; 0 where none does.
    Full recomputation and one row at a time need least; offloading and ZeRO stay as they are."""
    sizes = [1 << power for power in range(resources.num_ranks.bit_length()) if 1 << power <= resources.num_ranks]
    for size in sizes:
        world = resources.model_copy(update={"num_ranks": size, "ranks_per_node": min(size, resources.ranks_per_node)})
        if least_memory(recipe, world) <= MEMORY_USED * resources.device_memory_bytes:
            return size
    return 0
