"""The llama.cpp server of xllamacpp, OpenAI-compatible, in a process of its own.

    python -m infra.serving.model_server MODEL.gguf --host 127.0.0.1 --port 8080 --context-length 1024
        --num-threads 2 --num-slots 1 --alias glm46

The process ends when its standard input closes. So no server outlives the process that started it, even if that was
killed. (A parent-death signal would follow the starting thread, which ends early in a flow.)
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.child_process import free_port, take_port
from infra.code_digest import ROOT

if TYPE_CHECKING:
    from configs.schema import ServingResources

LOOPBACK = ("127.0.0.1", "localhost")
EVERY_INTERFACE = "0.0.0.0"
KEY_VARIABLE = "GLM46_MODEL_SERVER_KEY"
"""By which the process gets the key of its clients: other users of the machine can read a command line."""
STOP_SECONDS = 15
"""Seconds that a server gets to end by itself."""
MODEL_ALIAS = "glm46"
"""The name under which a served model answers when none is given."""


@dataclass(frozen=True)
class Access:
    """Who may ask a server, and how many at a time."""

    api_key: str = ""
    """What every request must send as a bearer token. Empty: none, and only programs of this machine are answered."""
    num_slots: int = 1
    """Requests that are computed at the same time, each with the whole context length; further ones wait."""
    is_drafting: bool = False
    """Whether the MTP layer drafts a token after each: the same tokens, in fewer passes. For files with that layer."""


OWN_USE = Access()
"""Of the programs of this project on this machine."""


@dataclass(frozen=True)
class ModelServer:
    """A server that has answered /health."""

    url: str
    """Without a trailing slash; the OpenAI API is below /v1."""
    process: subprocess.Popen[bytes]
    log_path: Path


def start_model_server(
    gguf_path: Path, resources: ServingResources, log_path: Path, alias: str = MODEL_ALIAS, access: Access = OWN_USE
) -> ModelServer:
    """Start a server and wait until it answers; `port` 0 takes a free one.

    Raises ValueError for a port in use, a host that is not loopback without a key, a missing file, or drafts of one
    without an MTP layer, RuntimeError with the log's end when the server stops or does not answer.
    """
    refuse_open_host(resources.host, access.api_key)
    if not gguf_path.is_file():
        raise ValueError(f"{gguf_path} does not exist: give a GGUF file, as a finished run leaves one")
    if access.is_drafting and not _has_mtp_layer(gguf_path):
        raise ValueError(f"{gguf_path} has no MTP layer to draft with: write it again, or leave --drafts out")
    port = take_port(resources.port, resources.host) if resources.port else free_port(resources.host)
    command = server_command(
        str(gguf_path),
        resources.host,
        port,
        resources.context_length,
        resources.num_threads,
        access.num_slots,
        alias,
        is_drafting=access.is_drafting,
    )
    environment = {KEY_VARIABLE: access.api_key}
    return start_server(command, resources.host, port, log_path, resources.startup_timeout_seconds, environment)


def server_command(
    gguf_path: str,
    host: str,
    port: int,
    context_length: int,
    num_threads: int,
    num_slots: int,
    alias: str,
    *,
    is_drafting: bool,
) -> list[str]:
    """The command line of the server process."""
    return [
        sys.executable,
        "-m",
        "infra.serving.model_server",
        gguf_path,
        "--host",
        host,
        "--port",
        str(port),
        "--context-length",
        str(context_length),
        "--num-threads",
        str(num_threads),
        "--num-slots",
        str(num_slots),
        "--alias",
        alias,
        *(["--is-drafting"] if is_drafting else []),
    ]


def refuse_open_host(host: str, api_key: str) -> None:
    """Raises ValueError where other machines reach a server that asks for no key."""
    if host not in LOOPBACK and not api_key:
        raise ValueError(
            f"other machines reach a server at {host}, so its clients need a key: name the environment variable that "
            f"holds it with --api-key-env, or serve at {LOOPBACK[0]}"
        )


def start_server(
    command: list[str], host: str, port: int, log_path: Path, timeout_seconds: float, environment: Mapping[str, str]
) -> ModelServer:
    """Start a process that listens at host and port and ends when its standard input closes, and wait until it answers
    /health. Raises RuntimeError with the log's end when it stops or does not answer."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **environment}
        )
    reached = LOOPBACK[0] if host == EVERY_INTERFACE else host
    server = ModelServer(f"http://{reached}:{port}", process, log_path)
    try:
        _wait_until_healthy(server, timeout_seconds)
    except BaseException:
        stop_model_server(server)
        raise
    return server


def _has_mtp_layer(gguf_path: Path) -> bool:
    from gguf import GGUFReader

    fields = GGUFReader(gguf_path).fields
    return any(name.endswith(".nextn_predict_layers") and field.contents() for name, field in fields.items())


def stop_model_server(server: ModelServer) -> None:
    """End the server; nothing happens where it has ended already."""
    assert server.process.stdin is not None
    server.process.stdin.close()
    try:
        server.process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


@contextmanager
def running_model_server(
    gguf_path: Path, resources: ServingResources, log_path: Path, alias: str = MODEL_ALIAS, access: Access = OWN_USE
) -> Iterator[ModelServer]:
    """A server that runs for the length of a block."""
    server = start_model_server(gguf_path, resources, log_path, alias, access)
    try:
        yield server
    finally:
        stop_model_server(server)


def is_healthy(url: str) -> bool:
    """Whether the server at a URL has loaded its model and answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _wait_until_healthy(server: ModelServer, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not is_healthy(server.url):
        stopped = server.process.poll() is not None
        if stopped or time.monotonic() > deadline:
            last_lines = "\n".join(server.log_path.read_text(errors="replace").splitlines()[-8:])
            what = (
                "stopped"
                if stopped
                else f"did not answer within {timeout_seconds:g} s (of llamacpp: raise startup_timeout_seconds)"
            )
            raise RuntimeError(f"the model server at {server.url} {what}; the end of {server.log_path}:\n{last_lines}")
        time.sleep(0.05)


def serve(
    gguf_path: Path,
    host: str,
    port: int,
    context_length: int,
    num_threads: int,
    num_slots: int,
    alias: str,
    is_drafting: bool,
) -> None:
    """Serve until standard input closes."""
    import xllamacpp
    from aiohttp import web

    from infra.serving.model_gateway import gateway

    params = engine_settings(gguf_path, context_length, num_slots, alias, is_drafting)
    key, upstream_port = secrets.token_urlsafe(), free_port(LOOPBACK[0])
    params.hostnames, params.port, params.api_keys = [LOOPBACK[0]], upstream_port, [key]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    server = xllamacpp.Server(params)  # pyright: ignore[reportAttributeAccessIssue]
    app = gateway(server.listening_address, key, host, port, os.environ.pop(KEY_VARIABLE, ""), context_length)
    web.run_app(
        app,
        host=host,
        port=port,
        handler_cancellation=True,  # a client that has gone frees its slot, within a second
        print=lambda *_: print(f"serving {gguf_path.name} at {host}:{port}", flush=True),
    )


def engine_settings(gguf_path: Path, context_length: int, num_slots: int, alias: str, is_drafting: bool) -> Any:
    """llama.cpp's own record of what it is to serve and how it computes, an xllamacpp.CommonParams."""
    import xllamacpp

    params = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    params.model.path = str(gguf_path)
    params.model_alias = {alias}
    params.n_ctx, params.n_parallel = context_length * num_slots, num_slots
    # By default keys and values are kept in half precision, and on a CPU attention computes in it: that changes
    # log-probabilities by 2e-3 at tiny scale, more than Q8_0 weights do. Without it they equal our own to 1e-5.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # pyright: ignore[reportAttributeAccessIssue]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # pyright: ignore[reportAttributeAccessIssue]
    params.warmup = False
    if is_drafting:
        params.load_mtp = True
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]  # pyright: ignore[reportAttributeAccessIssue]
        params.speculative.draft.n_max, params.speculative.draft.p_min = 1, 0.0
    return params


def _exit_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    """Command line of the server process."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.serving.model_server", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("gguf_path", type=Path)
    parser.add_argument("--host", default=LOOPBACK[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--num-slots", type=int, default=1)
    parser.add_argument("--alias", default=MODEL_ALIAS)
    parser.add_argument("--is-drafting", action="store_true")
    serve(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
