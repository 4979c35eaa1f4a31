"""The root of a user's files: their names below it, its git working trees, and the links out of it (not followed)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tasks.data.readers.git_trees import GIT_DIRECTORY, GitTree, read_tree

MANIFEST_NAME = "glm46-data.yaml"
BARE_DIRECTORIES = {"objects", "refs"}


@dataclass(frozen=True)
class SourceRoot:
    """A directory, bucket or dataset: the names of its files, and the address that opens each."""

    where: str
    names: tuple[str, ...]
    addresses: Mapping[str, str]
    trees: tuple[GitTree, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of remote files, as listed by the bucket or dataset."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    licences: Mapping[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    """Directories that are git repositories without a working tree."""
    links_out: tuple[str, ...] = ()
    """`name -> target` of links that lead out of the directory. They are not followed, so that no other file of this
    machine becomes training text."""

    @property
    def note(self) -> str:
        """The words that a message adds where links lead out of the root."""
        links = f"{len(self.links_out)} links lead out of it and are not followed"
        return f" ({links}, such as {self.links_out[0]}: put what they lead to there)" if self.links_out else ""

    def tree_of(self, name: str) -> GitTree | None:
        """The innermost working tree that holds a file."""
        while self.trees and name:
            name = name.rpartition("/")[0]
            if name in self._trees_by_root:
                return self._trees_by_root[name]
        return None

    @cached_property
    def _trees_by_root(self) -> dict[str, GitTree]:
        return {tree.root: tree for tree in self.trees}


def local_root(directory: Path) -> SourceRoot:
    """The files of a directory without hidden ones, and its git working trees. Raises ValueError where a directory
    cannot be read."""
    names, roots, bare, links_out = [], [], [], []
    for parent, directories, files in _directories(directory, links_out):
        if GIT_DIRECTORY in directories or GIT_DIRECTORY in files:
            roots.append(Path(parent).relative_to(directory).as_posix().removeprefix("."))
        if "HEAD" in files and {*directories} >= BARE_DIRECTORIES:
            bare.append(Path(parent).relative_to(directory).as_posix().removeprefix("."))
        names.extend(
            (Path(parent) / name).relative_to(directory).as_posix() for name in files if not name.startswith(".")
        )
    names.sort()
    _refuse_irregular_manifest(directory)
    trees = tuple(read_tree(directory, root) for root in sorted(roots))
    addresses = {name: str((directory / name).absolute()) for name in names}
    return SourceRoot(
        str(directory), tuple(names), addresses, trees, bare=tuple(bare), links_out=tuple(sorted(links_out))
    )


def _refuse_irregular_manifest(directory: Path) -> None:
    """Raises ValueError where the manifest cannot be used: without its roles a benchmark would be training text."""
    path = directory / MANIFEST_NAME
    if path.is_symlink() and not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"{path} is a link out of {directory}, which is not followed: put the file itself there")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, so roles cannot be read from it: move it away")


def _directories(top: Path, links_out: list[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk without hidden directories, each directory once: under its own name where it has one, else under that of
    a link to it.

    Links to files and directories outside of `top` are left out and added to `links_out`.
    """
    seen = {_identity_of(parent) for parent in top.absolute().parents}
    inside = os.path.realpath(top) + os.sep

    def leads_out(parent: str, name: str) -> bool:
        path = os.path.join(parent, name)
        if name.startswith(".") or not os.path.islink(path) or (os.path.realpath(path) + os.sep).startswith(inside):
            return False
        links_out.append(f"{os.path.relpath(path, top)} -> {os.readlink(path)}")
        return True

    waiting = [str(top)]
    while waiting:
        links: list[str] = []
        for start in sorted(waiting):
            for parent, directories, files in os.walk(start, onerror=_refuse_directory):
                identity = _identity_of(parent)
                if identity in seen:
                    directories.clear()
                    continue
                seen.add(identity)
                yield parent, directories, [name for name in files if not leads_out(parent, name)]
                directories[:] = [
                    name for name in directories if not name.startswith(".") and not leads_out(parent, name)
                ]
                links += [path for name in directories if os.path.islink(path := os.path.join(parent, name))]
        waiting = links


def _identity_of(directory: Path | str) -> tuple[int, int]:
    status = os.stat(directory)
    return status.st_dev, status.st_ino


def _refuse_directory(error: OSError) -> None:
    raise ValueError(
        f"directory {error.filename} cannot be read ({error.strerror}): make it readable or move it away"
    ) from error
