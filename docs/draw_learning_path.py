"""Computes the table of docs/learning-path.md from the plan: python -m docs.draw_learning_path. A test compares it."""

from __future__ import annotations

from pathlib import Path

from configs.load import load_prices, load_scale
from docs.draw_scale import cases
from tasks.training.plan.machine import H100, H800, Machine
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.plan.phase_needs import phase_needs
from tasks.training.plan.plan_training import plan_training
from tasks.training.plan.planned_needs import PlannedNeeds, amount, size
from tasks.training.plan.search import evaluate

PAGE = Path(__file__).resolve().parent / "learning-path.md"
BEGIN, END = "<!-- computed by python -m docs.draw_learning_path -->", "<!-- end -->"
STAGES: tuple[tuple[str, Machine], ...] = (
    ("micro", H100),
    ("tiny", H100),
    ("nightly", H100),
    ("air_lora", H100),
    ("scaled_down", H100),
    ("full", H800),
)


def one_gpu() -> tuple[float, PlannedNeeds]:
    """Hours and needs of the GPU benchmark's model in the first phase of scaled_down."""
    _, recipe, resources, attended, machine = cases()[0]
    step = evaluate(recipe, resources, attended, machine).step
    flops = phase_flops_per_token(recipe, attended, recipe.adapter.kind != "none") * recipe.num_tokens
    hours = flops / (resources.num_ranks * resources.peak_flops_per_second * step.mfu) / 3600
    return hours, phase_needs(recipe, resources, step, hours, load_prices("guide"), machine)


def table() -> str:
    """In Markdown."""
    rows = ["| stage | ranks | hours | cost of ranks, USD | energy, kWh | disk |", "|---|---|---|---|---|---|"]
    for name, machine in STAGES:
        plan = plan_training(load_scale(name), machine)
        ranks = max(phase.num_ranks for phase in plan.phases)
        kind = f"{ranks:,} {machine.name}" if plan.cost.rank_hour else f"{ranks} CPU"
        hours = sum(phase.hours + phase.needs.lost_hours for phase in plan.phases)
        disk = sum(phase.needs.disk_bytes for phase in plan.phases)
        energy = amount(plan.cost.kilowatt_hours)
        cells = (f"`{name}`", kind, _hours(hours), amount(plan.cost.ranks), energy, size(disk))
        rows.append(f"| {' | '.join(cells)} |")
        if name == "nightly":
            hours, needs = one_gpu()
            watts = load_prices("guide").rank_watts["h100"]
            cells = (
                *("3.2 B, one phase", "1 H100", _hours(hours + needs.lost_hours), amount(needs.cost)),
                *(amount(needs.rank_hours * watts / 1000), size(needs.disk_bytes)),
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2f}"


def drawn() -> str:
    """The page with its table as it is computed."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(drawn())
