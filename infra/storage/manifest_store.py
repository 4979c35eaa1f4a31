"""The manifests of a store: `manifests/<key>.json`; `<key>.1.json` and so on where the one before became invalid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from infra.step import FileEntry, Manifest, digest_of
from infra.storage.manifest_listing import join_manifest, split_manifest
from infra.storage.object_store import ObjectStore
from infra.storage.parallel import map_in_threads

MANIFESTS = "manifests/"


class CorruptArtifactError(ValueError):
    """A committed file that is missing or differs from its manifest."""


class CorruptManifestError(CorruptArtifactError):
    """A manifest that cannot be read, or that is not what its own digest says; `name` is its object's."""

    def __init__(self, uri: str, name: str, problem: str) -> None:
        super().__init__(f"{uri}/{name} {problem}: remove it, or let `glm46 doctor` mark it, and run again")
        self.name = name


class ManifestStore(ObjectStore):
    """Reads, creates and marks manifests."""

    def manifest_names(self) -> list[str]:
        """Names of all manifests."""
        names = (found.name.removeprefix(MANIFESTS) for found in self.list_objects(MANIFESTS))
        return sorted(name for name in names if name.endswith(".json"))

    def committed_keys(self) -> list[str]:
        """Keys that a manifest was ever committed under."""
        return sorted({name.split(".")[0] for name in self.manifest_names()})

    def iterate_manifests(self) -> Iterator[Manifest]:
        """Every manifest that is not invalid, the newest of its key."""
        names = {found.name for found in self.list_objects(MANIFESTS)}
        newest = newest_manifests(names).values()
        valid = [name for name in newest if f"{name}.invalid" not in names]
        for name, data in zip(valid, map_in_threads(self._read, valid), strict=True):
            if data is not None:
                yield self._parse_manifest(name, data)

    def read_manifest(self, key: str) -> Manifest | None:
        """The newest manifest of a key that is not marked invalid. Raises CorruptManifestError."""
        generation = 0
        found = None
        while (data := self._read(_manifest_name(key, generation))) is not None:
            invalid = self._read(f"{_manifest_name(key, generation)}.invalid") is not None
            found = None if invalid else self._parse_manifest(_manifest_name(key, generation), data)
            generation += 1
        return found

    def _parse_manifest(self, name: str, data: bytes) -> Manifest:
        try:
            manifest = Manifest.model_validate(join_manifest(data, self._read))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptManifestError(self.uri, name, f"is not a manifest ({str(error).splitlines()[0]})") from error
        if manifest.digest != content_digest(manifest.record, manifest.content):
            raise CorruptManifestError(self.uri, name, "does not agree with its own digest")
        if manifest.key != step_key(manifest.identity) or name != _manifest_name(manifest.key, manifest.generation):
            raise CorruptManifestError(self.uri, name, "does not agree with its own key")
        return manifest

    def manifest_sha256(self, manifest: Manifest) -> str:
        """sha256 of a manifest as it is stored: it covers timings and evidence too, which its digest leaves out."""
        data = self._read(_manifest_name(manifest.key, manifest.generation))
        if data is None:
            raise CorruptManifestError(self.uri, _manifest_name(manifest.key, manifest.generation), "is missing")
        return hashlib.sha256(data).hexdigest()

    def committed_at(self, manifest: Manifest) -> float:
        """When it was committed, in seconds since the epoch by the clock of the store. A copy of a store has the times
        of the copy unless they were kept."""
        name = _manifest_name(manifest.key, manifest.generation)
        return next(found.modified for found in self.list_objects(name) if found.name == name)

    def mark_invalid(self, manifest: Manifest, reason: str) -> None:
        """From here on the key is computed anew."""
        self.mark_manifest_invalid(_manifest_name(manifest.key, manifest.generation), reason)

    def mark_manifest_invalid(self, name: str, reason: str) -> None:
        """The same for a manifest that cannot be read, by the name of its object."""
        try:
            self._create(f"{name}.invalid", reason.encode())
        except Exception as error:  # a store that is only read, or whose disk is full: what is broken is said first
            raise CorruptArtifactError(
                f"{self.uri}/{name}: {reason}. It cannot be marked ({error}): let `glm46 doctor --deep` mark it where "
                f"the store can be written, then run again"
            ) from error

    def create_manifest(self, manifest: Manifest) -> bool:
        """Commit a manifest; False if its generation of the key is committed already."""
        data, listing = split_manifest(manifest)
        if listing is not None:
            self._create(*listing)
        return self._create(_manifest_name(manifest.key, manifest.generation), data)


def newest_manifests(names: Iterable[str]) -> dict[str, str]:
    """Name of the newest manifest of each key; other names are passed over."""
    newest = dict(sorted(generation_of(name) for name in names if name.endswith(".json")))
    return {key: _manifest_name(key, generation) for key, generation in newest.items()}


def generation_of(name: str) -> tuple[str, int]:
    """Key and generation of a manifest by the name of its object."""
    key, _, generation = name.removeprefix(MANIFESTS).removesuffix(".json").partition(".")
    return key, int(generation or 0)


def step_key(identity: dict[str, Any]) -> str:
    """The sha256 that names a step's work."""
    return digest_of(identity)


def content_digest(record: dict[str, Any], content: dict[str, FileEntry]) -> str:
    """The digest of an artifact: its evidence does not enter."""
    return digest_of({"record": record, "content": {name: entry.sha256 for name, entry in content.items()}})


def _manifest_name(key: str, generation: int) -> str:
    return f"{MANIFESTS}{key}{f'.{generation}' if generation else ''}.json"
