"""Looks up versions in the model registry: one by its name or alias, or all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.registry.format_versions import FORMAT_TAG
from infra.registry.model_registry import RegisteredVersion, resolve_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel


@dataclass(frozen=True)
class NamedVersion:
    """A version under the names by which people know it."""

    model: str
    aliases: tuple[str, ...]
    registered: RegisteredVersion


def named_version(client: MlflowClient, model: str, name: str) -> NamedVersion:
    """The version of a model that an alias or a version number names. Raises ValueError with the names there are."""
    known = [each for each in all_versions(client) if each.model == model]
    if not known:
        models = sorted({each.model for each in all_versions(client)})
        raise ValueError(
            f"the registry holds no version of {model}; it holds {', '.join(models) or 'none at all'}: name a scale "
            f"that was run"
        )
    pointed = resolve_alias(client, model, name)
    wanted = name if pointed is None else pointed.version
    for each in known:
        if each.registered.version == wanted:
            return each
    names = [" = ".join((each.registered.version, *each.aliases)) for each in known]
    raise ValueError(f"{model} has no version or alias {name}; it has {'; '.join(names)}")


def all_versions(client: MlflowClient) -> list[NamedVersion]:
    """Every version of every model that glm46 registered, by model and number, without the formats of releases."""
    versions = []
    for model in _registered_models(client):
        if FORMAT_TAG in model.tags:
            continue
        aliases = {alias: str(version) for alias, version in client.get_registered_model(model.name).aliases.items()}
        for item in client.search_model_versions(f"name = '{model.name}'"):
            own = tuple(sorted(alias for alias, version in aliases.items() if version == str(item.version)))
            versions.append(NamedVersion(model.name, own, RegisteredVersion(str(item.version), dict(item.tags))))
    return sorted(versions, key=lambda version: (version.model, int(version.registered.version)))


def _registered_models(client: MlflowClient) -> Iterator[RegisteredModel]:
    """Of all pages: MLflow gives a hundred models at a time."""
    page = client.search_registered_models()
    yield from page
    while page.token:
        page = client.search_registered_models(page_token=page.token)
        yield from page
