"""Steps: declaration, key and artifact.

A step is a plain function `(inputs, recipe, resources, output) -> record`. Its key is the sha256 of everything that
may change its content: name, recipe, input digests, code digest, versions of the content-affecting distributions.
`resources` never enter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from configs.files.stored_files import StoredFile, given_file, writing
from infra.code_digest import code_digest


class Record(BaseModel):
    """Base class of a step's result: a few names, counts, digests and metrics. Deterministic: it enters the artifact's
    digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def shown(self) -> dict[str, object]:
        """The values by name, in the order in which they are shown to a person."""
        return dict(self)


R = TypeVar("R", bound=Record)
JOB_EVIDENCE_DIR = "job"
"""What a step that ran as a job has beside its own evidence: what the launcher was given, logs."""
MetricRows = Sequence[tuple[int, Mapping[str, float]]]
"""Optimizer step and its metrics, in order."""
LogMetrics = Callable[[MetricRows], None]


class Digested(Protocol):
    """Anything that may be the input of a step."""

    @property
    def digest(self) -> str: ...


class FileEntry(Record):
    size: int
    """Bytes."""
    sha256: str
    blocks: tuple[str, ...] = ()
    """Digest of each block (file_digests.py), which readers verify; none for a file of one block."""


class Manifest(Record):
    """The description of one committed artifact: the only cache entry there is."""

    key: str
    generation: int
    """0, or higher where an earlier manifest of this key failed verification."""
    object_key: str
    """Object directory: objects/<object_key>/<attempt>/; the key itself unless the work was adopted."""
    attempt: str
    digest: str
    """sha256 over record and content files under their canonical names."""
    identity: dict[str, Any]
    """The parts that were hashed into the key."""
    record: dict[str, Any]
    content: dict[str, FileEntry]
    evidence: dict[str, FileEntry]
    seconds: float
    """Wall time of the computing run: evidence."""
    fence: int = 0
    """Fencing number of the lease under which it was committed (infra/storage/lease.py): evidence."""
    read_bytes: int = 0
    """Bytes of stored files that the step's own process read: evidence. Executors and ranks are not counted."""
    written_bytes: int = 0
    """Bytes of its files that the step's own process wrote: evidence."""
    adopted_from: str = ""
    """Key under older code whose work was taken over, and why: `OLD: reason`."""

    @property
    def step(self) -> str:
        return self.identity["step"]


@runtime_checkable
class Reader(Protocol):
    """The methods of a store that artifacts need."""

    def local_path(self, manifest: Manifest, name: str) -> Path: ...

    def uri_of(self, manifest: Manifest, name: str) -> str: ...

    def committed_at(self, manifest: Manifest) -> float: ...


@dataclass(frozen=True)
class Artifact(Generic[R]):
    """A committed output of a step: what consumers get as input."""

    manifest: Manifest
    record: R
    reader: Reader = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def committed_at(self) -> float:
        """When it was committed, in seconds since the epoch by the clock of the store."""
        return self.reader.committed_at(self.manifest)

    def path(self, name: str) -> Path:
        """Local path of one file, its checksum verified. Raises CorruptArtifactError."""
        return self.reader.local_path(self.manifest, name)

    def paths(self, pattern: str) -> list[Path]:
        """Local paths of the files that match a shell pattern, in the order of their names; none is an error."""
        return [self.path(name) for name in self._names(pattern)]

    def file(self, name: str) -> StoredFile:
        """One file, for executors."""
        (file,) = self.files(name)
        return file

    def files(self, pattern: str) -> list[StoredFile]:
        """The files that match, for executors: where each is and what it must hold. Nothing is read here."""
        entries = {**self.manifest.content, **self.manifest.evidence}
        return [
            StoredFile(self.reader.uri_of(self.manifest, name), entry.size, entry.sha256, entry.blocks)
            for name in self._names(pattern)
            for entry in [entries[name]]
        ]

    def _names(self, pattern: str) -> list[str]:
        names = sorted(
            name for name in {**self.manifest.content, **self.manifest.evidence} if fnmatchcase(name, pattern)
        )
        assert names, f"step {self.manifest.step} left no file {pattern}"
        return names

    def directory(self, name: str) -> Path:
        """Local directory `name` with every file below it verified."""
        prefix = f"{name}/"
        names = [entry for entry in {**self.manifest.content, **self.manifest.evidence} if entry.startswith(prefix)]
        assert names, f"step {self.manifest.step} has no directory {name}"
        parents = {self.path(entry).parents[len(Path(entry[len(prefix) :]).parts) - 1] for entry in names}
        assert len(parents) == 1, parents
        return parents.pop()


@dataclass(frozen=True)
class Progress:
    """How far a running step has come; `total` 0 means not known, an empty `unit` that it has not begun."""

    done: float
    total: float
    unit: str
    message: str = ""
    figure: float | None = None
    """A number to watch, for example the loss: its course is drawn."""


@dataclass(frozen=True)
class Output:
    """Where a running step writes, and how it reports."""

    directory: Path
    """Local staging directory of this attempt, for what this process writes itself."""
    uri: str
    """Address of this attempt in the store, for what executors write: `directory` where the store is local."""
    work_dir: Path
    """Resumable progress of this key; survives crashes."""
    key: str
    report: Callable[[Progress], None]
    """Shows progress in the terminal and in the Prefect UI."""
    say: Callable[[str], None]
    """Prints a sentence that stays, in the terminal and in the log of the flow run."""
    log_metrics: LogMetrics
    """Forwards the metrics of optimizer steps to the tracker."""
    remove_below: Callable[[str], None]
    """The store's side of `remove`."""
    written: dict[str, StoredFile] = field(default_factory=dict)
    """Files of executors by name, described by those that wrote them: the commit reads none of them again."""

    def add(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Make files that executors wrote below `uri` part of the artifact; gives them in the order of their names."""
        named = {file.uri.removeprefix(f"{self.uri}/"): file for file in files}
        self.written.update(named)
        return [named[name] for name in sorted(named)]

    def share(self, name: str) -> StoredFile:
        """Make a file that this process wrote readable for executors before the commit."""
        path = self.path(name)
        if str(self.directory) == self.uri:
            return given_file(path)
        with writing(f"{self.uri}/{name}") as (file, written), open(path, "rb") as source:
            shutil.copyfileobj(source, file)
        return self.add(written)[0]

    def remove(self, name: str) -> None:
        """Remove everything below a name of this attempt, whoever wrote it."""
        self.remove_below(name)
        for other in [other for other in self.written if other.startswith(f"{name}/")]:
            del self.written[other]

    def path(self, name: str) -> Path:
        """Local path to write `name` to; parent directories are created."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class Step(Generic[R]):
    """A declared step; calling it runs the plain function."""

    function: Callable[..., R]
    content: tuple[str, ...]
    evidence: tuple[str, ...]
    distributions: tuple[str, ...]
    roots: tuple[str, ...]
    data_files: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def record_type(self) -> type[R]:
        """The annotated return type, which must be defined in the step's own module (other hints may be for type
        checkers only)."""
        return self.function.__globals__[self.function.__annotations__["return"]]

    @property
    def code_roots(self) -> tuple[str, ...]:
        """Modules from which the imports of its code are followed."""
        return (self.function.__module__, *self.roots)

    def __call__(self, **arguments: Any) -> R:
        return self.function(**arguments)

    def identity(
        self, recipe: BaseModel | None, inputs: Mapping[str, Digested | None], data_files: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The parts of the key, by name. `data_files` are this call's own (a contract's YAML), beside the declared
        ones."""
        return {
            "step": self.name,
            "recipe": None if recipe is None else recipe.model_dump(mode="json"),
            "inputs": {name: None if value is None else value.digest for name, value in sorted(inputs.items())},
            "code": code_digest(self.code_roots, (*self.data_files, *data_files)),
            "distributions": {name: _installed_version(name) for name in sorted(self.distributions)},
        }


@cache
def _installed_version(distribution: str) -> str:
    return version(distribution)


def step(
    *,
    content: tuple[str, ...],
    evidence: tuple[str, ...] = (),
    distributions: tuple[str, ...] = (),
    roots: tuple[str, ...] = (),
    data_files: tuple[str, ...] = (),
) -> Callable[[Callable[..., R]], Step[R]]:
    """Declare a function as a step.

    content: shell patterns of the deterministic files, which make the digest. evidence: patterns of the files outside
    it (timings, logs). distributions: installed packages whose version may change content. roots: modules beside the
    step's own from which its code digest follows imports (a worker that is started by name). data_files: package files
    it reads, relative to the project root.
    """
    return lambda function: Step(function, content, evidence, distributions, roots, data_files)


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON text of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
