"""What a store and a home have and nobody needs: attempts of killed runs, invalid manifests, old leases, cached copies.

Runs on the machine of `glm46 gc`. In: listings of the store and its manifests, no look at single files. What a manifest
or a held lease names stays, and so does what is younger than the given age by the store's own clock. Whether a lease is
held is no matter of that clock, which may have been set meanwhile: one that looks old is watched for its duration.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from infra.disk_space import NO_ROOM
from infra.storage.lease import LEASE_SECONDS, LeaseRecord, is_free, lease_name, parse_lease, take_lease
from infra.storage.manifest_store import MANIFESTS, generation_of, newest_manifests
from infra.storage.object_store import StoredObject, Upload
from infra.storage.parallel import map_in_threads
from infra.storage.store import Store

OBJECTS, LEASES = "objects/", "leases/"
HALF_WRITTEN = re.compile(r"(?:^|/)\.[^/]+-[0-9a-f]{32}$")
"""Names that configs/atomic_files.py and the stores give to files that they have not finished."""
SILENT_DURATIONS = 2
"""Of a lease: one that was not renewed for so long looks as if it had no holder."""


class Attempt(NamedTuple):
    """The files of an attempt that no manifest names."""

    key: str
    attempt: str
    num_files: int
    num_bytes: int


class FoundLease(NamedTuple):
    """A lease as it was read."""

    key: str
    record: LeaseRecord | None
    version: str
    age_seconds: float

    @property
    def duration_seconds(self) -> float:
        return LEASE_SECONDS if self.record is None else self.record.duration_seconds

    @property
    def is_given_up(self) -> bool:
        """Whether its holder has released it, or was a process of this machine and has ended."""
        return self.record is not None and is_free(self.record)

    @property
    def is_held(self) -> bool:
        """Whether somebody may be computing under it."""
        return self.age_seconds <= SILENT_DURATIONS * self.duration_seconds and not self.is_given_up


class Heap(NamedTuple):
    """Garbage of one kind."""

    what: str
    count: int
    num_bytes: int

    def describe(self) -> str:
        return f"{self.what}: {self.count:,} ({self.num_bytes:,} bytes)"


@dataclass(frozen=True)
class Garbage:
    """What can go."""

    attempts: tuple[Attempt, ...] = ()
    manifests: tuple[StoredObject, ...] = ()
    """Of keys that have no valid manifest, and their marks."""
    uploads: tuple[Upload, ...] = ()
    temporary: tuple[StoredObject, ...] = ()
    """Half-written files: of commits, of leases, of what a killed process wrote beside committed files."""
    leases: tuple[FoundLease, ...] = ()
    cached: tuple[StoredObject, ...] = ()
    """Files of the home's cache by their paths."""
    silent: tuple[LeaseRecord, ...] = field(default=(), compare=False)
    """Leases that nobody renews, of whatever age: their holders were killed."""

    def heaps(self) -> list[Heap]:
        """Count and bytes by kind."""
        return [
            Heap("attempts that no manifest names", len(self.attempts), sum(item.num_bytes for item in self.attempts)),
            Heap("manifests marked invalid", *_count(self.manifests)),
            Heap("uploads begun in parts", len(self.uploads), sum(item.num_bytes for item in self.uploads)),
            Heap("half-written files", *_count(self.temporary)),
            Heap("leases that nobody holds", len(self.leases), 0),
            Heap("cached copies", *_count(self.cached)),
        ]


def find_garbage(
    store: Store, older_than_seconds: float, is_cache_free: bool, say: Callable[[str], None] = lambda message: None
) -> Garbage:
    """What nobody needs. is_cache_free: no job of this home runs that may read from its cache. `say` gets what is
    waited for.

    Leases are read before manifests and manifests before files are listed: a run that commits meanwhile is known by its
    lease. Raises ValueError for a manifest that cannot be read.
    """
    now = store.now()
    oldest = now - older_than_seconds
    found_leases = [found for found in store.list_objects(LEASES) if not HALF_WRITTEN.search(found.name)]
    leases = list(map_in_threads(lambda found: _read(store, found, now), found_leases))
    leases = _watch(store, [lease for lease in leases if lease is not None], say)
    held = {lease.key for lease in leases if lease.is_held}
    records = list(store.list_objects(MANIFESTS))
    names = {found.name for found in records}
    invalid = _invalid_manifests(names)
    named = _named_attempts(store, names)
    attempts, half_written = _nameless_files(store, named, held, oldest)
    is_ours = any(lease.record and store.home.is_at(lease.record.home) for lease in leases if lease.is_held)
    return Garbage(
        attempts=tuple(attempts),
        manifests=tuple(
            found
            for found in records
            if found.name in invalid and found.modified <= oldest and _key_of(found.name) not in held
        ),
        uploads=tuple(
            upload
            for upload in store.list_uploads(OBJECTS)
            if upload.modified <= oldest and upload.name.split("/")[1] not in held
        ),
        temporary=(
            *half_written,
            *(
                found
                for prefix in (MANIFESTS, LEASES)
                for found in store.list_objects(prefix)
                if HALF_WRITTEN.search(found.name) and found.modified <= oldest
            ),
        ),
        leases=tuple(lease for lease in leases if not lease.is_held and lease.age_seconds >= older_than_seconds),
        cached=tuple(_cached(store.home.cache_dir, older_than_seconds)) if is_cache_free and not is_ours else (),
        silent=tuple(
            lease.record for lease in leases if lease.record and not lease.is_held and not lease.record.is_released
        ),
    )


def delete_garbage(store: Store, garbage: Garbage) -> Garbage:
    """Remove it; returns what went. A key that somebody computes meanwhile is left to the next time. What needs no
    lease goes first: a full disk has no room for one."""
    store.delete_objects(found.name for found in garbage.temporary)
    for upload in garbage.uploads:
        store.abort_upload(upload)
    for found in garbage.cached:
        Path(found.name).unlink(missing_ok=True)
    attempts, manifests, gone = [], [], set()
    keys = {attempt.key for attempt in garbage.attempts} | {_key_of(found.name) for found in garbage.manifests}
    known = {lease.key: lease.version for lease in garbage.leases}
    for key in sorted(keys):
        theirs = [attempt for attempt in garbage.attempts if attempt.key == key]
        records = [found for found in garbage.manifests if _key_of(found.name) == key]
        if _delete_of_key(store, key, known.get(key), theirs, records):
            gone.add(key)
            attempts += theirs
            manifests += records
    leases = [
        lease
        for lease in garbage.leases
        if lease.key in gone or store.delete_version(lease_name(lease.key), lease.version)
    ]
    return Garbage(tuple(attempts), tuple(manifests), garbage.uploads, garbage.temporary, tuple(leases), garbage.cached)


def _delete_of_key(
    store: Store, key: str, silent_version: str | None, attempts: list[Attempt], manifests: list[StoredObject]
) -> bool:
    """Under the key's lease: nobody commits meanwhile. False where somebody computes it, or has committed it.

    silent_version: of the lease that was seen to have no holder."""
    found = store.read_version(lease_name(key))
    record, version = (None, None) if found is None else (parse_lease(found[0]), found[1])
    is_held = version not in (None, silent_version) and not (record and is_free(record))
    take = partial(take_lease, store, key, store.home.root, record, version)
    try:
        lease = None if is_held else take()
    except OSError as error:
        if error.errno not in NO_ROOM or version is not None:
            raise
        # Nobody has begun to compute a key without a lease, and whoever begins gives its attempt a name of its own.
        for attempt in attempts:
            store._discard(key, attempt.attempt)
        lease = take()
    if lease is None:
        return False
    try:
        committed = store.read_manifest(key)
        if committed is not None and (manifests or committed.attempt in {attempt.attempt for attempt in attempts}):
            return False
        for attempt in attempts:
            store._discard(key, attempt.attempt)
        # Killed on the way, this leaves manifests whose files are missing: they are marked again when they are read.
        for name in sorted((found.name for found in manifests), key=_from_the_newest):
            store.delete_objects([name])
    finally:
        lease.remove()
    return True


def _from_the_newest(name: str) -> tuple[int, bool]:
    """The last generation first, its mark before it: a mark without a manifest would make the next commit invalid."""
    return -generation_of(name.removesuffix(".invalid"))[1], name.endswith(".json")


def _read(store: Store, found: StoredObject, now: float) -> FoundLease | None:
    read = store.read_version(found.name)
    if read is None:
        return None
    return FoundLease(found.name.removeprefix(LEASES), parse_lease(read[0]), read[1], now - found.modified)


def _watch(store: Store, leases: list[FoundLease], say: Callable[[str], None]) -> list[FoundLease]:
    """The leases, those that look old after their duration was waited for: one that changes meanwhile has a holder. All
    look old where the clock was set forward after they were renewed."""
    watched = [lease for lease in leases if not lease.is_held and not lease.is_given_up]
    if not watched:
        return leases
    seconds = max(lease.duration_seconds for lease in watched)
    say(f"waiting for {seconds:g} s to see whether anybody renews {len(watched)} leases that look old")
    time.sleep(seconds)
    changed = dict(zip(watched, map_in_threads(partial(_has_changed, store), watched), strict=True))
    return [lease._replace(age_seconds=0.0) if changed.get(lease) else lease for lease in leases]


def _has_changed(store: Store, lease: FoundLease) -> bool:
    read = store.read_version(lease_name(lease.key))
    return read is None or read[1] != lease.version


def _invalid_manifests(names: set[str]) -> set[str]:
    """All manifests and marks of the keys whose newest manifest is marked."""
    marked = {key for key, name in newest_manifests(names).items() if f"{name}.invalid" in names}
    return {name for name in names if name.endswith((".json", ".json.invalid")) and _key_of(name) in marked}


def _named_attempts(store: Store, names: set[str]) -> set[tuple[str, str]]:
    """Keys and attempts of the files that valid manifests name."""
    valid = [name for name in newest_manifests(names).values() if f"{name}.invalid" not in names]
    return set(map_in_threads(lambda name: _attempt_of(store, name), valid))


def _key_of(name: str) -> str:
    """Key of a manifest, or of its mark."""
    return generation_of(name.removesuffix(".invalid"))[0]


def _attempt_of(store: Store, name: str) -> tuple[str, str]:
    found = store.read_version(name)
    try:
        manifest = json.loads(b"" if found is None else found[0])
        return manifest["object_key"], manifest["attempt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{store.uri}/{name} cannot be read, so nobody knows which files it names: let `glm46 doctor` mark it, "
            f"then run gc again"
        ) from error


def _nameless_files(
    store: Store, named: set[tuple[str, str]], held: set[str], oldest: float
) -> tuple[list[Attempt], list[StoredObject]]:
    """Attempts that are not named, and the half-written files of those that are."""
    attempts, half_written = [], []
    for (key, attempt), files in groupby(store.list_objects(OBJECTS), key=lambda found: _place(found.name)):
        if key in held:
            continue
        if (key, attempt) in named:
            half_written += [found for found in files if HALF_WRITTEN.search(found.name) and found.modified <= oldest]
            continue
        num_files, num_bytes, newest = 0, 0, 0.0
        for found in files:
            num_files, num_bytes, newest = num_files + 1, num_bytes + found.size, max(newest, found.modified)
        if newest <= oldest:
            attempts.append(Attempt(key, attempt, num_files, num_bytes))
    return attempts, half_written


def _place(name: str) -> tuple[str, str]:
    _, key, attempt, *_ = [*name.split("/"), ""]
    return key, attempt


def _cached(directory: Path, older_than_seconds: float) -> Iterable[StoredObject]:
    oldest = time.time() - older_than_seconds
    for path in directory.rglob("*"):
        if path.is_file() and (found := path.stat()).st_mtime <= oldest:
            yield StoredObject(str(path), found.st_size, found.st_mtime)


def _count(found: tuple[StoredObject, ...]) -> tuple[int, int]:
    return len(found), sum(item.size for item in found)
