"""The store in a local directory: objects are files, a commit is link(2) of a finished temporary file."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from pathlib import Path

from configs.files.atomic_files import sync_directory, write_durably
from infra.home import Home
from infra.storage.store import Store


class LocalStore(Store):
    """Objects are files, a commit is link(2) of a finished temporary file."""

    def __init__(self, root: Path, home: Home) -> None:
        super().__init__(str(root), home)
        self.root = root
        try:
            (root / "manifests").mkdir(parents=True, exist_ok=True)
            (root / "objects").mkdir(exist_ok=True)
            probe = root / "manifests" / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"store {root} cannot be written ({error.strerror}): free it or name another with --store"
            ) from error

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def _create(self, name: str, data: bytes) -> bool:
        target = self.root / name
        temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        write_durably(temporary, data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync_directory(target.parent)
        return True

    def _size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
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
                os.fchmod(file.fileno(), readers)
                os.fsync(file.fileno())
        for path in {directory, directory.parent, *((directory / name).parent for name in names)}:
            sync_directory(path)

    def _remove_below(self, key: str, attempt: str, name: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt) / name, ignore_errors=True)

    def _discard(self, key: str, attempt: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt), ignore_errors=True)

    def manifest_names(self) -> list[str]:
        return sorted(path.name for path in (self.root / "manifests").glob("*.json"))
