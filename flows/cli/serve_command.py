"""The command `glm46 serve`: plans a server, and prints, writes or runs it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command_errors import failures, usage_errors
from flows.cli.options import STORE

COUNT = typer.Option(min=1, help="of vllm and sglang; by default what fits and suits the scenario")
CHECKPOINT = Annotated[Path | None, typer.Option(metavar="FILE.gguf|DIR", help="serve this instead of a version")]
SCENARIO = Annotated[
    str | None,
    typer.Option(metavar="high_throughput|balanced|low_latency", help="by default balanced; llamacpp: one slot"),
]
HARDWARE = Annotated[
    str | None, typer.Option(metavar="8xH100|...|FILE.yaml", help="plan for this; by default this machine")
]
FORMAT = Annotated[
    str | None,
    typer.Option("--format", metavar="Q4_K_M|FP8_EXPERTS|...", help="which files of the release; by default exact"),
]
HOST = Annotated[
    str | None, typer.Option(help="the address to listen at, by default 127.0.0.1; off loopback with a key only")
]
KEY_NAME = Annotated[
    str, typer.Option(metavar="NAME", help="the environment variable that holds the key of the clients")
]
ROLLOUTS = Annotated[
    bool, typer.Option("--rollouts", help="of vllm and sglang: a policy phase gives it weights and asks for tokens")
]
ROUTES = Annotated[
    bool, typer.Option("--routes", help="with --rollouts: answers name their tokens' experts, for `routes`")
]
CONFIG = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="options as S0's inference_production.yaml")]


def serve(
    scale: Annotated[str, typer.Option(help="the scale of the model")] = "tiny",
    alias: Annotated[str, typer.Option(help="which version: champion, a phase's name, ...")] = "champion",
    checkpoint: CHECKPOINT = None,
    engine: Annotated[str | None, typer.Option(metavar="llamacpp|vllm|sglang", help="by default llamacpp")] = None,
    scenario: SCENARIO = None,
    hardware: HARDWARE = None,
    tp: Annotated[int | None, COUNT] = None,
    pp: Annotated[int | None, COUNT] = None,
    dp: Annotated[int | None, COUNT] = None,
    ep: Annotated[int | None, COUNT] = None,
    quantization: Annotated[str | None, typer.Option(metavar="fp8", help="round while loading")] = None,
    file_format: FORMAT = None,
    host: HOST = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="by default 8000; 0 takes a free one")] = None,
    api_key_env: KEY_NAME = "",
    slots: Annotated[
        int | None, typer.Option(min=1, help="requests computed at the same time; further ones wait")
    ] = None,
    drafts: Annotated[
        bool | None, typer.Option("--drafts/--no-drafts", help="the MTP layer drafts: same answers, fewer passes")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="of a request and its answer; by default the scale's, or the model's")
    ] = None,
    rollouts: ROLLOUTS = False,
    routes: ROUTES = False,
    config: CONFIG = None,
    is_printed: Annotated[bool, typer.Option("--print", help="print the command and the sum, start nothing")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write script, container and manifests, start nothing")
    ] = None,
    store: STORE = None,
) -> None:
    """Serve a model, by default the promoted one, with an OpenAI-compatible API until interrupted. It follows its
    alias, for example after `glm46 rollback`."""
    with usage_errors():
        from flows.cli.serving.asked_server import Options, ask, refuse_what_cannot_start
        from flows.cli.serving.serve_asked import serve_alias, serve_given
        from flows.cli.serving.show_plan import print_plan, write_plan
        from infra.home import open_home

        layout, limits = (tp, pp, dp, ep, quantization), (slots, drafts, context)
        options = Options(engine, scenario, hardware, *layout, host, port, *limits, checkpoint, file_format)
        home = open_home()
        asked = ask(options, config, home, scale, alias, api_key_env, store, rollouts=rollouts, routes=routes)
        if is_printed:
            print_plan(asked)
        if write is not None:
            write_plan(asked, write)
        if is_printed or write is not None:
            return
        refuse_what_cannot_start(asked)
    with failures(home), suppress(KeyboardInterrupt):
        if asked.checkpoint is not None:
            serve_given(asked)
        serve_alias(asked)
