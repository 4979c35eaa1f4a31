"""Serves a registered version on this machine with llama.cpp; what `glm46 chat` and `glm46 serve` use. No pipeline server is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from configs.load import load_scale
from infra.home import Home
from infra.model_registry import GGUF_TAG, model_name, open_registry, resolve_alias
from infra.model_server import SERVED_TYPE, ModelServer, running_model_server
from infra.store import open_store
from tasks.release.convert_to_gguf import GgufFiles


@dataclass(frozen=True)
class ServedModel:
    """A server that answers, and what it serves."""

    name: str
    url: str
    server: ModelServer

    def wait(self) -> None:
        """Block until the server ends."""
        self.server.process.wait()


@contextmanager
def served_model(home: Home, scale: str, alias: str, store_uri: str | None, port: int | None) -> Iterator[ServedModel]:
    """A server of the version that an alias names, for the length of the block. `port` None takes a free one.

    Raises ValueError where nothing has that alias.
    """
    configuration = load_scale(scale)
    name = model_name(configuration.scale)
    version = resolve_alias(open_registry(home), name, alias)
    if version is None:
        raise ValueError(f"no version of model {name} has the alias {alias} under {home.root}: run `glm46 run {scale}` first")
    store = open_store(store_uri, home)
    gguf = store.load(version.tag(GGUF_TAG), GgufFiles)
    path = gguf.path(gguf.record.file_names[SERVED_TYPE])
    resources = configuration.serving.resources.model_copy(update={"port": port or 0})
    with running_model_server(path, resources, home.run_dir / f"serve-{configuration.scale}.log", alias=name) as server:
        yield ServedModel(f"{name} version {version.version} ({alias})", server.url, server)


def complete(served: ServedModel, prompt: str, max_tokens: int, temperature: float) -> Iterator[str]:
    """Pieces of the model's continuation of a prompt, as they are generated. These weights have seen no chat template yet."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model=served.name.split()[0], prompt=prompt, max_tokens=max_tokens, temperature=temperature, stream=True
    )
    for chunk in stream:
        if chunk.choices:
            yield chunk.choices[0].text
