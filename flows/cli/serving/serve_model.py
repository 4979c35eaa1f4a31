"""Serves a registered version on this machine with llama.cpp, for `glm46 chat` and `glm46 profile`; no pipeline server
is started. What `glm46 serve` needs of a version is here too."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.schema import ConversionRecipe, ReleaseRecipe, Scale, served_gguf_type
from flows.running.computation import Computation
from infra.home import Home
from infra.registry.model_registry import (
    CHAT_TAG,
    GGUF_TAG,
    QUANTIZED_TAG,
    RegisteredVersion,
    describe_aliases,
    model_name,
    open_registry,
    resolve_alias,
)
from infra.serving.model_server import OWN_USE, Access, ModelServer, running_model_server
from infra.step import Artifact, Progress
from infra.storage.store import Store
from tasks.release.convert_to_gguf import GgufFiles, convert_to_gguf
from tasks.release.quantize_checkpoint import QuantizedCheckpoint
from tasks.training.state.trained_checkpoint import TrainedCheckpoint


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
    name, log_path = model_name(scale.scale), home.run_dir / f"serve-{scale.scale}.log"
    with running_model_server(served_path(store, version, scale), resources, log_path, name, access) as server:
        yield ServedModel(
            f"{name} version {version.version}",
            server.url,
            server,
            is_chat_trained=version.tag(CHAT_TAG) == "true",
            enable_thinking=scale.evaluation.recipe.enable_thinking,
        )


def served_path(store: Store, version: RegisteredVersion, scale: Scale, gguf_type: str = "") -> Path:
    """The file of a type, verified; by default the one that is served. Raises ValueError for a type that the version
    does not have."""
    gguf = _gguf_files(store, version, scale.release.recipe)
    gguf_type = gguf_type or served_gguf_type(gguf.record.file_names)
    if gguf_type not in gguf.record.file_names:
        raise ValueError(_lacking(version, gguf_type, "llamacpp", gguf.record.file_names))
    return gguf.path(gguf.record.file_names[gguf_type])


def served_directory(store: Store, version: RegisteredVersion, quantized_format: str | None) -> Path:
    """The directory that vLLM or SGLang serves, verified: the checkpoint, or a quantized one of the release. Raises
    ValueError for a format that the version does not have."""
    if quantized_format is None:
        return store.load(version.key, TrainedCheckpoint).directory("hf")
    key = version.tags.get(f"{QUANTIZED_TAG}{quantized_format}")
    if key is None:
        names = [tag.removeprefix(QUANTIZED_TAG) for tag in sorted(version.tags) if tag.startswith(QUANTIZED_TAG)]
        raise ValueError(_lacking(version, quantized_format, "vllm and sglang", names))
    return store.load(key, QuantizedCheckpoint).directory("hf")


def _lacking(version: RegisteredVersion, asked: str, engines: str, names: Iterable[str]) -> str:
    return (
        f"version {version.version} has no files in format {asked} for {engines}: name one of "
        f"{', '.join(names) or 'none, since it was not released'}, or leave --format out"
    )


def _gguf_files(store: Store, version: RegisteredVersion, recipe: ReleaseRecipe) -> Artifact[GgufFiles]:
    """The version's GGUF files: those of the release, or for another phase the one that is served, converted
    here, once."""
    if GGUF_TAG in version.tags:
        return store.load(version.tag(GGUF_TAG), GgufFiles)
    checkpoint = store.load(version.key, TrainedCheckpoint)

    def report(part: str, progress: Progress) -> None:
        print(f"converting version {version.version} to GGUF: {progress.message}", file=sys.stderr)

    served = ConversionRecipe(gguf_types=(served_gguf_type(recipe.gguf_types),))
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
