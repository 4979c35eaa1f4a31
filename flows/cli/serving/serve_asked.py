"""Runs the server that `glm46 serve` was asked for until interrupted: llama.cpp, vLLM or SGLang.

A server of an alias follows it: where a promotion or a rollback moves it, the server is replaced on the same port.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import yaml

from flows.cli.serving.asked_server import Asked, PlacedModel
from flows.cli.serving.serve_model import find_version
from infra.home import private_file
from infra.registry.model_registry import RegisteredVersion, model_name
from infra.serving.engine_process import engine_port, running_engine
from infra.serving.model_server import Access, ModelServer, running_model_server
from tasks.serving.engine_command import KEY_VARIABLES, Place, engine_command, rollout_environment
from tasks.serving.planned_server import DIRECTORY_ENGINES

ALIAS_SECONDS = 1.0
"""Seconds between two looks at the alias that is served."""


def serve_given(asked: Asked) -> NoReturn:
    """Serve the checkpoint that was named, under its name."""
    placed = asked.given()
    name = placed.plan.model.name
    with _running(asked, placed, asked.port, name) as server:
        _announce(name, placed, server)
        while True:
            watch(server, ALIAS_SECONDS)


def serve_alias(asked: Asked) -> NoReturn:
    """Serve the version that an alias names, and at the same address what it names after a move.

    The next version's files are read and verified while the version before it still answers. Requests that are being
    answered when the server is replaced are cut off.
    """
    version, port = find_version(asked.home, asked.scale, asked.alias), asked.port
    placed = asked.of_version(version)
    while True:
        with _running(asked, placed, port, asked.scale.scale) as server:
            port = int(server.url.rpartition(":")[2])
            name = f"{model_name(asked.scale.scale)} version {version.version} ({asked.alias})"
            _announce(name, placed, server)
            version, placed = next_version(asked, server, version)


def _announce(name: str, placed: PlacedModel, server: ModelServer) -> None:
    page = "" if placed.plan.engine in DIRECTORY_ENGINES else f"a page to chat at {server.url}; "
    print(f"{name} at {server.url}/v1 ({page}Ctrl-C ends it)", flush=True)


def next_version(
    asked: Asked, server: ModelServer, version: RegisteredVersion
) -> tuple[RegisteredVersion, PlacedModel]:
    """Block until the alias names another version whose files are here. While the registry or the store does not
    answer, the alias is gone, or the next version cannot be served, the version before is, and the reason is printed
    once."""
    problem = ""
    while True:
        watch(server, ALIAS_SECONDS)
        try:
            named, found = find_version(asked.home, asked.scale, asked.alias), ""
            if named.version != version.version:
                return named, asked.of_version(named)
        except Exception as error:  # of MLflow, its database or the bucket: nothing of them ends a server that answers
            found = f"version {version.version} is served still: {error}"
        if found not in ("", problem):
            print(found, file=sys.stderr, flush=True)
        problem = found


def watch(server: ModelServer, seconds: float) -> None:
    """Block for a time. Raises RuntimeError when the server ends by itself."""
    try:
        code = server.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise RuntimeError(f"the model server {how}; its log is {server.log_path}. Start it again")


@contextmanager
def _running(asked: Asked, placed: PlacedModel, port: int, log_name: str) -> Iterator[ModelServer]:
    plan, log_path = placed.plan, asked.home.run_dir / f"serve-{log_name}.log"
    if plan.engine not in DIRECTORY_ENGINES:
        changed = {"host": asked.host, "port": port, "context_length": plan.context}
        resources = asked.resources.model_copy(update=changed)
        access = Access(asked.key, plan.num_slots, plan.is_drafting)
        with running_model_server(placed.path, resources, log_path, plan.model.name, access) as server:
            yield server
        return
    port = engine_port(asked.host, port, asked.key)
    with _key_file(asked, log_path.with_suffix(".yaml")) as key_file:
        command = engine_command(plan, Place(str(placed.path), asked.host, port, key_file=key_file))
        environment = {KEY_VARIABLES["vllm"]: asked.key if plan.engine == "vllm" else ""}
        environment |= rollout_environment(plan)
        with running_engine(command, asked.host, port, log_path, environment) as server:
            yield server


@contextmanager
def _key_file(asked: Asked, path: Path) -> Iterator[str]:
    """SGLang's settings with the key, for as long as it runs; empty where there is no key or for another engine."""
    if asked.wishes.engine != "sglang" or not asked.key:
        yield ""
        return
    try:
        private_file(path).write_text(yaml.safe_dump({"api-key": asked.key}), encoding="utf-8")
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
