"""Promotion and rollback: each moves several aliases of a model, and is one step for everybody else.

A holder of the model's lease moves aliases; the others wait. MLflow moves one alias at a time, so the moves are first
written as a tag of the registered model, which is removed after the last of them. Whoever takes the lease next first
completes what a killed process left. MLflow has no conditional writes: the lease is renewed right before the first
write, and a process that is paused for a minute after that is the one case that nothing excludes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from infra.registry.model_registry import (
    ANCHOR_PREFIX,
    CANDIDATE,
    CHAMPION,
    GGUF_TAG,
    PREVIOUS,
    QUANTIZED_TAG,
    RegisteredVersion,
    resolve_alias,
)
from infra.step import Artifact
from infra.storage.lease import Lease
from infra.storage.store import Store
from infra.user_name import user_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

MOVES_TAG = "glm46.alias_moves"
"""Tag of the registered model while aliases are moved: an AliasMoves."""
REIGNS_TAG = "glm46.reigns"
"""Tag of the registered model: champion and anchors as they were before each promotion, oldest first."""
ROLLED_BACK_AT_TAG, ROLLED_BACK_BY_TAG = "glm46.rolled_back_at", "glm46.rolled_back_by"
ROLLED_BACK_REASON_TAG = "glm46.rolled_back_reason"
"""Tags of a version that was champion until somebody rolled it back."""
FORGOTTEN_TAG = "glm46.forgotten"
"""On a version that was trained on a text which was taken down: what was asked for, and when, the latest first."""
MAX_TAG_CHARS = 5000
"""Of MLflow's column in Postgres; SQLite takes any length."""
MAX_REASON_CHARS = 1000

Promotion = Literal["done", "unchanged", "overtaken"]
"""Overtaken: the registry changed after the comparison, and no alias was moved."""


@dataclass(frozen=True)
class Rivals:
    """The versions that a candidate is compared with."""

    champion: RegisteredVersion | None
    """None where there is none."""
    anchors: Mapping[str, RegisteredVersion]
    """By figure."""
    replaced_by_champion: str = ""
    """Version that was champion before the reigning one; empty where there was none."""

    def replaced_by(self, checkpoint: Artifact[Any]) -> str:
        """The version that was champion before this candidate is, or that is before it; empty where there is none."""
        if self.champion is None:
            return ""
        return self.replaced_by_champion if self.is_champion(checkpoint) else self.champion.version

    def is_champion(self, checkpoint: Artifact[Any]) -> bool:
        """Whether the candidate is the champion already."""
        return self.champion is not None and self.champion.digest == checkpoint.digest

    @property
    def aliases(self) -> dict[str, str]:
        """Their versions by alias."""
        reigning = {} if self.champion is None else {CHAMPION: self.champion.version}
        return reigning | {f"{ANCHOR_PREFIX}{figure}": anchor.version for figure, anchor in self.anchors.items()}


@dataclass(frozen=True)
class Rollback:
    """The moves of a rollback, by version."""

    model: str
    withdrawn: str
    restored: str
    previous: str | None
    """The version that a further rollback restores; None where there is none."""
    anchors: Mapping[str, str]
    """By figure, of the anchors that moved."""

    def describe(self) -> str:
        moved = "".join(f"; anchor of {figure}: version {version}" for figure, version in sorted(self.anchors.items()))
        previous = "no version" if self.previous is None else f"version {self.previous}"
        return (
            f"{self.model}: champion is version {self.restored} again, instead of version {self.withdrawn}; previous: "
            f"{previous}{moved}"
        )


class AliasMoves(BaseModel):
    """What one promotion or rollback writes. Writing it twice has the effect of writing it once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version_tags: dict[str, dict[str, str]]
    """By version."""
    reigns: list[dict[str, str]]
    """The new value of REIGNS_TAG."""
    aliases: dict[str, str | None]
    """Version by alias, None for one that goes; in the order of the moves."""

    def as_tag(self) -> tuple[Self, str]:
        """These moves with as many of the newest reigns as a tag of MLflow holds, and the tag."""
        moves, tag = self, self.model_dump_json()
        while len(tag) > MAX_TAG_CHARS and moves.reigns:
            moves = moves.model_copy(update={"reigns": moves.reigns[1:]})
            tag = moves.model_dump_json()
        return moves, tag

    @property
    def versions(self) -> set[str]:
        """Every version that is tagged, or gets an alias."""
        return {*self.version_tags, *(number for number in self.aliases.values() if number is not None)}

    def among(self, versions: Set[str], restorable: Set[str], reigning: str | None) -> Self:
        """These moves where versions may have been deleted since they were decided: `versions` are left, `restorable`
        may be champion again, `reigning` is champion now. An anchor whose new version is gone becomes the new champion,
        `previous` the last champion that is left. Where the new champion is gone, champion and anchors are those of
        before."""
        if not self.versions - versions:
            return self
        champion, aliases = self.aliases[CHAMPION], dict(self.aliases)
        reigns = _usable(self.reigns, versions & {*restorable, reigning})
        if champion not in versions:
            champion, aliases = reigning, {}
            if reigns and reigning in (None, reigns[-1][CHAMPION]):
                champion, aliases = reigns[-1][CHAMPION], dict(reigns[-1])
        reigns = _usable(reigns, restorable - {champion})
        aliases = {alias: number if number in {None, *versions} else champion for alias, number in aliases.items()}
        if PREVIOUS in self.aliases:
            aliases[PREVIOUS] = reigns[-1][CHAMPION] if reigns else None
        tags = {version: tags for version, tags in self.version_tags.items() if version in versions}
        return self.model_copy(update={"version_tags": tags, "reigns": reigns, "aliases": aliases})


def look_up_rivals(
    client: MlflowClient, store: Store, model: str, figures: Iterable[str], say: Callable[[str], None]
) -> Rivals:
    """Champion and anchors of these figures, after moves that a killed process left are completed."""
    with moving_aliases(client, store, model, say):
        anchors = {figure: resolve_alias(client, model, f"{ANCHOR_PREFIX}{figure}") for figure in figures}
        return Rivals(
            resolve_alias(client, model, CHAMPION),
            {figure: version for figure, version in anchors.items() if version is not None},
            reigns[-1][CHAMPION] if (reigns := _reigns(client.get_registered_model(model))) else "",
        )


def promote(
    client: MlflowClient,
    store: Store,
    model: str,
    version: str,
    anchors: Mapping[str, str],
    rivals: Rivals,
    say: Callable[[str], None],
) -> Promotion:
    """Make a version the champion, the champion before it `previous`, and these versions the anchors of figures.

    Nothing moves where champion or anchors are other versions than the rivals with which it was compared: the decision
    does not hold for them; nor where the version was rolled back or a text of it taken down meanwhile.
    """
    with moving_aliases(client, store, model, say) as lease:
        if refusal_of(_versions(client, model)[version]):
            return "overtaken"
        registered = client.get_registered_model(model)
        aliases = {alias: str(number) for alias, number in registered.aliases.items()}
        champion = aliases.get(CHAMPION)
        if champion == version:
            if aliases.get(CANDIDATE) == version:
                client.delete_registered_model_alias(model, CANDIDATE)
            return "unchanged"
        compared = {CHAMPION, *(f"{ANCHOR_PREFIX}{figure}" for figure in rivals.anchors)}
        if {alias: aliases[alias] for alias in compared & aliases.keys()} != rivals.aliases:
            return "overtaken"
        moves: dict[str, str | None] = {f"{ANCHOR_PREFIX}{figure}": number for figure, number in anchors.items()}
        if champion is not None:
            moves[PREVIOUS] = champion
        if aliases.get(CANDIDATE) == version:
            moves[CANDIDATE] = None
        ended = [] if champion is None else [_reign(aliases)]
        reigns = [*_reigns(registered), *ended]
        _write(client, model, AliasMoves(version_tags={}, reigns=reigns, aliases=moves | {CHAMPION: version}), lease)
    return "done"


def refuse_wrong_reason(reason: str) -> None:
    """Raises ValueError for a reason of a rollback that is empty or does not fit into its tag."""
    if not reason.strip() or len(reason) > MAX_REASON_CHARS:
        raise ValueError(f"--reason has {len(reason)} characters: give 1 to {MAX_REASON_CHARS}")


def roll_back(client: MlflowClient, store: Store, model: str, reason: str, say: Callable[[str], None]) -> Rollback:
    """Restore the champion and the anchors of before the last promotion.

    The version that goes is marked with time, person and reason, and is no candidate until the mark is removed. After
    it `previous` is the champion before the restored one. Raises ValueError where there is no such version, its
    artifacts are gone, or it was trained on a text that was taken down.
    """
    refuse_wrong_reason(reason)
    with moving_aliases(client, store, model, say) as lease:
        registered = client.get_registered_model(model)
        aliases = {alias: str(number) for alias, number in registered.aliases.items()}
        versions = _versions(client, model)
        withdrawn, restored = aliases.get(CHAMPION), aliases.get(PREVIOUS)
        if withdrawn is None or restored is None:
            missing = CHAMPION if withdrawn is None else PREVIOUS
            raise ValueError(f"{model} has no version with the alias {missing}: there is nothing to roll back to")
        if FORGOTTEN_TAG in versions[restored].tags:
            raise ValueError(f"{model} cannot go back: {refusal_of(versions[restored])}")
        barred = {number for number, each in versions.items() if refusal_of(each)} | {withdrawn}
        reigns = _usable(_reigns(registered), versions.keys() - barred)
        if not reigns or reigns[-1][CHAMPION] != restored:
            raise ValueError(
                f"{model}: the alias {PREVIOUS} was moved by hand to version {restored}, which was not champion before "
                f"version {withdrawn}: set {CHAMPION} by hand, too, or run a release"
            )
        _require_artifacts(store, versions[restored])
        before = {alias: number if number in versions else restored for alias, number in reigns.pop().items()}
        anchors = {
            alias: before.get(alias, restored)
            for alias, number in aliases.items()
            if alias.startswith(ANCHOR_PREFIX) and number == withdrawn
        }
        reigns = _usable(reigns, versions.keys() - barred - {restored})
        previous = reigns[-1][CHAMPION] if reigns else None
        mark = {
            ROLLED_BACK_AT_TAG: f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            ROLLED_BACK_BY_TAG: f"{user_name()}@{socket.gethostname()}",
            ROLLED_BACK_REASON_TAG: reason,
        }
        moves = {**anchors, PREVIOUS: previous, CHAMPION: restored}
        _write(client, model, AliasMoves(version_tags={withdrawn: mark}, reigns=reigns, aliases=moves), lease)
    moved = {alias.removeprefix(ANCHOR_PREFIX): number for alias, number in anchors.items()}
    return Rollback(model, withdrawn, restored, previous, moved)


def refusal_of(version: RegisteredVersion) -> str:
    """Why a version may not be promoted whatever its figures are: a text that it was trained on was taken down, or
    somebody rolled it back. Else empty."""
    if FORGOTTEN_TAG in version.tags:
        return (
            f"version {version.version} was trained on a text that was taken down ({version.tag(FORGOTTEN_TAG)}): run "
            f"its scale again to train without it; to allow the version nevertheless, delete its tag {FORGOTTEN_TAG} "
            f"in MLflow"
        )
    if ROLLED_BACK_AT_TAG not in version.tags:
        return ""
    return (
        f"version {version.version} was rolled back on {version.tags[ROLLED_BACK_AT_TAG]} by "
        f"{version.tag(ROLLED_BACK_BY_TAG)} ({version.tag(ROLLED_BACK_REASON_TAG)}): to allow it again, delete its tag "
        f"{ROLLED_BACK_AT_TAG} in MLflow"
    )


@contextmanager
def moving_aliases(client: MlflowClient, store: Store, model: str, say: Callable[[str], None]) -> Iterator[Lease]:
    """Hold the lease of a model's aliases; what a killed process had begun to move is moved first. `say` gets who holds
    it meanwhile, and what was completed."""
    with store.locked(f"aliases-{model}", say, f"moves the aliases of {model}") as lease:
        if MOVES_TAG in client.get_registered_model(model).tags:
            moved = _complete(client, model, lease)
            say(f"{model}: completed the moves of aliases that a killed process had begun ({moved})")
        yield lease


def _complete(client: MlflowClient, model: str, lease: Lease) -> str:
    """Write what was begun to move; gives the moves in words."""
    registered, versions = client.get_registered_model(model), _versions(client, model)
    begun = AliasMoves.model_validate_json(registered.tags[MOVES_TAG])
    aliases = {alias: str(number) for alias, number in registered.aliases.items()}
    restorable = {
        number for number, each in versions.items() if not {FORGOTTEN_TAG, ROLLED_BACK_AT_TAG} & each.tags.keys()
    }
    moves = begun.among(versions.keys(), restorable, aliases.get(CHAMPION))
    _write(client, model, moves, lease)
    deleted = ", ".join(sorted(begun.versions - versions.keys(), key=int))
    names = ", ".join(f"{alias} = {number or 'none'}" for alias, number in moves.aliases.items())
    return f"{names or 'none'}; deleted since: version {deleted}" if deleted else names


def _versions(client: MlflowClient, model: str) -> dict[str, RegisteredVersion]:
    return {
        str(item.version): RegisteredVersion(str(item.version), dict(item.tags))
        for item in client.search_model_versions(f"name = '{model}'")
    }


def _write(client: MlflowClient, model: str, moves: AliasMoves, lease: Lease) -> None:
    lease.confirm()
    moves, tag = moves.as_tag()
    client.set_registered_model_tag(model, MOVES_TAG, tag)
    for version, tags in moves.version_tags.items():
        for name, value in tags.items():
            client.set_model_version_tag(model, version, name, value)
    for alias, version in moves.aliases.items():
        if version is None:
            client.delete_registered_model_alias(model, alias)
        else:
            client.set_registered_model_alias(model, alias, version)
    # Without spaces, as in the tag of the moves: what fits there fits here.
    client.set_registered_model_tag(model, REIGNS_TAG, json.dumps(moves.reigns, separators=(",", ":")))
    client.delete_registered_model_tag(model, MOVES_TAG)


def _reign(aliases: Mapping[str, str]) -> dict[str, str]:
    return {alias: number for alias, number in aliases.items() if alias == CHAMPION or alias.startswith(ANCHOR_PREFIX)}


def _reigns(registered: Any) -> list[dict[str, str]]:
    return json.loads(registered.tags.get(REIGNS_TAG, "[]"))


def _usable(reigns: list[dict[str, str]], allowed: Iterable[str]) -> list[dict[str, str]]:
    """The reigns up to the newest one of an allowed champion."""
    last = max((number for number, reign in enumerate(reigns) if reign[CHAMPION] in set(allowed)), default=-1)
    return reigns[: last + 1]


def _require_artifacts(store: Store, version: RegisteredVersion) -> None:
    """Raises ValueError where weights or formats of a version are no longer in the store, by the size of each file."""
    formats = {"GGUF files": version.tag(GGUF_TAG)} | {
        f"{name.removeprefix(QUANTIZED_TAG)} files": key
        for name, key in version.tags.items()
        if name.startswith(QUANTIZED_TAG)
    }
    for what, key in {"weights": version.key, **formats}.items():
        manifest = store.read_manifest(key)
        broken = None if manifest is None else store.broken_files(manifest, deep=False)
        if broken is None or broken:
            lost = "are not" if broken is None else f"({', '.join(sorted(broken)[:3])}) are no longer whole"
            raise ValueError(
                f"version {version.version}, the champion before this one, cannot be restored: its {what} {lost} in "
                f"store {store.uri} (key {key[:12]}): name the store of its run with --store, or run its scale again"
            )
