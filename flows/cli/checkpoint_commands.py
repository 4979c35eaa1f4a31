"""The commands `glm46 checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import EXIT_FAILED, usage_errors
from flows.cli.options import STORE

KEY = Annotated[str, typer.Argument(metavar="KEY", help="key of a checkpoint, or its first digits")]

checkpoint_app = typer.Typer(
    no_args_is_help=True, help="List, verify or take out the weights of phases, also of those that have not ended."
)


@checkpoint_app.command("list")
def checkpoint_list(store: STORE = None) -> None:
    """List the checkpoints of the store and of unfinished phases: key, phase, step, size."""
    with usage_errors():
        from flows.cli.checkpoints import list_checkpoints
        from infra.home import known_home
        from infra.storage.open_store import open_known_store

        home = known_home()
        for checkpoint in list_checkpoints(home, open_known_store(store, home)):
            print(checkpoint.describe())


@checkpoint_app.command("verify")
def checkpoint_verify(key: KEY, store: STORE = None) -> None:
    """Read every file of a checkpoint and compare it with its sha256; exit code 1 where one differs."""
    with usage_errors():
        from flows.cli.checkpoints import damage_of, find_checkpoints
        from infra.home import known_home
        from infra.storage.open_store import open_known_store

        home = known_home()
        opened = open_known_store(store, home)
        damages = [(each, damage_of(each, opened)) for each in find_checkpoints(home, opened, key)]
    for checkpoint, damage in damages:
        print(f"{checkpoint.describe()}  {damage or 'intact'}")
    if any(damage for _, damage in damages):
        raise typer.Exit(EXIT_FAILED)


@checkpoint_app.command("consolidate")
def checkpoint_consolidate(
    key: KEY, target: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory")], store: STORE = None
) -> None:
    """Write a checkpoint as a Hugging Face directory; a trained adapter, in PEFT's format, below DIR/adapter."""
    with usage_errors():
        from flows.cli.checkpoints import consolidate, find_checkpoints
        from infra.home import known_home
        from infra.storage.open_store import open_known_store

        home = known_home()
        opened = open_known_store(store, home)
        consolidate(find_checkpoints(home, opened, key)[-1], opened, target)
        print(target)
