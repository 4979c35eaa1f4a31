"""Plans a scale by formula: parameters, tokens, steps, compute, memory, hours, and what refuses to run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel

from model.architecture.counts import count_parameters, count_trained, kv_cache_bytes_per_token, training_flops_per_token
from tasks.training.plan.launch_rules import unavailable_training
from tasks.training.plan.pipeline_stages import describe_stages
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.plan.topology import data_parallel, impossible_topology
from tasks.training.schedule.phase_schedule import describe_schedule
from tasks.training.schedule.phase_steps import PhaseSteps, summarize_steps
from tasks.training.schedule.schedules import learning_rate_at, trains_mtp

if TYPE_CHECKING:
    from configs.schema import PackingRecipe, PhaseSection, Scale, TrainingRecipe, TrainingResources

ASSUMED_MFU = 0.4
"""Share of peak at which the hours are stated: what public MoE runs reach; nothing is known of GLM's own."""


class PlannedParameters(BaseModel):
    """Counts under the rules that public numbers use (model/architecture/counts.py)."""

    attention_per_layer: int
    expert: int
    moe_layer: int
    dense_layer: int
    body: int
    """Trunk layers and final norm."""
    mtp: int
    embeddings: int
    body_and_mtp: int
    total: int
    active_body: int
    active_body_and_mtp: int
    active: int
    """Body and unembedding: what one predicted token costs."""


class PlannedMemory(BaseModel):
    """Bytes on the fullest rank (tasks/training/plan/rank_memory.py)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int
    update: int
    kv_cache: int
    sampling_weights: int
    total: int
    """The most at once: not the sum."""
    host_optimizer: int
    """Per rank in host memory or on NVMe."""
    host_weights: int
    """Likewise, where parameters are offloaded."""
    available: int


class PlannedPhase(BaseModel):
    """One phase on its course."""

    name: str
    objective: str
    adapter: str
    trained_parameters: int
    num_tokens: int
    num_steps: int
    sequence_length: int
    first_batch_tokens: int
    max_batch_tokens: int
    first_learning_rate: float
    peak_learning_rate: float
    """The highest of the phase's steps."""
    last_learning_rate: float
    rope_theta: float
    schedule: str
    """Place on the course and what changes inside the phase, in words."""
    mixture: str
    """Share of tokens per domain, at every waypoint where there are several, and the weights of quality buckets."""
    attended_tokens: int
    """Length inside which attention stays: a row, or documents as long as assumed_document_tokens where packing is best_fit."""
    trains_mtp: bool
    training_flops: float
    """Floating-point operations of the whole phase, forward and backward; sampling of answers and recomputation come on top."""
    num_ranks: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    stage_layers: str
    """Trunk layers by pipeline stage: 11 + 6 x 12 + 9; empty where there are more stages than layers."""
    context_parallel: int
    expert_parallel: int
    zero_stage: int
    hours: float
    """At ASSUMED_MFU of the ranks' peak, without sampling."""
    rank_memory: PlannedMemory
    impossible: tuple[str, ...]
    """Why no engine can train it like this; empty where one can."""
    not_available: tuple[str, ...]
    """What this version of glm46 refuses; empty where it trains the phase."""
    warnings: tuple[str, ...]

    @property
    def sentences(self) -> list[str]:
        """What stands in the way of the phase, in words."""
        return [
            *(f"impossible, {reason}" for reason in self.impossible),
            *(f"does not run yet, {reason}" for reason in self.not_available),
            *self.warnings,
        ]


class Plan(BaseModel):
    """The whole scale."""

    scale: str
    parameters: PlannedParameters
    kv_cache_bytes_per_token: int
    assumed_mfu: float
    phases: tuple[PlannedPhase, ...]

    def describe(self) -> str:
        """The plan in lines for a terminal."""
        counts = self.parameters
        lines = [
            f"scale {self.scale}",
            f"  parameters   {counts.total:,} in all: body {counts.body:,}, MTP {counts.mtp:,}, embeddings {counts.embeddings:,}",
            f"  one layer    attention {counts.attention_per_layer:,}, expert {counts.expert:,}, with experts {counts.moe_layer:,}",
            f"  active       {counts.active:,} per predicted token (body {counts.active_body:,}; with MTP {counts.active_body_and_mtp:,})",
            f"  KV cache     {self.kv_cache_bytes_per_token:,} bytes per token in bf16",
            "",
            *_table([_ROW_TITLES, *(_row(phase) for phase in self.phases)]),
            "",
            *_table([_MEMORY_TITLES, *(_memory_row(phase) for phase in self.phases)]),
            "",
            f"  hours at {self.assumed_mfu:.0%} of the ranks' peak, without the sampling of answers; attention sees `attends` tokens:",
            "  a row, or assumed_document_tokens where rows hold whole documents; memory of the fullest rank, its experts evenly used",
            "",
            *_table([(phase.name, phase.schedule) for phase in self.phases]),
            "",
            *_table([(phase.name, phase.mixture) for phase in self.phases]),
            "",
        ]
        said: dict[str, list[str]] = {}
        for phase in self.phases:
            for sentence in phase.sentences:
                said.setdefault(sentence, []).append(phase.name)
        return "\n".join([*lines, *(f"  {', '.join(names)}: {sentence}" for sentence, names in said.items())])


def plan_training(scale: Scale) -> Plan:
    """The plan of a scale. Raises ValueError where budgets and schedules do not fit."""
    counts = count_parameters(scale.model.recipe)
    return Plan(
        scale=scale.scale,
        parameters=PlannedParameters(
            attention_per_layer=counts.attention_per_layer, expert=counts.expert, moe_layer=counts.moe_layer,
            dense_layer=counts.dense_layer, body=counts.body, mtp=counts.mtp_layers, embeddings=counts.embeddings,
            body_and_mtp=counts.body_and_mtp, total=counts.total, active_body=counts.active_body,
            active_body_and_mtp=counts.active_body + counts.active_mtp, active=counts.active,
        ),
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(scale.model.recipe),
        assumed_mfu=ASSUMED_MFU,
        phases=tuple(
            _plan_phase(scale, phase, scale.phases[number - 1].recipe.rope_theta if number else None)
            for number, phase in enumerate(scale.phases)
        ),
    )  # fmt: skip


def _plan_phase(scale: Scale, phase: PhaseSection, theta_before: float | None) -> PlannedPhase:
    recipe, resources = scale.training_recipe(phase), phase.resources
    steps = summarize_steps(recipe)
    frozen, attended = recipe.adapter.kind != "none", _attended_tokens(phase)
    flops = training_flops_per_token(recipe.model, attended, frozen, trains_mtp=trains_mtp(recipe)) * recipe.num_tokens
    memory = _memory(recipe, resources)
    first_rate, peak_rate, last_rate = _learning_rates(recipe, steps)
    return PlannedPhase(
        name=recipe.phase, objective=recipe.objective.kind, adapter=recipe.adapter.kind,
        trained_parameters=count_trained(recipe.model, recipe.adapter).total(recipe.model),
        num_tokens=recipe.num_tokens, num_steps=steps.num_steps, sequence_length=recipe.sequence_length,
        first_batch_tokens=steps.first_rows * recipe.sequence_length, max_batch_tokens=steps.max_rows * recipe.sequence_length,
        first_learning_rate=first_rate, peak_learning_rate=peak_rate, last_learning_rate=last_rate,
        rope_theta=recipe.rope_theta, schedule=describe_schedule(recipe, theta_before),
        mixture=_describe_mixture(phase.recipe.packing_recipe),
        attended_tokens=attended, trains_mtp=trains_mtp(recipe), training_flops=flops,
        num_ranks=resources.num_ranks, data_parallel=data_parallel(resources),
        tensor_parallel=resources.tensor_parallel, pipeline_parallel=resources.pipeline_parallel,
        stage_layers=_stage_layers(recipe, resources), context_parallel=resources.context_parallel,
        expert_parallel=resources.expert_parallel, zero_stage=resources.zero_stage,
        hours=flops / (resources.num_ranks * resources.peak_flops_per_second * ASSUMED_MFU) / 3600,
        rank_memory=memory, impossible=tuple(impossible_topology(recipe, resources)),
        not_available=tuple(unavailable_training(recipe, resources)),
        warnings=(*_warnings(memory), *_shard_warnings(scale.data.recipe.shards.multiple_of, resources)),
    )  # fmt: skip


def _attended_tokens(phase: PhaseSection) -> int:
    recipe = phase.recipe
    if recipe.packing == "stream" or recipe.samples_answers:
        return recipe.sequence_length
    return min(phase.resources.assumed_document_tokens, recipe.sequence_length)


def _learning_rates(recipe: TrainingRecipe, steps: PhaseSteps) -> tuple[float, float, float]:
    """Of the first step, the highest, of the last: they rise to the warm-up's end and fall behind it."""
    first, last = steps.first_end_tokens, recipe.course_start_tokens + recipe.num_tokens
    top = min(max(round(recipe.course.warmup_share * recipe.course_num_tokens), first), last)
    first_rate, peak, last_rate = (learning_rate_at(recipe.course, recipe.course_num_tokens, tokens) for tokens in (first, top, last))
    return first_rate, peak, last_rate


def _describe_mixture(recipe: PackingRecipe) -> str:
    """Shares as they are configured; a domain without text leaves its share to the others."""
    total = [sum(point.mixture.values()) for point in recipe.waypoints]
    courses = {
        domain: [f"{point.mixture.get(domain, 0.0) / whole:.0%}" for point, whole in zip(recipe.waypoints, total, strict=True)]
        for domain in recipe.domains
    }
    shares = [f"{domain} {' -> '.join(course if len(set(course)) > 1 else course[:1])}" for domain, course in courses.items()]
    weights = [f"quality buckets x {', '.join(f'{weight:g}' for weight in recipe.bucket_weights)}"] if recipe.bucket_weights else []
    return "; ".join([", ".join(shares), *weights])


def _stage_layers(recipe: TrainingRecipe, resources: TrainingResources) -> str:
    if resources.pipeline_parallel > recipe.model.num_hidden_layers:
        return ""
    return describe_stages(recipe.model, resources.pipeline_parallel)


def _memory(recipe: TrainingRecipe, resources: TrainingResources) -> PlannedMemory:
    memory = rank_memory(recipe, resources)
    return PlannedMemory(
        weights=memory.weights, gradients=memory.gradients, optimizer=memory.optimizer, activations=memory.activations,
        buckets=memory.buckets, update=memory.update, kv_cache=memory.kv_cache, sampling_weights=memory.sampling_weights,
        total=memory.device, host_optimizer=memory.host_optimizer, host_weights=memory.host_weights,
        available=resources.device_memory_bytes,
    )  # fmt: skip


def _shard_warnings(multiple_of: int, resources: TrainingResources) -> list[str]:
    """Where a domain's shards do not divide evenly among those that read them."""
    copies, stages = data_parallel(resources), resources.pipeline_parallel
    if multiple_of % (copies * stages) == 0:
        return []
    return [
        f"shards.multiple_of ({multiple_of}) is no multiple of data-parallel copies x pipeline stages ({copies} x {stages} = "
        f"{copies * stages}): readers get unequal numbers of shards; set it to {math.lcm(multiple_of, copies * stages)}"
    ]


def _warnings(memory: PlannedMemory) -> list[str]:
    if memory.total <= memory.available:
        return []
    return [
        f"the fullest rank needs {_bytes(memory.total)} of {_bytes(memory.available)}: widen tensor, pipeline or expert parallelism, raise "
        "zero_stage or recompute, offload the optimizer, or lower micro_batch_sequences, bucket_elements or rollout_cache_bytes"
    ]


_ROW_TITLES = (
    "phase", "objective", "trained", "tokens", "steps", "sequence", "attends", "batch tokens", "learning rate", "FLOPs", "ranks", "hours",
)  # fmt: skip
_MEMORY_TITLES = (
    "phase", "data x tensor x pipeline x context", "expert", "ZeRO", "layers by stage",
    "weights", "gradients", "optimizer", "activations", "buckets", "update", "KV cache", "sampling weights", "most at once", "of", "host",
)  # fmt: skip


def _row(phase: PlannedPhase) -> tuple[str, ...]:
    batches = [f"{size:,}" for size in (phase.first_batch_tokens, phase.max_batch_tokens)]
    rates = [f"{rate:.2g}" for rate in (phase.first_learning_rate, phase.peak_learning_rate, phase.last_learning_rate)]
    objective = phase.objective if phase.adapter == "none" else f"{phase.objective} ({phase.adapter})"
    return (
        phase.name, objective, f"{phase.trained_parameters:,}", f"{phase.num_tokens:,}", f"{phase.num_steps:,}",
        f"{phase.sequence_length:,}", f"{phase.attended_tokens:,}", " .. ".join(dict.fromkeys(batches)), " .. ".join(dict.fromkeys(rates)),
        f"{phase.training_flops:.3g}", f"{phase.num_ranks:,}", f"{phase.hours:,.1f}" if phase.hours >= 1 else f"{phase.hours:.3f}",
    )  # fmt: skip


def _memory_row(phase: PlannedPhase) -> tuple[str, ...]:
    memory = phase.rank_memory
    axes = (phase.data_parallel, phase.tensor_parallel, phase.pipeline_parallel, phase.context_parallel)
    parts = (
        memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.buckets, memory.update, memory.kv_cache,
        memory.sampling_weights, memory.total, memory.available, memory.host_optimizer + memory.host_weights,
    )  # fmt: skip
    return (
        phase.name,
        " x ".join(map(str, axes)),
        str(phase.expert_parallel),
        str(phase.zero_stage),
        phase.stage_layers,
        *map(_bytes, parts),
    )


def _bytes(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
