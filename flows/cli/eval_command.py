"""The command `glm46 eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import failures, usage_errors
from flows.cli.options import ADDRESS, JSON, STORE


def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|FILE.gguf|ALIAS|VERSION|URL",
            help="a Hugging Face directory, a GGUF file, a registered version, or a server with OpenAI's API",
        ),
    ] = None,
    suite: Annotated[str, typer.Option(metavar="NAME|FILE.yaml", help="likelihood, answers, smoke, ...")] = "smoke",
    data: Annotated[
        str | None, typer.Option(metavar=ADDRESS, help="the benchmarks' files, with their glm46-data.yaml")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="a new file; every item's outcome is written beside it")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="at most so many items per benchmark, always the same ones")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="compare two results item by item, B minus A"),
    ] = None,
    scale: Annotated[str, typer.Option(help="the scale of a registered version")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu or cuda, for a checkpoint or version")] = "cpu",
    model: Annotated[str, typer.Option(help="the model's name on a server that has several")] = "",
    api_key_env: Annotated[str, typer.Option(help="the environment variable that holds the server's key")] = "",
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Evaluate a model by a suite of benchmarks, or compare two results."""
    if compare is not None:
        _compare(target, compare, as_json)
        return
    with usage_errors():
        from flows.cli.serving.evaluate_target import Wanted, ask, evaluate_target, find_target, new_output
        from infra.home import open_home

        if target is None or data is None or output is None:
            raise ValueError("name a TARGET, --data and --output, or two results with --compare")
        home = open_home()
        output = new_output(output)
        found = find_target(target, home, scale, store)
        wanted = Wanted(found, ask(suite, data, limit), output, device, model, api_key_env)
    with failures(home, output.absolute().parent):
        result = evaluate_target(wanted, home)
        print(result.model_dump_json() if as_json else result.describe())


def _compare(target: str | None, paths: tuple[Path, Path], as_json: bool) -> None:
    with usage_errors():
        from tasks.evaluation.benchmarks.suite_results import compare_results, describe_differences

        if target is not None:
            raise ValueError(f"--compare takes two results and no TARGET ({target}): remove it")
        differences = compare_results(*paths)
        if as_json:
            print("[" + ",".join(each.model_dump_json() for each in differences) + "]")
        else:
            print(describe_differences(differences))
