"""Which files a run reads, in which role: a data directory by its `glm46-data.yaml`, or the embedded default. Not a step: always looked up.

The listing's digest covers names, sizes, sha256 and roles, so it is the first input of the chain; absolute paths stay out of it.
"""

from __future__ import annotations

import gzip
import hashlib
import zipfile
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from infra.step import digest_of
from tasks.data.data_directory import RoleEntry, assign_roles
from tasks.data.documents import CODE
from tasks.data.embedded_sources import package_descriptions, pydoc_topics, standard_library

BLOCK_BYTES = 1 << 20
EMBEDDED_CODE = "python"


@dataclass(frozen=True)
class SourceFile:
    """One file that may be read."""

    name: str
    """Relative to its root: the stable part of every document id."""
    path: str
    """Absolute, for reading only."""
    sha256: str
    size: int
    num_text_bytes: int
    """Bytes after decompression."""
    role: str
    format: str
    domain: str
    lang: str
    text: tuple[str, ...]
    kind: str
    label: str
    licence: str
    collection: str
    """The group that ceilings per source look at: the role entry's glob, or the top directory."""
    repository: str = ""
    """Of a file of source code: the package or top directory that it belongs to; empty where it stands alone or holds many records."""
    repository_path: str = ""
    """Its place as imports name it."""


@dataclass(frozen=True)
class SourceListing:
    """All files with a role, sorted by name."""

    files: tuple[SourceFile, ...]

    @property
    def digest(self) -> str:
        """sha256 over the files without their absolute paths."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_of([{key: value for key, value in asdict(file).items() if key != "path"} for file in self.files])


def list_sources(data_dir: Path | None) -> SourceListing:
    """The sources of a data directory, or the embedded default for None. Raises ValueError if there is nothing to train on."""
    if data_dir is None:
        return _embedded_listing()
    if not data_dir.is_dir():
        raise ValueError(f"data directory {data_dir} does not exist or is no directory: name an existing one with --data")
    files = tuple(_source_file(name, data_dir / name, entry) for name, entry in assign_roles(data_dir))
    if not any(file.role == "pretrain" for file in files):
        raise ValueError(
            f"data directory {data_dir} holds no text to train on: put .txt, .md, .jsonl(.gz) or source files in it, "
            "or give files the role pretrain in its glm46-data.yaml"
        )
    return SourceListing(files)


def _embedded_listing() -> SourceListing:
    code = RoleEntry(files=EMBEDDED_CODE, role="pretrain", format="text", domain=CODE, licence="PSF-2.0")
    topics = RoleEntry(files="pydoc", role="pretrain", format="pydoc_topics", domain="web", lang="en", licence="PSF-2.0")
    packages = RoleEntry(files="packages", role="pretrain", format="package_metadata", domain="web", lang="en")
    listed = [(name, path, code) for name, path in standard_library()]
    listed += [(*pydoc_topics(), topics)]
    listed += [(name, path, packages) for name, path in package_descriptions()]
    return SourceListing(tuple(_source_file(name, path, entry) for name, path, entry in sorted(listed, key=lambda item: item[0])))


def _source_file(name: str, path: Path, entry: RoleEntry) -> SourceFile:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"source {path} cannot be read ({error.strerror}): make it readable or remove it") from error
    repository, repository_path = _repository_of(name, entry)
    num_text_bytes = _num_text_bytes(path, entry.format) if entry.role in ("pretrain", "evaluation") else size
    return SourceFile(
        name=name, path=str(path.absolute()), sha256=digest.hexdigest(), size=size, num_text_bytes=num_text_bytes, role=entry.role,
        format=entry.format, domain=entry.domain, lang=entry.lang, text=entry.text, kind=entry.kind, label=entry.label,
        licence=entry.licence, collection=entry.files, repository=repository, repository_path=repository_path,
    )  # fmt: skip


def _repository_of(name: str, entry: RoleEntry) -> tuple[str, str]:
    """Of the embedded library the top-level package, below `python/`; of a data directory the top directory."""
    if entry.domain != CODE or entry.format != "text":
        return "", ""
    root, path = EMBEDDED_CODE, name.removeprefix(f"{EMBEDDED_CODE}/")
    if entry.files != EMBEDDED_CODE:
        root, path = "", name
    package, _, rest = path.partition("/")
    return (f"{root}/{package}".lstrip("/"), path) if rest else ("", path)


def _num_text_bytes(path: Path, form: str) -> int:
    """Bytes after decompression; of a broken archive those before the break."""
    if form == "zip_text":
        try:
            with zipfile.ZipFile(path) as archive:
                return sum(member.file_size for member in archive.infolist())
        except zipfile.BadZipFile:
            return path.stat().st_size
    if path.suffix != ".gz":
        return path.stat().st_size
    total = 0
    try:
        with gzip.open(path) as file:
            while block := file.read(BLOCK_BYTES):
                total += len(block)
    except (EOFError, OSError, zlib.error):
        pass
    return total
