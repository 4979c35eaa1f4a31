"""The commands of glm46 that take a model from disk, the Hub or a server: convert, generate, fetch, profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.command_errors import failures, usage_errors
from flows.cli.options import JSON, STORE

if TYPE_CHECKING:
    from infra.home import Home

MODEL = Annotated[
    str,
    typer.Argument(
        metavar="DIR|ALIAS|VERSION|hf://OWNER/NAME", help="a checkpoint's directory, a registered version, or a model"
    ),
]
SCALE_OF_VERSION = Annotated[str, typer.Option(help="the scale of a registered version")]


def convert(
    source: MODEL,
    target: Annotated[Path, typer.Argument(metavar="DST", help="a new directory, or FILE.gguf")],
    to: Annotated[Literal["hf", "gguf", "native", "megatron"], typer.Option(help="the format")],
    mtp_layout: Annotated[
        Literal["4.6", "4.5"], typer.Option(help="of hf: 4.5 repeats embedding and head in the MTP layer")
    ] = "4.6",
    gguf_type: Annotated[Literal["F32", "BF16", "F16", "Q8_0"], typer.Option(help="of the matrices")] = "BF16",
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="adapter/ of a phase that started from SOURCE: merge it in")
    ] = None,
    scale: SCALE_OF_VERSION = "tiny",
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Convert a checkpoint tensor by tensor, read it back, and write what was found beside it: DST.conversion.json."""
    with usage_errors():
        from infra.home import known_home
        from tasks.release.checkpoint_source import open_source
        from tasks.release.convert_checkpoint import convert_checkpoint, merge_adapter, refuse_target, refuse_unsuitable

        home = known_home()
        refuse_target(target, to)
        opened = open_source(model_dir(source, home, scale, store))
        opened = opened if adapter is None else merge_adapter(opened, adapter)
        refuse_unsuitable(opened, to, mtp_layout)
    with failures(home, target.absolute().parent):
        card = convert_checkpoint(opened, target, to, mtp_layout=mtp_layout, gguf_type=gguf_type)
        print(card.model_dump_json() if as_json else card.describe(target))


def generate(
    source: MODEL,
    prompt: Annotated[str, typer.Option(help="a text to continue; a message where the model has a chat template")],
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens of the answer")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="whether the model reasons first; by default a version as `glm46 chat` asks it, another model not",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    scale: SCALE_OF_VERSION = "tiny",
    store: STORE = None,
) -> None:
    """Answer a prompt by the engine of this project, token by token, without a server."""
    with usage_errors():
        from infra.home import known_home
        from tasks.release.generate_text import generate_text

        home = known_home()
        directory = model_dir(source, home, scale, store)
        reasons = _reasons_in_chats(source, scale) if thinking is None else thinking
        pieces = generate_text(directory, prompt, max_tokens, temperature, seed, reasons, device)
    with failures(home):
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


def fetch(
    source: Annotated[str, typer.Argument(metavar="hf://OWNER/NAME[@REVISION]", help="a model of the Hub")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="a new directory")],
) -> None:
    """Fetch a GLM-4.5 or 4.6 checkpoint from the Hub into a directory, with its tensors accounted for."""
    with usage_errors():
        from infra.home import known_home
        from model.formats.hf_checkpoint import read_config
        from tasks.release.checkpoint_source import open_source
        from tasks.training.fetch_checkpoint import copy_model, fetch_model

        home = known_home()
        if target.exists() or not target.absolute().parent.is_dir():
            raise ValueError(f"{target} must be a new directory in one that exists")
        fetched = fetch_model(source, read_config)
        open_source(fetched)
    with failures(home, target.absolute().parent):
        copy_model(fetched, target)
        print(target)


def profile(
    target: Annotated[
        str, typer.Argument(metavar="URL|ALIAS", help="a server with OpenAI's API, or a version, which is served here")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="a new directory for profile.json and profile.html")],
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="requests at a time, one measurement each")
    ] = "1,2,4,8,16,32,64",
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of each answer")] = 32,
    scale: SCALE_OF_VERSION = "tiny",
    model: Annotated[str, typer.Option(help="the model's name on a server that has several")] = "",
    api_key_env: Annotated[str, typer.Option(help="the environment variable that holds the server's key")] = "",
    store: STORE = None,
    as_json: JSON = False,
) -> None:
    """Measure a server: time to first token, between tokens, throughput; of a version also memory and drafts."""
    with usage_errors():
        from flows.cli.serving.profile_target import parse_levels, profile_target
        from infra.home import open_home

        home, levels = open_home(), parse_levels(concurrency)
        if output.exists() or not output.absolute().parent.is_dir():
            raise ValueError(f"--output {output} must be a new directory in one that exists")
    with failures(home, output.absolute().parent):
        measured = profile_target(target, home, scale, store, levels, max_tokens, model, api_key_env, output)
        print(measured.model_dump_json() if as_json else measured.describe())


def _reasons_in_chats(source: str, scale: str) -> bool:
    """Whether `glm46 chat` lets this model reason: a registered version does what its scale evaluates."""
    from configs.load import load_scale
    from tasks.data.readers.source_bytes import HUGGING_FACE

    is_version = not source.startswith(HUGGING_FACE) and not Path(source).is_dir()
    return is_version and load_scale(scale).evaluation.recipe.enable_thinking


def model_dir(source: str, home: Home, scale: str, store: str | None) -> Path:
    """The directory of a model that the user named. Raises ValueError where there is none."""
    from flows.cli.serving.evaluate_target import find_target
    from tasks.data.readers.source_bytes import HUGGING_FACE

    if source.startswith(HUGGING_FACE):
        from model.formats.hf_checkpoint import read_config
        from tasks.training.fetch_checkpoint import fetch_model

        return fetch_model(source, read_config)
    found = find_target(source, home, scale, store).checkpoint_dir
    if found is None:
        raise ValueError(f"{source} is no checkpoint: name a directory, a registered version, or hf://owner/name")
    return found
