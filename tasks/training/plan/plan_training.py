"""Plans a scale by formula: parameters, tokens, steps, compute, memory, hours, and what refuses to run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.load import load_prices, load_suite
from configs.schema import PolicyObjective, SolutionObjective
from model.architecture.counts import count_parameters, kv_cache_bytes_per_token
from tasks.data.readers.source_bytes import HUGGING_FACE
from tasks.data.sources.remote_sources import dataset_and_file
from tasks.training.plan.answer_batches import answer_cache_bytes
from tasks.training.plan.choose_setting import choose_setting
from tasks.training.plan.launch_rules import unavailable_training
from tasks.training.plan.machine import H100, Machine
from tasks.training.plan.measured import KEY_DIGITS, MeasuredPhase, flops_per_second, nearest, seconds_per_flop
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.plan.phase_needs import num_trained, phase_needs, phase_save_interval, scale_cost, smallest_world
from tasks.training.plan.pipeline_stages import describe_stages
from tasks.training.plan.planned import Plan, PlannedMemory, PlannedParameters, PlannedPhase
from tasks.training.plan.planned_needs import size
from tasks.training.plan.rank_memory import rank_memory
from tasks.training.plan.step_time import StepTime, step_time
from tasks.training.plan.topology import data_parallel, impossible_topology
from tasks.training.schedule.phase_schedule import describe_schedule
from tasks.training.schedule.phase_steps import PhaseSteps, summarize_steps
from tasks.training.schedule.schedules import learning_rate_at, trains_mtp

if TYPE_CHECKING:
    from configs.schema import PackingRecipe, PhaseSection, Prices, Scale, TrainingRecipe, TrainingResources

CPU_MFU = 0.12
"""Share of the stated peak of a CPU, assumed where no run measured it: the configurations state that of two of the
fastest x86 cores. That of an accelerator is derived
(tasks/training/plan/step_time.py)."""


def plan_training(
    scale: Scale,
    machine: Machine = H100,
    *,
    searches: bool = False,
    prices: Prices | None = None,
    measured: Sequence[MeasuredPhase] = (),
) -> Plan:
    """The plan of a scale on accelerators of a machine; `searches`: with the setting that the plan would choose and the
    smallest world of each phase; of a phase that no engine can train, or that does not fit, the former always.
    `measured`: what runs on this machine say about phases that run on it. Prices are by default those of
    the source documents. Raises ValueError where budgets and schedules do not fit."""
    prices = load_prices("guide") if prices is None else prices
    counts = count_parameters(scale.model.recipe)
    phases = tuple(_plan_phase(scale, phase, machine, prices, searches, measured) for phase in scale.phases)
    return Plan(
        scale=scale.scale,
        parameters=PlannedParameters(
            attention_per_layer=counts.attention_per_layer,
            expert=counts.expert,
            moe_layer=counts.moe_layer,
            dense_layer=counts.dense_layer,
            body=counts.body,
            mtp=counts.mtp_layers,
            embeddings=counts.embeddings,
            body_and_mtp=counts.body_and_mtp,
            total=counts.total,
            active_body=counts.active_body,
            active_body_and_mtp=counts.active_body + counts.active_mtp,
            active=counts.active,
        ),
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(scale.model.recipe),
        cpu_mfu=CPU_MFU,
        machine=machine.name,
        cost=scale_cost(scale, [phase.needs for phase in phases], prices, machine),
        phases=phases,
        evaluation=_describe_evaluation(scale),
        release=_describe_release(scale),
    )


def _describe_evaluation(scale: Scale) -> str:
    """Who answers after each phase: no axis divides an evaluation."""
    recipe, resources = scale.evaluation.recipe, scale.evaluation.resources
    if recipe.rollouts != "in_process":
        return (
            f"is asked of {resources.rollout_server} by {recipe.rollouts} after each phase; no device here holds it all"
        )
    return f"has {_whole_model(scale, resources.device, recipe.dtype)} after each phase"


def _whole_model(scale: Scale, device: str, dtype: str) -> str:
    weights = (2 if dtype == "bfloat16" else 4) * count_parameters(scale.model.recipe).total
    return f"one whole model on one device ({device}; {size(weights)} of weights in {dtype})"


def _describe_release(scale: Scale) -> str:
    """What engines are compared with, the benchmarks of the gate, and what a run reads for them before it trains."""
    wanted = scale.evaluation.suite
    compared = f"is compared with {_whole_model(scale, scale.release.resources.device, 'float32')}"
    if wanted is None:
        return compared
    suite = load_suite(wanted.name)
    datasets = sorted({dataset_and_file(address)[0].removeprefix(HUGGING_FACE) for address in suite.hub_files})
    hub = [f"from the Hugging Face Hub {', '.join(datasets)}"] if datasets else []
    own = [f"from --data, with the role evaluation, {', '.join(sorted(suite.own_files))}"] if suite.own_files else []
    read = "; ".join([*hub, *own]) or "no file: every item is made"
    asked = f"is asked {', '.join(wanted.bounds)} (suite {wanted.name})"
    return f"{compared}; {asked}; a run reads, before it trains, {read}"


def _plan_phase(
    scale: Scale,
    phase: PhaseSection,
    machine: Machine,
    prices: Prices,
    searches: bool,
    measured: Sequence[MeasuredPhase],
) -> PlannedPhase:
    recipe, resources, start = scale.training_recipe(phase), phase.resources, scale.start_of(phase)
    steps, attended = summarize_steps(recipe), attended_tokens(phase)
    impossible, speed = impossible_topology(recipe, resources), _speed(recipe, resources, attended, machine, measured)
    needs = phase_needs(recipe, resources, speed.step, speed.hours, prices, machine)
    if searches:
        needs = needs.model_copy(update={"smallest_world": smallest_world(recipe, resources)})
    memory = _memory(recipe, resources)
    is_chosen = searches or impossible or memory.total > memory.available
    chosen = choose_setting(phase.name, recipe, resources, attended, machine, prices) if is_chosen else (None, "")
    first_rate, peak_rate, last_rate = _learning_rates(recipe, steps)
    return PlannedPhase(
        name=recipe.phase,
        objective=recipe.objective.kind,
        adapter=recipe.adapter.kind,
        trained_parameters=num_trained(recipe),
        num_tokens=recipe.num_tokens,
        num_steps=steps.num_steps,
        sequence_length=recipe.sequence_length,
        first_batch_tokens=steps.first_rows * recipe.sequence_length,
        max_batch_tokens=steps.max_rows * recipe.sequence_length,
        first_learning_rate=first_rate,
        peak_learning_rate=peak_rate,
        last_learning_rate=last_rate,
        rope_theta=recipe.rope_theta,
        start="" if start is None else start.name,
        schedule=describe_schedule(recipe, start),
        mixture=_describe_data(scale, phase),
        attended_tokens=attended,
        trains_mtp=trains_mtp(recipe),
        training_flops=speed.flops,
        num_ranks=resources.num_ranks,
        data_parallel=data_parallel(resources),
        tensor_parallel=resources.tensor_parallel,
        pipeline_parallel=resources.pipeline_parallel,
        stage_layers=_stage_layers(recipe, resources),
        context_parallel=resources.context_parallel,
        expert_parallel=resources.expert_parallel,
        zero_stage=resources.zero_stage,
        mfu=speed.mfu,
        hours=speed.hours,
        tokens_per_second=recipe.num_tokens / (speed.hours * 3600) if speed.hours else 0.0,
        known_by=speed.known_by,
        measured_memory=0 if speed.run is None else speed.run.memory_bytes,
        needs=needs,
        choice=chosen[0],
        no_choice=chosen[1],
        rank_memory=memory,
        impossible=tuple(impossible),
        not_available=tuple(unavailable_training(recipe, resources)),
        not_counted=tuple(_not_counted(phase, speed)),
        warnings=_warnings(scale, phase, memory, speed),
    )


@dataclass(frozen=True)
class _Speed:
    flops: float
    mfu: float
    hours: float
    step: StepTime | None
    """By which it is derived, on accelerators."""
    run: MeasuredPhase | None
    """By which it is known, on this machine."""

    @property
    def known_by(self) -> str:
        if not self.hours:
            return ""
        if self.run is not None:
            return f"run {self.run.key[:KEY_DIGITS]}"
        return "assumed" if self.step is None else "derived"


def _speed(
    recipe: TrainingRecipe,
    resources: TrainingResources,
    attended: float,
    machine: Machine,
    measured: Sequence[MeasuredPhase],
) -> _Speed:
    flops = phase_flops_per_token(recipe, attended, recipe.adapter.kind != "none") * recipe.num_tokens
    if impossible_topology(recipe, resources):
        return _Speed(flops, mfu=0.0, hours=0.0, step=None, run=None)
    step = step_time(recipe, resources, attended, machine) if resources.device == "cuda" else None
    run = nearest(measured, recipe, resources) if resources.launcher == "local" else None
    peak = resources.num_ranks * resources.peak_flops_per_second
    mfu = CPU_MFU if step is None else step.mfu
    seconds_per = 1 / (peak * mfu) if run is None else seconds_per_flop(run, recipe)
    mfu = mfu if run is None else flops_per_second(run, recipe) / peak
    return _Speed(flops, mfu, flops * seconds_per / 3600, step, run)


def attended_tokens(phase: PhaseSection) -> int:
    """Length of the stretch inside which attention stays, as the plan counts it."""
    recipe = phase.recipe
    if recipe.packing == "stream" or recipe.samples_answers:
        return recipe.sequence_length
    return min(phase.resources.assumed_document_tokens, recipe.sequence_length)


def _not_counted(phase: PhaseSection, speed: _Speed) -> Iterator[str]:
    """Only a run measures sampling: how long answers are and how many are decoded at once is not known before."""
    recipe, server = phase.recipe, phase.resources.rollout_server
    if recipe.samples_answers and speed.run is None:
        yield "hours and cost leave out the sampling of answers"
    if recipe.asks_models:
        yield "hours and cost leave out the answers that are sampled before the phase"
    if isinstance(recipe.objective, PolicyObjective | SolutionObjective) and recipe.objective.rollouts != "in_process":
        yield f"cost leaves out the GPUs of the server that samples answers ({server or 'not named'})"


def _learning_rates(recipe: TrainingRecipe, steps: PhaseSteps) -> tuple[float, float, float]:
    """Of the first step, the highest, of the last: they rise to the warm-up's end and fall after it."""
    first, last = steps.first_end_tokens, recipe.course_start_tokens + recipe.num_tokens
    top = min(max(round(recipe.course.warmup_share * recipe.course_num_tokens), first), last)
    first_rate, peak, last_rate = (
        learning_rate_at(recipe.course, recipe.course_num_tokens, tokens) for tokens in (first, top, last)
    )
    return first_rate, peak, last_rate


def _describe_data(scale: Scale, phase: PhaseSection) -> str:
    """What the phase reads; before rejection sampling and distillation also who answers, and what that needs."""
    if phase.recipe.reads_pairs:
        return "preference pairs"
    mixture = _describe_mixture(phase.recipe.packing_recipe)
    if not phase.recipe.samples_solutions:
        return mixture
    recipe, job = scale.training_recipe(phase), scale.evaluation.resources
    experts = [f"{expert.phase} ({', '.join(expert.domains)})" for expert in phase.recipe.experts]
    answers = f"{mixture}; chat are right answers of {', '.join(experts) or 'its start'}, sampled before it"
    if phase.recipe.solution_recipe.objective.rollouts != "in_process":
        return f"{answers} by {phase.resources.rollout_server or 'a server'}"
    element, copies = 2 if recipe.dtype == "bfloat16" else 4, 2 if job.device == "cpu" else 1  # packed on a CPU
    whole = phase.resources.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 1})
    weights = size(copies * element * count_parameters(recipe.model).total)
    cache = size(job.batch_sequences * answer_cache_bytes(recipe, whole))
    at_once = f"{cache} of cache for {job.batch_sequences} answers at once"
    return f"{answers} on one device: {weights} of weights, one model at a time, and {at_once}"


def _describe_mixture(recipe: PackingRecipe) -> str:
    """Shares as they are configured; a domain without text leaves its share to the others."""
    total = [sum(point.mixture.values()) for point in recipe.waypoints]
    courses = {
        domain: [
            f"{point.mixture.get(domain, 0.0) / whole:.0%}"
            for point, whole in zip(recipe.waypoints, total, strict=True)
        ]
        for domain in recipe.domains
    }
    shares = [
        f"{domain} {' -> '.join(course if len(set(course)) > 1 else course[:1])}" for domain, course in courses.items()
    ]
    weights = (
        [f"quality buckets x {', '.join(f'{weight:g}' for weight in recipe.bucket_weights)}"]
        if recipe.bucket_weights
        else []
    )
    return "; ".join([", ".join(shares), *weights])


def _stage_layers(recipe: TrainingRecipe, resources: TrainingResources) -> str:
    if resources.pipeline_parallel > recipe.model.num_hidden_layers:
        return ""
    return describe_stages(recipe.model, resources.pipeline_parallel)


def _memory(recipe: TrainingRecipe, resources: TrainingResources) -> PlannedMemory:
    memory = rank_memory(recipe, resources)
    return PlannedMemory(
        weights=memory.weights,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        activations=memory.activations,
        buckets=memory.buckets,
        update=memory.update,
        kv_cache=memory.kv_cache,
        sampling_weights=memory.sampling_weights,
        total=memory.device,
        host_optimizer=memory.host_optimizer,
        host_weights=memory.host_weights,
        available=resources.device_memory_bytes,
    )


def _warnings(scale: Scale, phase: PhaseSection, memory: PlannedMemory, speed: _Speed) -> tuple[str, ...]:
    """Of an impossible phase only its memory: its number of copies is not the one that will run."""
    if not speed.hours:
        return tuple(_memory_warnings(memory))
    return (
        *_memory_warnings(memory),
        *_shard_warnings(scale.data.recipe.shards.multiple_of, phase.resources),
        *_save_warnings(scale, phase, speed),
    )


def _shard_warnings(multiple_of: int, resources: TrainingResources) -> list[str]:
    """Where a domain's shards do not divide evenly among those that read them."""
    copies, stages = data_parallel(resources), resources.pipeline_parallel
    if multiple_of % (copies * stages) == 0:
        return []
    return [
        f"shards.multiple_of ({multiple_of}) is no multiple of data-parallel copies x pipeline stages ({copies} x "
        f"{stages} = "
        f"{copies * stages}): readers get unequal numbers of shards; set it to {math.lcm(multiple_of, copies * stages)}"
    ]


def _save_warnings(scale: Scale, phase: PhaseSection, speed: _Speed) -> list[str]:
    """Where another interval between saves would lose much less. Failures of CPUs are not known."""
    if speed.step is None:
        return []
    saves = phase_save_interval(scale.training_recipe(phase), phase.resources, speed.hours)
    return [] if saves.is_near_enough else [saves.describe(phase.name)]


def _memory_warnings(memory: PlannedMemory) -> list[str]:
    if memory.total <= memory.available:
        return []
    return [
        f"the fullest rank needs {size(memory.total)} of {size(memory.available)}: widen tensor, pipeline or "
        f"expert parallelism, raise "
        "zero_stage or recompute, offload the optimizer, or lower micro_batch_sequences, bucket_elements or "
        "rollout_cache_bytes"
    ]
