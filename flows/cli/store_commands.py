"""The commands of glm46 that care for the store: adopt and gc."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

import typer

from flows.cli.command_errors import usage_errors
from flows.cli.options import JSON, STORE

HOUR_SECONDS = 3600


def adopt(
    old: Annotated[str, typer.Argument(help="key of the work, as `run --json` printed it")],
    new: Annotated[str, typer.Argument(help="key that the newer code asks for")],
    reason: Annotated[
        str, typer.Option(help="why the older code's result is still right; kept in manifest and report")
    ],
    store: STORE = None,
) -> None:
    """Accept work done under older code for newer code; unfinished work continues."""
    with usage_errors():
        from infra.home import known_home
        from infra.storage.adoption import adopt as adopt_work
        from infra.storage.open_store import open_known_store

        home = known_home()
        print(adopt_work(open_known_store(store, home, writes=True), home, old, new, reason))


def gc(
    store: STORE = None,
    delete: Annotated[bool, typer.Option("--delete", help="remove what is listed; by default only list it")] = False,
    older_than: Annotated[
        float, typer.Option(metavar="HOURS", min=0, help="leave what is younger, by the store's clock")
    ] = 24,
    as_json: JSON = False,
) -> None:
    """List or remove what nobody needs: attempts of killed runs, invalid manifests, old leases, cached copies."""
    with usage_errors():
        from flows.cli.jobs import running_jobs
        from infra.home import known_home
        from infra.storage.garbage import delete_garbage, find_garbage
        from infra.storage.open_store import open_known_store

        home = known_home()
        opened = open_known_store(store, home, writes=delete)
    say = partial(print, file=sys.stderr if as_json else sys.stdout)
    with usage_errors(opened.staging_root):
        garbage = find_garbage(opened, older_than * HOUR_SECONDS, is_cache_free=not running_jobs(home), say=say)
        for lease in garbage.silent:
            say(f"nobody renews the lease of {lease.holder}: the next run that needs its work takes it over")
        if delete:
            garbage = delete_garbage(opened, garbage)
        for heap in garbage.heaps():
            say(f"{'removed ' if delete else ''}{heap.describe()}")
        if as_json:
            print(json.dumps({heap.what: {"count": heap.count, "bytes": heap.num_bytes} for heap in garbage.heaps()}))
