"""The commands `glm46 jobs`."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.command_errors import usage_errors

jobs_app = typer.Typer(
    no_args_is_help=True, help="List or stop jobs: they run detached from the run that started them."
)


@jobs_app.command("list")
def jobs_list() -> None:
    """List this home's jobs whose work is not committed: key, stage, state, start and directory."""
    with usage_errors():
        from flows.cli.jobs import list_jobs
        from infra.home import known_home, refuse_missing_home

        home = known_home()
        refuse_missing_home(home)
        for job in list_jobs(home):
            print(job.describe())


@jobs_app.command("stop")
def jobs_stop(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="key of a job, or its first digits; by default all running jobs")
    ] = None,
) -> None:
    """Let running jobs save and end; `glm46 run` continues them."""
    with usage_errors():
        from flows.cli.jobs import stop_jobs
        from infra.home import known_home, refuse_missing_home

        home = known_home()
        refuse_missing_home(home)
        for job in stop_jobs(home, key):
            print(job.describe())
