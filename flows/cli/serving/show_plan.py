"""Prints the command of a planned server with its sum, or writes the files that run it elsewhere."""

from __future__ import annotations

import shlex
from pathlib import Path

from flows.cli.serving.asked_server import UNKNOWN_DIRECTORY, Asked, PlacedModel
from tasks.serving.deployment_files import write_deployment
from tasks.serving.engine_command import Place, engine_command, rollout_environment, shell_lines


def print_plan(asked: Asked) -> None:
    """The sum as comments, then the command, one argument a line: what a shell would run. A key is not in it."""
    placed = asked.to_show()
    for line in placed.plan.describe().splitlines():
        print(f"# {line}")
    if str(placed.path) == UNKNOWN_DIRECTORY:
        print(f"# no version {asked.alias} is registered: its directory is written as {UNKNOWN_DIRECTORY}")
    if placed.plan.num_nodes > 1:
        print("# on each node with its NODE_RANK from 0 on, and the MASTER_ADDRESS of node 0")
    for is_worker in (False, True) if placed.plan.num_nodes > 1 and placed.plan.engine == "vllm" else (False,):
        print("# on the other nodes:" if is_worker else "", end="\n" if is_worker else "")
        for name, value in rollout_environment(placed.plan).items():
            print(f"{name}={shlex.quote(value)} \\")
        print(shell_lines(engine_command(placed.plan, _place(asked, placed, is_worker=is_worker))))


def write_plan(asked: Asked, directory: Path) -> None:
    """The files in a new directory, and their names on standard output."""
    for name in write_deployment(asked.to_show().plan, asked.host, asked.port, directory):
        print(directory / name)


def _place(asked: Asked, placed: PlacedModel, *, is_worker: bool) -> Place:
    return Place(str(placed.path), asked.host, asked.port, num_threads=asked.resources.num_threads, is_worker=is_worker)
