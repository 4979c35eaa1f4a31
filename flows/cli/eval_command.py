"""The commands `glm46 eval` and `glm46 compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import failures, usage_errors
from flows.cli.interruption import CONTINUE, interruptible
from flows.cli.options import ADDRESS, JSON, STORE

CONCURRENCY = Annotated[int, typer.Option(min=1, help="requests at a time, of a server")]
NUM_CONCURRENT = 8
NOTHING_KEPT = "nothing is kept: run again from the beginning"
DATA_HELP = "the benchmarks' files, with their glm46-data.yaml; not needed where the suite makes its items"


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE.gguf|ALIAS|VERSION|URL",
            help="a Hugging Face directory, a GGUF file, a registered version, or a server with OpenAI's API",
        ),
    ],
    suite: Annotated[str, typer.Option(metavar="NAME|FILE.yaml", help="likelihood, answers, smoke, ...")] = "smoke",
    data: Annotated[str | None, typer.Option(metavar=ADDRESS, help=DATA_HELP)] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="a new file; every item's outcome is written beside it")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="at most so many items per benchmark, always the same ones")
    ] = None,
    scale: Annotated[str, typer.Option(help="the scale of a registered version")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu or cuda, for a checkpoint or version")] = "cpu",
    model: Annotated[str, typer.Option(help="the model's name on a server that has several")] = "",
    api_key_env: Annotated[str, typer.Option(help="the environment variable that holds the server's key")] = "",
    concurrency: CONCURRENCY = NUM_CONCURRENT,
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Evaluate a model by a suite of benchmarks."""
    with usage_errors():
        from flows.cli.serving.evaluate_target import Wanted, ask, evaluate_target, find_target, new_output
        from infra.home import open_home
        from infra.serving.kept_answers import kept_until_done
        from tasks.report.published_figures import quoted_table

        if output is None:
            raise ValueError("name --output, a new file")
        home = open_home()
        output = new_output(output)
        found = find_target(target, home, scale, store)
        asked, advice = ask(suite, data, limit), NOTHING_KEPT if found.checkpoint_dir else CONTINUE
    with failures(home, output.absolute().parent), interruptible(home, advice), kept_until_done(output) as answers_path:
        wanted = Wanted(found, asked, output, device, model, api_key_env, concurrency, answers_path)
        result = evaluate_target(wanted, home)
        quoted = quoted_table([benchmark.name for benchmark in result.benchmarks])
        print(result.model_dump_json() if as_json else "\n\n".join(filter(None, (result.describe(), quoted))))


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="as TARGET of glm46 eval, or FILE.json of one of its results")
    ],
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="likewise; differences are B minus A. Left out: the formats of the registered version A, as its "
            "release measured them, and how fast each answers here",
        ),
    ] = None,
    suite: Annotated[str, typer.Option(metavar="NAME|FILE.yaml", help="likelihood, answers, smoke, ...")] = "smoke",
    data: Annotated[str | None, typer.Option(metavar=ADDRESS, help=DATA_HELP)] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE.json", help="a new file for the table's figures")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="at most so many items per benchmark")] = None,
    scale: Annotated[str, typer.Option(help="the scale of registered versions")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu or cuda, for checkpoints and versions")] = "cpu",
    model: Annotated[
        str, typer.Option(help="the model's name on a server that has several; OF_A,OF_B where they differ")
    ] = "",
    api_key_env: Annotated[
        str, typer.Option(help="the environment variable that holds a server's key; OF_A,OF_B where they differ")
    ] = "",
    concurrency: CONCURRENCY = NUM_CONCURRENT,
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Compare two models on the same items: size, speed, benchmarks with paired intervals, experts."""
    with usage_errors():
        from flows.cli.serving.compare_formats import compare_formats, measured_formats
        from flows.cli.serving.compare_targets import compare_files, compare_targets, of_both, write_comparison
        from flows.cli.serving.evaluate_target import ask, find_target
        from infra.home import open_home
        from infra.serving.kept_answers import kept_until_done

        home, advice = open_home(), NOTHING_KEPT
        if output is not None and (output.exists() or not output.absolute().parent.is_dir()):
            raise ValueError(f"--output {output} must be a new file in a directory that exists")
        of_files = [each for each in (first, second) if each is not None and each.endswith(".json")]
        if second is None:
            compare_formats(first, home, scale, store)  # refuses a wrong name before servers start
        elif len(of_files) == 1:
            raise ValueError(f"{of_files[0]} is a result: compare it with another result, or name two models")
        elif of_files:
            comparison = compare_files(Path(first), Path(second))
        else:
            targets = (find_target(first, home, scale, store), find_target(second, home, scale, store))
            models, keys = of_both(model, "--model"), of_both(api_key_env, "--api-key-env")
            asked = ask(suite, data, limit)
            advice = CONTINUE if output and any(not target.checkpoint_dir for target in targets) else NOTHING_KEPT
    directory = home.root if output is None else output.absolute().parent
    with failures(home, directory), interruptible(home, advice), kept_until_done(output) as answers_path:
        if second is None:
            comparison = measured_formats(first, home, scale, store)
        elif not of_files:
            comparison = compare_targets(targets, asked, home, device, models, keys, concurrency, answers_path)
        if output is not None:
            write_comparison(output, comparison)
        print(comparison.model_dump_json() if as_json else comparison.describe())
