"""The command line `glm46`: run, plan, config, stage, chat, serve, eval, compare, convert, generate, fetch, profile,
rollback, evidence, verify, speedrun, forget, up, down, worker, exporter, jobs, cluster, checkpoint, adopt, gc, doctor,
lineage.

Exit codes: 0 the requested end was reached, 3 refused by a gate, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flows.cli.checkpoint_commands import checkpoint_app
from flows.cli.cluster_commands import cluster_app
from flows.cli.command_errors import EXIT_FAILED, EXIT_REFUSED, failures, usage_errors
from flows.cli.eval_command import compare, evaluate
from flows.cli.inherited import open_closed_streams, refuse_other_encoding, refuse_removed_directory
from flows.cli.jobs_commands import jobs_app
from flows.cli.lineage_commands import lineage_app
from flows.cli.model_commands import convert, fetch, generate, profile
from flows.cli.options import ADDRESS, JSON, SCALE, STORE
from flows.cli.plan_commands import config, plan
from flows.cli.registry_commands import evidence, forget, rollback, speedrun, verify
from flows.cli.serve_command import serve
from flows.cli.store_commands import adopt, gc
from flows.cli.up_commands import down, exporter, up, worker

if TYPE_CHECKING:
    from configs.schema import Scale
    from infra.home import Home
    from infra.registry.model_registry import RegisteredVersion
    from infra.storage.store import Store

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Turn raw documents into a promoted, served model.",
)

app.add_typer(lineage_app, name="lineage")

app.add_typer(jobs_app, name="jobs")
app.add_typer(cluster_app, name="cluster")

app.add_typer(checkpoint_app, name="checkpoint")


def main() -> None:
    """Entry point of the console script. What no command foresaw, a damaged database for one, is one message too."""
    open_closed_streams()
    refuse_removed_directory()
    refuse_other_encoding()
    assert_packages_are_ours()
    from infra.home import named_home
    from infra.servers.loopback import reach_loopback_directly

    reach_loopback_directly()
    try:
        with failures(named_home()):
            app()
    except typer.Exit as end:
        sys.exit(end.exit_code)


def assert_packages_are_ours() -> None:
    """Check that each top-level package is this project's: their names are common."""
    import configs
    import data_contracts
    import infra
    import model
    import tasks

    root = Path(__file__).resolve().parents[2]
    for package in (configs, data_contracts, infra, model, tasks):
        folder = Path(package.__path__[0]).resolve()
        if folder.parent != root:
            sys.exit(
                f"package {package.__name__} is loaded from {folder}, not from {root}: run glm46 from another "
                f"directory or clear PYTHONPATH"
            )


@app.command()
def run(
    scale: SCALE,
    store: STORE = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar=ADDRESS,
            help="your documents; by default Python's library, its documentation and package descriptions",
        ),
    ] = None,
    from_stage: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="start at this phase, or at release_model")
    ] = None,
    start: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT|HF_DIR|hf://OWNER/NAME|ALIAS", help="the weights to start from")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="STAGE", help="stop after prepare_data, a phase, or release_model")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Run the pipeline at a scale: from raw documents to a promoted, served model."""
    with usage_errors():
        home, opened, start = _refuse_what_cannot_run(scale, store, data, from_stage, start, until)
    code = EXIT_FAILED
    try:
        from flows.cli.interruption import interruptible

        with failures(home, opened.staging_root), interruptible(home):
            from flows.cli.jobs import say_running_jobs
            from flows.cli.run_pipeline import run_pipeline
            from flows.show.outcome import print_outcome

            say_running_jobs(home)
            address = None if store is None else opened.uri
            outcome = run_pipeline(home, scale, address, data, from_stage, start, until)
            print_outcome(outcome, scale, store)
            if as_json:
                print(outcome.model_dump_json(), flush=True)
            code = EXIT_REFUSED if outcome.reasons else 0
    finally:
        _leave(code)


def _refuse_what_cannot_run(
    scale: str, store: str | None, data: str | None, from_stage: str | None, start: str | None, until: str | None
) -> tuple[Home, Store, str | None]:
    """The home, the store and the start of a run that may begin, one of the Hub as the directory into which it was
    fetched. Raises ValueError before anything starts."""
    from configs.load import load_scale
    from flows.check_start import check_start, local_start, refuse_other_template
    from flows.cli.native_code import warn_of_missing_code
    from flows.cli.run_pipeline import refuse_unanswerable_release
    from flows.stages import choose_stages, refuse_missing_inputs, require_programs, with_tokenizer_of_start
    from infra.home import open_home
    from infra.machine.doctor import check_room, require
    from infra.registry.model_registry import open_registry
    from infra.storage.open_store import open_store

    configuration = load_scale(scale)
    window = choose_stages(configuration, from_stage, start, until)
    _refuse_missing_data(data)
    require_programs(configuration, window)
    start = local_start(configuration, start)
    configuration = with_tokenizer_of_start(configuration, start)
    refuse_missing_inputs(configuration, window, data)
    home = open_home()
    if window.releases:
        refuse_unanswerable_release(home, configuration)
    opened = open_store(store, home)
    require(*check_room(home, opened.staging_root))
    if start is not None:
        check_start(configuration, start, opened, lambda: open_registry(home))
        if not window.phases:
            refuse_other_template(start)
    warn_of_missing_code()
    return home, opened, start


def _refuse_missing_data(data: str | None) -> None:
    if data is None:
        return
    from flows.parameters import existing_data
    from tasks.data.sources.remote_sources import is_remote, refuse_missing_address

    existing_data(data)
    if is_remote(data):
        refuse_missing_address(data)


def _leave(code: int) -> NoReturn:
    """End the process at once: everything is committed, and Prefect's exit handlers wait without limit for a killed
    server."""
    from infra.machine.spark import stop_spark

    try:
        stop_spark()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


app.command()(plan)
app.command()(config)


@app.command()
def stage(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="extract, deduplicate, filter, tokenizer, ...; another word lists them all"
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="a new directory for documents and evidence, outside --input")
    ],
    documents: Annotated[
        str | None, typer.Option("--input", metavar=ADDRESS, help="your documents, or an earlier stage's output")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE|FILE.yaml",
            help="the scale or YAML whose data section is used; by default the recipe of full, on this machine",
        ),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Run one data stage on a directory; docs/data.md says what each stage does. Needs no server."""
    with usage_errors():
        from flows.cli.single_stage import open_stage
        from infra.home import open_home
        from infra.machine.doctor import check_java, require

        home = open_home()
        run_stage = open_stage(name, documents, output, config, home)
        require(check_java())
    from flows.cli.interruption import interruptible

    with failures(home, output.parent), interruptible(home):
        outcome = run_stage()
        print(outcome.model_dump_json() if as_json else outcome.describe())


@app.command()
def chat(
    scale: Annotated[str, typer.Option(help="the scale of the model")] = "tiny",
    alias: Annotated[str, typer.Option(help="which version: champion, a phase's name, ...")] = "champion",
    prompt: Annotated[
        str | None, typer.Option(help="answer this prompt and exit; by default read lines from the terminal")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    store: STORE = None,
) -> None:
    """Talk to a model, by default the promoted one, served by llama.cpp on loopback."""
    with usage_errors():
        home, configuration, version, opened = _chosen_version(scale, alias, store)
    with failures(home):
        from flows.cli.serving.serve_model import complete, served_model

        with suppress(KeyboardInterrupt), served_model(home, configuration, version, opened, port=None) as served:
            lines = [prompt] if prompt is not None else _terminal_lines()
            for line in lines:
                for piece in complete(served, line, max_tokens, temperature):
                    print(piece, end="", flush=True)
                print()


def _chosen_version(scale: str, alias: str, store: str | None) -> tuple[Home, Scale, RegisteredVersion, Store]:
    from configs.load import load_scale
    from flows.cli.serving.serve_model import find_version
    from infra.home import open_home
    from infra.storage.open_store import open_known_store

    configuration, home = load_scale(scale), open_home()
    return home, configuration, find_version(home, configuration, alias), open_known_store(store, home)


app.command()(serve)
app.command()(up)
app.command()(down)
app.command()(worker)
app.command()(exporter)
app.command("eval")(evaluate)
app.command()(compare)
app.command()(convert)
app.command()(generate)
app.command()(fetch)
app.command()(profile)
app.command()(rollback)

app.command()(evidence)
app.command()(verify)
app.command()(speedrun)
app.command()(forget)

app.command()(adopt)

app.command()(gc)


@app.command()
def doctor(
    scale: Annotated[str | None, typer.Option(help="also check the schedulers that this scale submits to")] = None,
    store: STORE = None,
    deep: Annotated[bool, typer.Option(help="read every file of the store and compare checksums")] = False,
    as_json: JSON = False,
) -> None:
    """Check what can be missing or broken, and print the fix."""
    with usage_errors():
        from configs.load import load_scale
        from flows.cli.native_code import native_code
        from flows.stages import launchers_of
        from infra.home import open_home
        from infra.machine.doctor import Check, check_launchers, check_machine, check_named_store
        from infra.machine.doctor import as_json as to_json
        from tasks.data.sandbox.code_sandbox import find_isolation

        home = open_home()
        asked = None if scale is None else load_scale(scale)
        launchers = set() if asked is None else launchers_of(asked, asked.phases, releases=True)
        isolation, problem = find_isolation()
        fix = (
            ""
            if isolation
            else "only solutions to be run need it: install bubblewrap (Debian: apt-get install bubblewrap)"
        )
        sandbox = Check("sandbox", True, isolation or f"none: {problem}", fix)
        checks = [*check_machine(home), native_code(), sandbox]
        checks += [*check_launchers(launchers), *check_named_store(store, home, deep)]
    if as_json:
        print(to_json(checks))
    else:
        for check in checks:
            print(
                f"{'ok' if check.passed else 'MISSING':<8} {check.name:<16} "
                f"{check.found}{f'; {check.fix}' if check.fix else ''}"
            )
    raise typer.Exit(0 if all(check.passed for check in checks) else EXIT_FAILED)


def _terminal_lines() -> Iterator[str]:
    """What is typed, or piped: then no prompt is among the answers."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
