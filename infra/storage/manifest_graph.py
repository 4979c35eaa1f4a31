"""The store's manifests as a graph: which step made what from what, read once and without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from infra.step import Artifact, Manifest, Record
from infra.storage.store import Store


@dataclass(frozen=True)
class ManifestGraph:
    """Every valid manifest of a store.

    An input is known by its digest, and several manifests may have one digest (another threshold that dropped the same
    documents): they hold the same content, and the first by key represents all unless `ancestors` finds one that fits
    its surroundings better.
    """

    store: Store
    with_digest: dict[str, tuple[Manifest, ...]]

    @cached_property
    def by_digest(self) -> dict[str, Manifest]:
        """The manifest that represents its digest."""
        return {digest: found[0] for digest, found in self.with_digest.items()}

    def made_by(self, *steps: str) -> Iterator[Manifest]:
        """One manifest per digest of the steps, in the order of their keys."""
        return (manifest for manifest in self.by_digest.values() if manifest.step in steps)

    def input_of(self, manifest: Manifest, name: str) -> Manifest | None:
        """The manifest of an input; None where the step had none. Raises ValueError where the store lacks it."""
        digest = manifest.identity["inputs"].get(name)
        if digest is None:
            return None
        if digest not in self.by_digest:
            raise ValueError(
                f"store {self.store.uri} lacks the {name} ({digest[:12]}) that step {manifest.step} "
                f"({manifest.key[:12]}) was made from: "
                "name the store that the run was made with"
            )
        return self.by_digest[digest]

    def ancestors(self, *manifests: Manifest) -> list[Manifest]:
        """All that the manifests were made from and themselves, producers first; inputs that no step made (sources) are
        left out.

        Where several manifests have the digest of an input, the one with the fewest inputs that are not among the
        ancestors already."""
        found: dict[str, Manifest] = {}

        def visit(manifest: Manifest) -> None:
            if manifest.digest in found:
                return
            for _, digest in sorted(manifest.identity["inputs"].items()):
                if digest in self.with_digest:
                    visit(min(self.with_digest[digest], key=num_new_inputs))
            found[manifest.digest] = manifest

        def num_new_inputs(manifest: Manifest) -> int:
            return sum(digest is not None and digest not in found for digest in manifest.identity["inputs"].values())

        for manifest in manifests:
            visit(manifest)
        return list(found.values())

    def open(self, manifest: Manifest) -> Artifact[Record]:
        """The artifact of a manifest, for its files: the record stays as it is in the manifest."""
        return Artifact(manifest, Record(), self.store)


def read_manifest_graph(store: Store) -> ManifestGraph:
    """Read all manifests of a store."""
    with_digest: dict[str, tuple[Manifest, ...]] = {}
    for manifest in store.iterate_manifests():
        with_digest[manifest.digest] = (*with_digest.get(manifest.digest, ()), manifest)
    return ManifestGraph(store, with_digest)
