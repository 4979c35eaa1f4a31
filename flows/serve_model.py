"""Serves a registered version on this machine with llama.cpp; what `glm46 chat` and `glm46 serve` use. No pipeline server is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from configs.load import load_scale
from infra.home import Home
from infra.model_registry import CHAT_TAG, GGUF_TAG, model_name, open_registry, resolve_alias
from infra.model_server import SERVED_TYPE, ModelServer, running_model_server
from infra.store import open_store
from tasks.release.convert_to_gguf import GgufFiles


@dataclass(frozen=True)
class ServedModel:
    """A server that answers, and what it serves."""

    name: str
    url: str
    server: ModelServer
    is_chat_trained: bool
    """Whether it knows the chat template; else it continues text."""
    enable_thinking: bool
    """Whether it is asked to reason before it answers: as in its evaluation."""

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
        yield ServedModel(
            f"{name} version {version.version} ({alias})", server.url, server, is_chat_trained=version.tag(CHAT_TAG) == "true",
            enable_thinking=configuration.evaluation.recipe.enable_thinking,
        )  # fmt: skip


def complete(served: ServedModel, prompt: str, max_tokens: int, temperature: float) -> Iterator[str]:
    """Pieces of the answer, as they are generated: to a message where the model was trained on conversations, else a continuation."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    name = served.name.split()[0]
    if not served.is_chat_trained:
        pieces = client.completions.create(model=name, prompt=prompt, max_tokens=max_tokens, temperature=temperature, stream=True)
        yield from (chunk.choices[0].text for chunk in pieces if chunk.choices)
        return
    chunks = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=temperature, stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": served.enable_thinking}},
    )  # fmt: skip
    yield from (chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
