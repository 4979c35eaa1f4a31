"""The store: objects/<key>/<attempt>/ holds data, one conditional create of manifests/<key>.json commits it.

The first creator of the manifest wins. The loser uses the winner's artifact and drops its own attempt. A manifest
whose files turn out missing or corrupt is marked invalid and superseded by a new generation, `<key>.1.json` and so
on. The manifest is the only cache.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from configs.files.file_digests import digests_of
from configs.files.transferred_bytes import Transferred, count_read, count_written, counting_bytes
from infra.file_lock import locked
from infra.home import Home
from infra.step import JOB_EVIDENCE_DIR, Artifact, FileEntry, LogMetrics, Manifest, Output, Progress, R, Record, Step
from infra.storage.lease import COMPUTES, Lease, acquire_lease, holder_of
from infra.storage.manifest_store import CorruptArtifactError, ManifestStore, content_digest, step_key
from infra.storage.parallel import map_in_threads

_AT_ONCE = nullcontext()


class Store(ManifestStore):
    """What the local and the S3 store share: commits, look-ups and verification."""

    def __init__(self, uri: str, home: Home) -> None:
        self.uri = uri
        self.home = home
        self._verified: dict[tuple[str, str, str], Path] = {}
        self._leases: dict[str, Lease] = {}

    def __deepcopy__(self, memo: object) -> NoReturn:
        """A store is no value. Prefect copies what a sub-flow is given to write it into its database, and would write
        every artifact of the run (0.7 MB at four phases, above its limit); where copying fails it writes the type's
        name."""
        raise TypeError("a store cannot be copied")

    @abstractmethod
    def _fetch(self, name: str) -> Path:
        """Local path of an object's bytes."""

    @property
    @abstractmethod
    def staging_root(self) -> Path:
        """Directory of this machine below which attempts are written."""

    @abstractmethod
    def _publish(self, key: str, attempt: str, names: list[str]) -> None:
        """Make the files of an attempt durable under objects/."""

    @abstractmethod
    def _discard(self, key: str, attempt: str) -> None:
        """Remove an attempt that no manifest names."""

    def uri_of(self, manifest: Manifest, name: str) -> str:
        """Address of a committed file, for processes that read it themselves."""
        return self._uri(_object_name(manifest, name))

    def _uri(self, name: str) -> str:
        return f"{self.uri}/{name}"

    @abstractmethod
    def _remove_below(self, key: str, attempt: str, name: str) -> None:
        """Remove what is below a name of an attempt."""

    def attempt_dir(self, key: str, attempt: str) -> Path:
        """Local directory in which an attempt is written."""
        return self.staging_root / key / attempt

    def find(self, step: Step[R], key: str) -> Artifact[R] | None:
        """The committed artifact of a key, if its manifest exists and every file has its size."""
        manifest = self.read_manifest(key)
        if manifest is None:
            return None
        broken = self.broken_files(manifest, deep=False)
        if broken:
            self.mark_invalid(manifest, f"{broken[0]} is missing or has another size")
            return None
        return Artifact(manifest, step.record_type.model_validate(manifest.record), self)

    def broken_files(self, manifest: Manifest, deep: bool) -> list[str]:
        """Names of the committed files that are missing or differ in size or, looking deep, in sha256."""
        entries = {**manifest.content, **manifest.evidence}
        prefix = _object_name(manifest, "")
        sizes = {found.name.removeprefix(prefix): found.size for found in self.list_objects(prefix)}
        wrong = [name for name, entry in entries.items() if sizes.get(name) != entry.size]
        if deep:
            rest = [name for name, entry in entries.items() if sizes.get(name) == entry.size]
            digests = map_in_threads(lambda name: self._sha256(_object_name(manifest, name)), rest)
            wrong += [name for name, digest in zip(rest, digests, strict=True) if digest != entries[name].sha256]
        return wrong

    def _intact_copy(self, manifest: Manifest, name: str) -> Path | None:
        """Local path of a committed file, None where it has not its sha256; a damaged copy in the cache is fetched
        again."""
        entry = manifest.content.get(name) or manifest.evidence.get(name)
        assert entry, f"step {manifest.step} left no file {name}"
        path = self._fetch(_object_name(manifest, name))
        if path.is_file() and hash_file(path) == entry.sha256:
            return path
        if self.home.cache_dir not in path.parents or not path.is_file():
            return None
        path.unlink()
        path = self._fetch(_object_name(manifest, name))
        return path if path.is_file() and hash_file(path) == entry.sha256 else None

    def load(self, key: str, record_type: type[R]) -> Artifact[R]:
        """The committed artifact of a key that must exist. Raises CorruptArtifactError if it does not."""
        manifest = self.read_manifest(key)
        if manifest is None:
            raise CorruptArtifactError(
                f"store {self.uri} holds no manifest for key {key}: name the store that the run was made with"
            )
        return Artifact(manifest, record_type.model_validate(manifest.record), self)

    def local_path(self, manifest: Manifest, name: str) -> Path:
        """Local path of a committed file whose sha256 was verified by this process."""
        verified = self._verified.get((manifest.object_key, manifest.attempt, name))
        if verified is None or not verified.is_file():
            verified = self._intact_copy(manifest, name)
            if verified is None:
                self.mark_invalid(manifest, f"{name} does not have its sha256")
                raise CorruptArtifactError(
                    f"{self.uri}/{_object_name(manifest, name)}: corrupt, its sha256 is not the committed one. "
                    f"Run again: step {manifest.step} is computed anew"
                )
            self._verified[manifest.object_key, manifest.attempt, name] = verified
        count_read(verified.stat().st_size)
        return verified

    @contextmanager
    def locked(
        self, key: str, say: Callable[[str], None] = lambda message: None, work: str = COMPUTES
    ) -> Iterator[Lease]:
        """Hold the key's work directory in this home and its lease in the store: a second run, of this machine or of
        another, says who computes, waits and then finds the artifact. The lock's file goes with it. `work` says what
        the holder does, for a key that is no step's."""
        path = self.home.work_root / f"{key}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)

        def say_who(message: str) -> None:
            say(f"{message}{holder_of(self, key)}; waiting for its result")

        with locked(path, say_who, f"another run {work}"):
            try:
                self._leases[key] = acquire_lease(self, key, self.home.root, say, work)
                try:
                    yield self._leases[key]
                finally:
                    self._leases.pop(key).release()
            finally:
                path.unlink()

    def find_or_compute(
        self,
        step: Step[R],
        identity: dict[str, Any],
        run: Callable[[Output], R],
        report: Callable[[Progress], None],
        say: Callable[[str], None],
        log_metrics: LogMetrics = lambda rows: None,
        turn: AbstractContextManager[object] = _AT_ONCE,
    ) -> tuple[Artifact[R], bool]:
        """A step's artifact and whether it was there already; `say` gets a message while another process computes
        it, and the step's own sentences. `turn` is held while the step runs."""
        key = step_key(identity)
        artifact, work_dir = self.find(step, key), self.home.work_dir(key)
        if artifact is not None and not work_dir.exists():
            return artifact, True
        with self.locked(key, say) as lease:
            artifact = self.find(step, key)
            if artifact is not None:
                if work_dir.exists():  # a run was killed right after its commit
                    self._discard_abandoned(key, work_dir)
                    shutil.rmtree(work_dir)
                return artifact, True

            def report_while_held(progress: Progress) -> None:
                lease.check()
                report(progress)

            with turn:
                computed = self.compute(step, key, identity, run, report_while_held, say, log_metrics, time.monotonic)
            return computed, False

    def compute(
        self,
        step: Step[R],
        key: str,
        identity: dict[str, Any],
        run: Callable[[Output], R],
        report: Callable[[Progress], None],
        say: Callable[[str], None],
        log_metrics: LogMetrics,
        clock: Callable[[], float],
    ) -> Artifact[R]:
        """Run a step into a new attempt and commit it; call with the key locked."""
        attempt = uuid.uuid4().hex[:12]
        work_dir = self.home.work_dir(key)
        self._discard_abandoned(key, work_dir)
        work_dir.mkdir(parents=True, exist_ok=True)
        (work_dir / "attempt").write_text(attempt)
        directory = self.attempt_dir(key, attempt)
        directory.mkdir(parents=True)
        started = clock()
        uri = self._uri(f"objects/{key}/{attempt}")
        remove = partial(self._remove_below, key, attempt)
        output = Output(directory, uri, work_dir, key, report, say, log_metrics, remove)
        with counting_bytes() as transferred, self._marking_corrupt_inputs():
            record = run(output)
            files = _describe_files(output)
        manifest = _describe(step, attempt, identity, record, output.key, files, transferred, clock() - started)
        if (adopted := work_dir / "adopted_from").exists():
            manifest = manifest.model_copy(update={"adopted_from": adopted.read_text()})
        self._publish(key, attempt, sorted({*manifest.content, *manifest.evidence} - output.written.keys()))
        artifact = self._commit(step, manifest)
        if artifact.manifest.attempt != attempt:
            self._discard(key, attempt)
        shutil.rmtree(work_dir)
        return artifact

    @contextmanager
    def _marking_corrupt_inputs(self) -> Iterator[None]:
        """What an executor reads and finds corrupt is marked, as what this process reads: its step is computed anew."""
        try:
            yield
        except Exception as error:
            # The message of a CorruptFileError, by itself or in that of a failed task of Spark; a path may have blanks.
            objects = re.escape(f"{self.uri}/objects/")
            corrupt = re.search(rf"(?<!\S){objects}(?P<key>\w+)/(?P<rest>[^\n]+?) is corrupt: [^\n]*", str(error))
            if corrupt is None:
                raise
            for manifest in self.iterate_manifests():
                if manifest.object_key == corrupt["key"] and corrupt["rest"].startswith(f"{manifest.attempt}/"):
                    self.mark_invalid(manifest, f"{corrupt['rest']} does not have its digest")
            raise CorruptArtifactError(corrupt[0]) from error

    def _commit(self, step: Step[R], manifest: Manifest) -> Artifact[R]:
        lease = self._leases[manifest.key]
        lease.confirm()
        manifest = manifest.model_copy(update={"fence": lease.fence})
        while True:
            if self.create_manifest(manifest):
                return Artifact(manifest, step.record_type.model_validate(manifest.record), self)
            winner = self.find(step, manifest.key)
            if winner is not None:
                return winner
            manifest = manifest.model_copy(update={"generation": manifest.generation + 1})

    def _discard_abandoned(self, key: str, work_dir: Path) -> None:
        """Remove what a killed run of this machine left half-written under the key."""
        marker = work_dir / "attempt"
        if marker.exists():
            attempt = marker.read_text()
            manifest = self.read_manifest(key)
            if attempt and (manifest is None or manifest.attempt != attempt):
                self._discard(key, attempt)


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _describe_files(output: Output) -> dict[str, FileEntry]:
    """Files of executors are described already; only those that this process wrote are read."""
    paths = {path.relative_to(output.directory).as_posix(): path for path in output.directory.rglob("*")}
    own = {name: path for name, path in paths.items() if path.is_file() and name not in output.written}
    entries = {name: _entry(path) for name, path in own.items()}
    count_written(sum(entry.size for entry in entries.values()))
    return entries | {
        name: FileEntry(size=file.size, sha256=file.sha256, blocks=file.blocks) for name, file in output.written.items()
    }


def _describe(
    step: Step[R],
    attempt: str,
    identity: dict[str, Any],
    record: Record,
    key: str,
    entries: dict[str, FileEntry],
    transferred: Transferred,
    seconds: float,
) -> Manifest:
    content = {name: entry for name, entry in sorted(entries.items()) if _matches(name, step.content)}
    patterns = (*step.evidence, f"{JOB_EVIDENCE_DIR}/*")
    evidence = {
        name: entry for name, entry in sorted(entries.items()) if name not in content and _matches(name, patterns)
    }
    undeclared = sorted(entries.keys() - content.keys() - evidence.keys())
    assert not undeclared, f"step {step.name} wrote files that it does not declare: {undeclared}"
    values = record.model_dump(mode="json")
    return Manifest(
        key=key,
        generation=0,
        object_key=key,
        attempt=attempt,
        digest=content_digest(values, content),
        identity=identity,
        record=values,
        content=content,
        evidence=evidence,
        seconds=round(seconds, 3),
        read_bytes=transferred.read,
        written_bytes=transferred.written,
    )


def _entry(path: Path) -> FileEntry:
    digests = digests_of(path)
    return FileEntry(size=digests.size, sha256=digests.sha256, blocks=digests.blocks)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(map(partial(fnmatchcase, name), patterns))


def _object_name(manifest: Manifest, name: str) -> str:
    return f"objects/{manifest.object_key}/{manifest.attempt}/{name}"
