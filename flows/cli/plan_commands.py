"""Commands `glm46 plan` and `glm46 config`: what a scale needs and costs, and a scale of your own as a file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.command_errors import EXIT_USAGE, usage_errors
from flows.cli.options import JSON, SCALE, STORE

if TYPE_CHECKING:
    from configs.schema import Prices, Scale
    from tasks.training.plan.compare_plans import OfficialServer
    from tasks.training.plan.measured import MeasuredPhase

SCALES = Annotated[
    list[str] | None, typer.Argument(metavar="SCALE|FILE.yaml ...", help="one, or several with --compare")
]
COMPARED = ("full", "scaled_down", "recipes/glm45_355b_sft")
"""Where --compare is given no names."""


def plan(
    scales: SCALES = None,
    as_json: JSON = False,
    search: Annotated[
        bool, typer.Option("--search", help="also the setting to choose and the smallest world of each phase")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help=f"scales side by side, and official weights where there are; without names {', '.join(COMPARED)}",
        ),
    ] = False,
    machine: Annotated[
        str, typer.Option(help="whose links and memory the hours are derived from: h100, h800")
    ] = "h100",
    prices: Annotated[
        str, typer.Option(metavar="NAME|FILE.yaml", help="prices; by default those of configs/prices/guide.yaml")
    ] = "guide",
    store: STORE = None,
) -> None:
    """Print the parameters, tokens, steps, memory, hours and cost of a scale. Trains nothing.

    Hours and memory of phases on this machine are those that runs in the store measured, where there are any.

    Exit code 2 where no engine can train a phase as it is configured: the plan says why, and what it would choose.
    """
    with usage_errors():
        from configs.load import load_prices, load_scale
        from tasks.training.plan.compare_plans import compare_plans, largest_published
        from tasks.training.plan.machine import MACHINES
        from tasks.training.plan.plan_training import plan_training

        if machine.lower() not in MACHINES:
            raise ValueError(f"machine {machine} is not known: give one of {', '.join(MACHINES)}")
        names = list(scales or (COMPARED if compare else ()))
        if not names or (len(names) > 1 and not compare):
            raise ValueError(f"{len(names) or 'no'} scales: give one, as glm46 plan tiny, or --compare")
        known, measured, chosen = load_prices(prices), _measured(store), [load_scale(name) for name in names]
        plans = [
            plan_training(scale, MACHINES[machine.lower()], searches=search, prices=known, measured=measured)
            for scale in chosen
        ]
        shown = plans[0]
        if compare:
            published = largest_published(chosen)
            servers = () if published is None else _official_servers(published, machine, known)
            shown = compare_plans(plans, servers)
        print(shown.model_dump_json() if as_json else shown.describe())
    if not all(each.is_possible for each in plans):
        raise typer.Exit(EXIT_USAGE)


def _measured(store: str | None) -> list[MeasuredPhase]:
    """What the store's runs measured; nothing before the first run, and no home is created."""
    from infra.home import named_home
    from infra.storage.open_store import open_known_store
    from tasks.training.measured_phases import measured_phases

    home = named_home()
    if store is None and not home.store_dir.is_dir():
        return []
    return measured_phases(open_known_store(store, home), lambda sentence: print(f"glm46: {sentence}", file=sys.stderr))


def _official_servers(scale: Scale, machine: str, prices: Prices) -> tuple[OfficialServer, ...]:
    from tasks.serving.official_weights import official_servers
    from tasks.training.plan.compare_plans import OfficialServer
    from tasks.training.plan.phase_needs import named_price

    price = named_price(prices, "rank_hour", machine.lower())
    return tuple(
        OfficialServer(
            stored_format=server.model.stored_format,
            num_gpus=server.layout.num_gpus,
            context=server.context,
            gigabytes=server.needs.total,
            cost_per_hour=server.layout.num_gpus * price,
        )
        for server in official_servers(scale, machine.upper())
    )


def config(
    scale: SCALE,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a setting by its path: model.recipe.hidden_size=512"),
    ] = None,
) -> None:
    """Print a scale's YAML with settings changed, checked as a run would; comments stay: glm46 config tiny > mine.yaml

    Phases are named: phases.sft.recipe.num_tokens=100000. A value is YAML, and a mapping is set key by key.
    """
    with usage_errors():
        from configs.load import changed_scale

        print(changed_scale(scale, settings or []), end="")
