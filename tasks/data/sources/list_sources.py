"""Lists the files that a run reads, with their roles: of a directory, bucket or dataset, or the embedded default.

The roles come from `glm46-data.yaml`. It is not a step, so sources are always listed. Local files are read once, for
their sha256 and the bytes that they decompress to. The listing's digest covers names, sizes, sha256 and roles, so it
is the first input of the chain. Absolute paths are not in it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from infra.step import digest_of
from tasks.data.readers.git_trees import GIT_COMMITS, GIT_DIRECTORY, commits_digest
from tasks.data.readers.json_lines import MAX_LINE_BYTES
from tasks.data.readers.source_bytes import codec_of
from tasks.data.records.documents import CODE
from tasks.data.sources.data_directory import RoleEntry, assign_roles, format_of, held_out_files, record_format_of
from tasks.data.sources.embedded_sources import package_descriptions, pydoc_topics, standard_library
from tasks.data.sources.globs import named_by
from tasks.data.sources.held_out_splits import is_held_out
from tasks.data.sources.remote_sources import dataset_and_file, is_remote, remote_files
from tasks.data.sources.source_digests import digest_and_sizes
from tasks.data.sources.source_root import MANIFEST_NAME, SourceRoot, local_root

EMBEDDED_CODE = "python"
TYPICAL_RATIO = {"gzip": 4, "bz2": 5, "xz": 5, "zstd": 4}
"""Decompressed bytes of text per stored byte, by codec: remote files are not read to measure their size."""
TYPICAL_COMMIT_BYTES = 4000
REPORTED_BYTES = 1 << 30
"""Bytes between two reports of progress."""
NUM_ENDINGS = 6

CHAT_ROLES = ("sft", "prompts", "evaluation")
"""Roles that a run reads whose phases read only conversations."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class SourceFile:
    """One file that may be read."""

    name: str
    """Relative to its root: the stable part of every document id."""
    path: str
    """Absolute path, or the address of an object or of a dataset's file: for reading only."""
    sha256: str
    """Digest of the content; for an object in S3 its entity tag (`etag:...`), since hashing would download the
    corpus."""
    size: int
    num_text_bytes: int
    """Bytes after decompression, without lines that are too long for a record; estimated for remote files."""
    role: str
    format: str
    domain: str
    lang: str
    text: tuple[str, ...]
    kind: str
    label: str
    licence: str
    collection: str
    """The group to which limits per source apply: the role entry's glob, or the top directory."""
    repository: str = ""
    """Package or top directory of a file of source code; empty where it belongs to none or holds many records."""
    repository_path: str = ""
    """Path in its repository, as imports name it."""
    max_commits: int = 0


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


def list_sources(
    data: str | Path | None,
    report: Report | None = None,
    needed: str = "pretrain",
    max_record_bytes: int = MAX_LINE_BYTES,
) -> SourceListing:
    """The sources of a directory, `s3://bucket/prefix` or `hf://owner/name`, or the embedded default for None.

    `report` gets a message about files that are not read, and one per hashed gigabyte. `needed` is sft where the run
    reads only conversations: other text is not listed. A line above `max_record_bytes`, which ingestion rejects, is no
    text. Raises ValueError if no file has the role `needed`.
    """
    if data is None:
        return _embedded_listing()
    root = _root_of(data)
    roles = assign_roles(root, needed)
    if needed == "sft":
        roles = [(name, entry) for name, entry in roles if entry.role in CHAT_ROLES]
    if report is not None:
        _report_unread(root, {name for name, _ in roles}, report)
        if root.links_out:
            report(f"sources of {root.where}:{root.note}")
    files = _hashed_files(root, roles, report, max_record_bytes)
    if needed == "prompts" and not any(file.role == needed for file in files):
        raise ValueError(
            f"{root.where} holds no seed problems{root.note}: give their files the role prompts and the kind math in "
            f"its glm46-data.yaml, "
            "as in `- {files: problems.jsonl, role: prompts, kind: math}`"
        )
    if needed == "sft" and not any(file.role in ("sft", "prompts") for file in files):
        raise ValueError(
            f"{data} holds no conversations{root.note}: name a .jsonl (one conversation per line), .json (an array of "
            "them), .csv or .parquet file, or a directory of .jsonl and .parquet files (.gz, .bz2, .xz and .zst are "
            f"read as well), or give files the role sft in its {MANIFEST_NAME}"
        )
    if needed == "pretrain" and not any(file.role == needed for file in files):
        raise ValueError(
            f"{root.where} holds no text to train on{root.note}: put .txt, .md, .html, .jsonl, .parquet, .warc or "
            f"source files there (.gz, .bz2, .xz and .zst are read as well), name one .csv or .json file itself, or "
            f"give files the role pretrain in its {MANIFEST_NAME}"
        )
    return SourceListing(files)


def list_named(data: str, names: Mapping[str, str]) -> SourceListing:
    """Those files of a data directory that have these names and any role but ignore; only they are read. `names` maps
    each, which may be a glob, to the benchmark that reads it. Test and validation splits have the role evaluation where
    there is no manifest. Raises ValueError for a name that is not among them."""
    root = _root_of(data)
    wanted = {name: named_by(name, root.addresses) for name in names}
    meant = set().union(*wanted.values())
    if MANIFEST_NAME not in root.addresses:
        roles = _roles_by_split(root, meant)
    else:
        roles = [(name, entry) for name, entry in assign_roles(root, "evaluation") if name in meant]
    given = {name for name, _ in roles}
    absent = sorted(name for name, found in wanted.items() if not found & given)
    if absent:
        raise ValueError(
            f"{root.where} has no file {absent[0]}{root.note}, or {MANIFEST_NAME} gives it no role: add the file with "
            f"the role evaluation, which benchmark {names[absent[0]]} reads, or name a suite without it"
        )
    return SourceListing(_hashed_files(root, roles, None))


def list_hub_files(addresses: Mapping[str, str]) -> SourceListing:
    """The files of datasets of the hub with these addresses, `hf://owner/name[@revision]/file`, which are their names.
    `addresses` maps each, whose file may be a glob, to the benchmark that reads it. Those of test and validation splits
    have the role evaluation. Raises ValueError for a file that is not there, and where the hub does not answer."""
    by_dataset: dict[str, dict[str, str]] = {}
    for address in addresses:
        dataset, name = dataset_and_file(address)
        by_dataset.setdefault(dataset, {})[name] = address
    files: list[SourceFile] = []
    for dataset, wanted in by_dataset.items():
        benchmark = addresses[next(iter(wanted.values()))]
        try:
            root = _root_of(dataset)
        except ValueError as error:
            raise ValueError(f"benchmark {benchmark}: {error} in a suite of your own") from error
        found = {name: named_by(name, root.addresses) for name in wanted}
        listed = _hashed_files(root, _roles_by_split(root, set().union(*found.values())), None)
        given = {file.name for file in listed}
        if absent := sorted(name for name, meant in found.items() if not meant & given):
            raise ValueError(f"benchmark {benchmark}: {dataset} has no file {absent[0]}: correct the suite's address")
        files += [replace(file, name=f"{dataset}/{file.name}") for file in listed]
    return SourceListing(tuple(sorted(files, key=lambda file: file.name)))


def _roles_by_split(root: SourceRoot, names: Collection[str]) -> list[tuple[str, RoleEntry]]:
    """Training never reads the held-out splits, so they may be evaluated on."""
    held_out = held_out_files(root)
    return [
        (name, RoleEntry(name, "evaluation" if name in held_out else "pretrain", form))
        for name in root.names
        if name in names and (form := format_of(name) or record_format_of(name))
    ]


def _report_unread(root: SourceRoot, read: set[str], report: Report) -> None:
    """Report the files without a role: a corpus with an unknown ending would otherwise be left out silently."""
    unread = [name for name in root.names if name not in read and name != MANIFEST_NAME]
    if unread:
        endings = Counter("".join(Path(name).suffixes[-2:]) or "no ending" for name in unread).most_common(NUM_ENDINGS)
        counts = ", ".join(f"{ending} {count}" for ending, count in endings)
        splits = [name for name in unread if is_held_out(name)]
        named = f"; {len(splits)} named as test or validation splits, such as {splits[0]}" if splits else ""
        report(
            f"sources: {len(unread)} of {len(root.names)} files are not read ({counts}; for example {unread[0]}"
            f"{named}): {MANIFEST_NAME} gives roles"
        )


def _root_of(data: str | Path) -> SourceRoot:
    if is_remote(str(data)):
        files = remote_files(str(data))
        return SourceRoot(
            str(data),
            tuple(file.name for file in files),
            {file.name: file.address for file in files},
            (),
            {file.name: file.digest for file in files},
            {file.name: file.size for file in files},
            {file.name: file.licence for file in files},
        )
    if Path(data).is_file():
        return SourceRoot(str(Path(data).parent), (Path(data).name,), {Path(data).name: str(Path(data).absolute())})
    if not Path(data).is_dir():
        raise ValueError(
            f"data directory {data} does not exist: name an existing directory or file with --data, or s3:// or hf://"
        )
    return local_root(Path(data))


def _embedded_listing() -> SourceListing:
    code = RoleEntry(files=EMBEDDED_CODE, role="pretrain", format="text", domain=CODE, licence="PSF-2.0")
    topics = RoleEntry(
        files="pydoc", role="pretrain", format="pydoc_topics", domain="web", lang="en", licence="PSF-2.0"
    )
    packages = RoleEntry(files="packages", role="pretrain", format="package_metadata", domain="web", lang="en")
    listed = [(name, path, code) for name, path in standard_library()]
    listed += [(*pydoc_topics(), topics)]
    listed += [(name, path, packages) for name, path in package_descriptions()]
    listed.sort(key=lambda item: item[0])
    root = SourceRoot(
        "Python", tuple(name for name, _, _ in listed), {name: str(path.absolute()) for name, path, _ in listed}
    )
    return SourceListing(_hashed_files(root, [(name, entry) for name, _, entry in listed], None))


def _hashed_files(
    root: SourceRoot, roles: list[tuple[str, RoleEntry]], report: Report | None, max_record_bytes: int = MAX_LINE_BYTES
) -> tuple[SourceFile, ...]:
    """One thread per core: hashing and decompressing release Python's lock."""
    sizes = {
        name: _size_of(root.addresses[name]) for name, _ in roles if name in root.addresses and name not in root.sizes
    }
    total, done, reported, files = sum(sizes.values()), 0, 0, []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file in pool.map(lambda item: _source_file(root, *item, max_record_bytes=max_record_bytes), roles):
            files.append(file)
            done += file.size
            if report is not None and done - reported >= REPORTED_BYTES:
                report(f"sources: {done / 1e9:.1f} of {total / 1e9:.1f} GB hashed")
                reported = done
    return tuple(files)


def _size_of(address: str) -> int:
    """Raises ValueError for a broken link, for a pipe (reading it could block for ever), and for a name that is not
    UTF-8: Python reads its bytes as lone surrogates, which neither ids nor tables can hold."""
    path = Path(address)
    if any("\ud800" <= character <= "\udfff" for character in address):
        raise ValueError(f"source {os.fsencode(address)!r}: the name is not UTF-8: rename it")
    if not path.is_file():
        kind = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "no regular file"
        raise ValueError(f"source {address} is {kind}: remove it, or give it the role ignore")
    return path.stat().st_size


def _source_file(root: SourceRoot, name: str, entry: RoleEntry, max_record_bytes: int) -> SourceFile:
    tree = root.tree_of(name)
    repository, repository_path = _repository_of(name, entry)
    if tree is not None and entry.format in ("text", GIT_COMMITS):
        is_code = entry.domain == CODE
        repository = tree.name if is_code or entry.format == GIT_COMMITS else ""
        repository_path = name.removeprefix(f"{tree.root}/") if is_code else ""
    path, digest, size, num_text_bytes = _measure(root, name, entry, max_record_bytes)
    return SourceFile(
        name=name,
        path=path,
        sha256=digest,
        size=size,
        num_text_bytes=num_text_bytes,
        role=entry.role,
        format=entry.format,
        domain=entry.domain,
        lang=entry.lang,
        text=entry.text,
        kind=entry.kind,
        label=entry.label,
        licence=entry.licence or root.licences.get(name, "") or (tree.licence if tree is not None else ""),
        collection=entry.files,
        repository=repository,
        repository_path=repository_path,
        max_commits=entry.commits if entry.format == GIT_COMMITS else 0,
    )


def _measure(root: SourceRoot, name: str, entry: RoleEntry, max_record_bytes: int) -> tuple[str, str, int, int]:
    """(address, digest, bytes, bytes after decompression)."""
    if entry.format == GIT_COMMITS:
        tree = root.tree_of(name.removesuffix(GIT_DIRECTORY) + "x")
        assert tree is not None, name
        return tree.path, commits_digest(tree.head, entry.commits), 0, entry.commits * TYPICAL_COMMIT_BYTES
    address = root.addresses[name]
    if name in root.digests:
        size = root.sizes[name]
        return address, root.digests[name], size, size * TYPICAL_RATIO.get(codec_of(name), 1)
    try:
        return address, *digest_and_sizes(Path(address), name, entry, max_record_bytes)
    except OSError as error:
        raise ValueError(
            f"source {address} cannot be read ({error.strerror}): make it readable or remove it"
        ) from error


def _repository_of(name: str, entry: RoleEntry) -> tuple[str, str]:
    """(repository, path in it): the top-level package below `python/` for the embedded library, else the top
    directory."""
    if entry.domain != CODE or entry.format != "text":
        return "", ""
    root, path = EMBEDDED_CODE, name.removeprefix(f"{EMBEDDED_CODE}/")
    if entry.files != EMBEDDED_CODE:
        root, path = "", name
    package, _, rest = path.partition("/")
    return (f"{root}/{package}".lstrip("/"), path) if rest else ("", path)
