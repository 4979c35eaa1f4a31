"""Serves a registered version, or a GGUF file, on this machine with llama.cpp, for `glm46 chat` and `glm46 serve`.

No pipeline server is started. `glm46 serve` follows its alias: where a promotion or a rollback moves it, the server is
replaced on the same port.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from configs.schema import ReleaseRecipe, Scale, ServingResources
from flows.running.computation import Computation
from infra.home import Home
from infra.registry.model_registry import (
    CHAT_TAG,
    GGUF_TAG,
    RegisteredVersion,
    describe_aliases,
    model_name,
    open_registry,
    resolve_alias,
)
from infra.serving.model_server import OWN_USE, SERVED_TYPE, Access, ModelServer, running_model_server
from infra.step import Artifact, Progress
from infra.storage.store import Store
from tasks.release.convert_to_gguf import GgufFiles, convert_to_gguf
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

ALIAS_SECONDS = 1.0
"""Seconds between two looks at the alias that is served."""


@dataclass(frozen=True)
class ServedModel:
    """A server that answers, and what it serves."""

    name: str
    url: str
    server: ModelServer
    is_chat_trained: bool
    """Whether it knows the chat template; else it continues text."""
    enable_thinking: bool
    """Whether it is asked to reason before it answers, as in its evaluation."""

    def wait(self, seconds: float) -> None:
        """Block for a time. Raises RuntimeError when the server ends by itself."""
        try:
            code = self.server.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RuntimeError(f"the model server {how}; its log is {self.server.log_path}. Start it again")


def find_version(home: Home, scale: Scale, alias: str) -> RegisteredVersion:
    """The version of a scale's model that an alias names. Raises ValueError where no version has that alias."""
    name, client = model_name(scale.scale), open_registry(home)
    version = resolve_alias(client, name, alias)
    if version is None:
        raise ValueError(
            f"no version of model {name} has the alias {alias} under {home.root} ({describe_aliases(client, name)}): "
            f"name one of them, "
            f"or run `glm46 run {scale.scale}`"
        )
    return version


@contextmanager
def served_model(
    home: Home, scale: Scale, version: RegisteredVersion, store: Store, port: int | None, access: Access = OWN_USE
) -> Iterator[ServedModel]:
    """A server of a registered version, for the length of the block. `port` None takes a free one."""
    resources = scale.serving.resources.model_copy(update={"port": port or 0})
    with _serving(home, scale, version, _served_path(store, version, scale), resources, access) as served:
        yield served


def serve_file(home: Home, gguf_path: Path, resources: ServingResources, access: Access) -> NoReturn:
    """Serve a GGUF file under its name until interrupted."""
    name = gguf_path.stem
    with running_model_server(gguf_path, resources, home.run_dir / f"serve-{name}.log", name, access) as server:
        print(f"{name} at {server.url}/v1 (Ctrl-C ends it)", flush=True)
        served = ServedModel(name, server.url, server, is_chat_trained=True, enable_thinking=True)
        while True:
            served.wait(ALIAS_SECONDS)


def serve_alias(
    home: Home, scale: Scale, alias: str, store: Store, resources: ServingResources, access: Access
) -> NoReturn:
    """Serve the version that an alias names until interrupted, and at the same address what it names after a move.

    The next version's file is read and verified while the version before it still answers. Requests that are being
    answered when the server is replaced are cut off.
    """
    version = find_version(home, scale, alias)
    path = _served_path(store, version, scale)
    while True:
        with _serving(home, scale, version, path, resources, access) as served:
            resources = resources.model_copy(update={"port": int(served.url.rpartition(":")[2])})
            print(f"{served.name} ({alias}) at {served.url}/v1 (Ctrl-C ends it)", flush=True)
            version = _next_version(home, scale, alias, served, version)
            path = _served_path(store, version, scale)


def _next_version(
    home: Home, scale: Scale, alias: str, served: ServedModel, version: RegisteredVersion
) -> RegisteredVersion:
    """Block until the alias names another version. While the registry does not answer, or the alias is gone, the
    version before is served, and the reason is printed once."""
    from mlflow.exceptions import MlflowException

    problem = ""
    while True:
        served.wait(ALIAS_SECONDS)
        try:
            named, found = find_version(home, scale, alias), ""
        except (ValueError, MlflowException) as error:
            named, found = version, f"version {version.version} is served still: {error}"
        if found not in ("", problem):
            print(found, file=sys.stderr, flush=True)
        problem = found
        if named.version != version.version:
            return named


@contextmanager
def _serving(
    home: Home, scale: Scale, version: RegisteredVersion, gguf_path: Path, resources: ServingResources, access: Access
) -> Iterator[ServedModel]:
    name, log_path = model_name(scale.scale), home.run_dir / f"serve-{scale.scale}.log"
    with running_model_server(gguf_path, resources, log_path, name, access) as server:
        yield ServedModel(
            f"{name} version {version.version}",
            server.url,
            server,
            is_chat_trained=version.tag(CHAT_TAG) == "true",
            enable_thinking=scale.evaluation.recipe.enable_thinking,
        )


def _served_path(store: Store, version: RegisteredVersion, scale: Scale) -> Path:
    """The file that is served, verified."""
    gguf = _gguf_files(store, version, scale.release.recipe)
    return gguf.path(gguf.record.file_names[SERVED_TYPE])


def _gguf_files(store: Store, version: RegisteredVersion, recipe: ReleaseRecipe) -> Artifact[GgufFiles]:
    """The version's GGUF files: those of the release, or for another phase the one that is served, converted
    here, once."""
    if GGUF_TAG in version.tags:
        return store.load(version.tag(GGUF_TAG), GgufFiles)
    checkpoint = store.load(version.key, TrainedCheckpoint)

    def report(part: str, progress: Progress) -> None:
        print(f"converting version {version.version} to GGUF: {progress.message}", file=sys.stderr)

    served = recipe.model_copy(update={"gguf_types": (SERVED_TYPE,)})
    gguf, _ = Computation(convert_to_gguf, {"checkpoint": checkpoint}, served).find_or_run(store, report, print)
    return gguf


def complete(served: ServedModel, prompt: str, max_tokens: int, temperature: float) -> Iterator[str]:
    """Pieces of the answer as they are generated. A model that was trained on conversations answers a message; another
    continues the text."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    name = served.name.split()[0]
    if not served.is_chat_trained:
        pieces = client.completions.create(
            model=name, prompt=prompt, max_tokens=max_tokens, temperature=temperature, stream=True
        )
        yield from (chunk.choices[0].text for chunk in pieces if chunk.choices)
        return
    chunks = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=temperature,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": served.enable_thinking}},
    )
    yield from (chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
