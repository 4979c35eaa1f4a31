"""Computes the tables of docs/scale.md from the plan: python -m docs.draw_scale. A test compares them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.training.train_step_gpu import LARGE
from configs.load import load_prices, load_scale
from configs.schema import TrainingRecipe, TrainingResources
from model.architecture.counts import count_parameters
from tasks.training.plan.machine import H100, H800, HOURS_TO_FAILURE, Machine
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.plan.phase_needs import price_of_rank, state_bytes
from tasks.training.plan.plan_training import attended_tokens
from tasks.training.plan.planned_needs import amount
from tasks.training.plan.search import Found, evaluate, find_topology

PAGE = Path(__file__).resolve().parent / "scale.md"
ROOFLINE = PAGE.parent.parent / "benchmarks" / "results" / "roofline.json"
BEGIN, END = "<!-- computed by python -m docs.draw_scale -->", "<!-- end -->"
HASHED_PER_SECOND = 1.15e9
"""sha256 on one core."""
S0 = {"scaled_down": "recipes/s0_64xh100_muon", "full": "recipes/s0_355b_muon"}
"""Where S0's topologies are, as far as ranks can be divided so."""


def cases() -> list[tuple[str, TrainingRecipe, TrainingResources, float, Machine]]:
    """Name, first phase, its resources, attended tokens and machine of each size."""
    found = []
    for name, machine in (("air_lora", H100), ("scaled_down", H100), ("full", H800)):
        scale = load_scale(name)
        phase = scale.phases[0]
        case = (f"`{name}`", scale.training_recipe(phase), phase.resources, attended_tokens(phase), machine)
        found.append(case)
    _, recipe, resources, attended, machine = found[1]
    one = {"num_ranks": 1, "ranks_per_node": 1, "zero_stage": 0, "micro_batch_sequences": 1, "recompute": "full"}
    axes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)
    alone = resources.model_copy(update=one | axes)
    name = f"{count_parameters(LARGE).total / 1e9:.1f} B, the GPU benchmark's"
    return [(name, recipe.model_copy(update={"model": LARGE}), alone, attended, machine), *found]


def s0_topology(name: str, resources: TrainingResources) -> TrainingResources:
    """The resources of a scale's first phase, divided as S0 has it."""
    published = load_scale(S0[name]).phases[0].resources
    axes = [axis for axis in type(resources).model_fields if axis.endswith("_parallel")]
    keys = (*axes, "recompute", "micro_batch_sequences")
    return resources.model_copy(update={key: getattr(published, key) for key in keys})


def tables() -> str:
    """All of them, in Markdown."""
    rows = [
        "| model | GPUs | topology | step, s | of peak | memory, GB | hours of the phase | dollars |",
        "|---|---|---|---|---|---|---|---|",
    ]
    traffic = [
        "| model | GPUs | tensor | context | experts | stages | gradients | state, GB | of a rank | one hash, min | "
        "failure after |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, recipe, resources, attended, machine in cases():
        given = evaluate(recipe, resources, attended, machine)
        best = find_topology(recipe, resources, attended, machine)
        kinds = [("configured", given)]
        if name.strip("`") in S0:
            published = s0_topology(name.strip("`"), resources)
            kinds.insert(0, ("S0's", evaluate(recipe, published, attended, machine)))
        if best is not None and best.resources != resources:
            kinds.append(("fastest", best))
        rows += [_row(name, kind, recipe, found, attended, machine) for kind, found in kinds]
        traffic.append(_traffic_row(name, recipe, best or given))
    return "\n".join([*rows, "", *traffic, "", *_roofline()])


def _row(name: str, kind: str, recipe: TrainingRecipe, found: Found, attended: float, machine: Machine) -> str:
    own = found.resources
    axes = f"{own.tensor_parallel} x {own.pipeline_parallel} x {own.context_parallel}, {own.expert_parallel}"
    flops = phase_flops_per_token(recipe, attended, recipe.adapter.kind != "none") * recipe.num_tokens
    hours = flops / (own.num_ranks * own.peak_flops_per_second * found.step.mfu) / 3600
    dollars = hours * own.num_ranks * price_of_rank(load_prices("guide"), own, machine)
    step = f"{found.step.seconds:.3g} | {found.step.mfu:.1%} | {found.memory_bytes / 1e9:.1f}"
    compiled = ", compiled" if own.compile_layers else ""
    topology = f"{kind}: {axes}, {own.recompute}, {own.micro_batch_sequences}{compiled}"
    return f"| {name} | {own.num_ranks:,} {machine.name} | {topology} | {step} | {hours:,.1f} | {amount(dollars)} |"


def _traffic_row(name: str, recipe: TrainingRecipe, found: Found) -> str:
    step, own = found.step, found.resources
    sent = (step.tensor_bytes, step.context_bytes, step.expert_bytes, step.stage_bytes, step.gradient_bytes)
    state = state_bytes(recipe)
    hashed = state / HASHED_PER_SECOND / 60
    hours = HOURS_TO_FAILURE / own.num_ranks
    cells = [name, f"{own.num_ranks:,}", *(f"{each / 1e9:.1f}" for each in sent)]
    cells += [f"{state / 1e9:,.0f}", f"{state / own.num_ranks / 1e9:.2f}", f"{hashed:.1f}", f"{hours:,.0f} h"]
    return f"| {' | '.join(cells)} |"


def _roofline() -> list[str]:
    kept = json.loads(ROOFLINE.read_text())
    lines = [
        "| part of a step | TFLOP | GB read and written | of them beside products | operations | ms |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("passes", "update"):
        part = kept[name]
        cells = ("teraflops", "gigabytes", "gigabytes_beside_products", "launches", "milliseconds")
        lines.append(f"| {name} | {' | '.join(f'{part[cell]:,}' for cell in cells)} |")
    passes = f"The passes of {kept['tokens']:,} tokens: {kept['tokens_per_second']:,} per second"
    return [*lines, "", f"{passes}, {kept['ours']:.1f} % of peak; a step adds one update."]


def drawn() -> str:
    """The page with its tables as they are computed."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(drawn())
