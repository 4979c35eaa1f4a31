"""The store in a local directory: objects are files, a commit is link(2) of a finished temporary file."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Literal

from configs.files.atomic_files import sync_directory, write_durably
from infra.home import Home
from infra.storage.object_store import StoredObject, Upload
from infra.storage.store import Store, hash_file


class LocalStore(Store):
    """Objects are files, a commit is link(2) of a finished temporary file."""

    def __init__(self, root: Path, home: Home, writes: bool = True) -> None:
        """`writes` False opens a store that a run has written, with the right to read it."""
        super().__init__(str(root), home)
        self.root, self.writes = root, writes
        if not writes:
            return
        try:
            for name in ("manifests", "objects", "leases"):
                (root / name).mkdir(parents=True, exist_ok=True)
            self._refuse_without_locks()
        except OSError as error:
            raise ValueError(
                f"store {root} cannot be written ({error.strerror}): free it or name another with --store"
            ) from error

    def _refuse_without_locks(self) -> None:
        """Commits rest on hard links, leases on locks: some network file systems have neither."""
        probe = self.root / "manifests" / f".writable-{uuid.uuid4().hex}"
        linked = probe.with_name(f".linked-{uuid.uuid4().hex}")
        with open(probe, "wb") as file:
            try:
                os.link(probe, linked)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"store {self.root}: its file system has no hard links or no locks ({error.strerror}), on which "
                    f"commits and leases rest: name a directory on another file system, or a bucket, with --store"
                ) from error
            finally:
                linked.unlink(missing_ok=True)
                probe.unlink()

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def _create(self, name: str, data: bytes) -> bool:
        target = self.root / name
        temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        try:
            write_durably(temporary, data)
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target.parent)
        return True

    def read_version(self, name: str) -> tuple[bytes, str] | None:
        """The version of a file is the sha256 of what it holds."""
        with self._held(name, "rb", fcntl.LOCK_SH) as file:
            data = None if file is None else file.read()
        return None if data is None else (data, _version(data))

    def replace_version(self, name: str, data: bytes, version: str | None) -> str | None:
        """The file is written in place: a client of NFS may follow a renamed one to the old content for a minute."""
        if version is None:
            return _version(data) if self._create(name, data) else None
        with self._held(name) as file:
            if file is None or _version(file.read()) != version:
                return None
            if os.pwrite(file.fileno(), data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root / name))
            os.ftruncate(file.fileno(), len(data))
        return _version(data)

    def delete_version(self, name: str, version: str) -> bool:
        with self._held(name) as file:
            if file is None or _version(file.read()) != version:
                return False
            (self.root / name).unlink()
        return True

    @contextmanager
    def _held(
        self, name: str, mode: Literal["rb", "r+b"] = "r+b", lock: int = fcntl.LOCK_EX
    ) -> Iterator[FileIO | None]:
        """An object's file, locked against other processes and machines; None if there is none."""
        try:
            file = open(self.root / name, mode, buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            yield None
            return
        with file:
            fcntl.flock(file, lock)
            yield file if os.fstat(file.fileno()).st_nlink else None  # removed while its lock was waited for

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        directory, _, beginning = prefix.rpartition("/")
        try:
            entries = sorted(os.scandir(self.root / directory), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            name = f"{directory}/{entry.name}".lstrip("/")
            if not entry.name.startswith(beginning):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self.list_objects(f"{name}/")
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield StoredObject(name, found.st_size, found.st_mtime)

    def delete_objects(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return iter(())

    def abort_upload(self, upload: Upload) -> None:
        raise AssertionError(f"{upload.name}: a directory has no uploads")

    def now(self) -> float:
        """By the clock of the file system, which on a network is another machine's; where nothing may be written, by
        this machine's."""
        if not self.writes:
            return time.time()
        probe = self.root / "leases" / f".now-{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _sha256(self, name: str) -> str | None:
        try:
            return hash_file(self.root / name)
        except FileNotFoundError:
            return None

    def _fetch(self, name: str) -> Path:
        return self.root / name

    @property
    def staging_root(self) -> Path:
        return self.root / "objects"

    def _publish(self, key: str, attempt: str, names: list[str]) -> None:
        directory = self.attempt_dir(key, attempt)
        readers = (
            stat.S_IMODE(directory.stat().st_mode) & 0o666
        )  # what the umask leaves; safetensors writes for the owner only
        for name in names:
            with open(directory / name, "rb") as file:
                if os.fstat(file.fileno()).st_nlink == 1:  # another name of it may be a file of the user's
                    os.fchmod(file.fileno(), readers)
                os.fsync(file.fileno())
        for path in {directory, directory.parent, *((directory / name).parent for name in names)}:
            sync_directory(path)

    def _remove_below(self, key: str, attempt: str, name: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt) / name, ignore_errors=True)

    def _discard(self, key: str, attempt: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt), ignore_errors=True)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
