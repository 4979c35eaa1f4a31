"""Named objects, in a directory or a bucket: what commits, leases and listings are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SHARED_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION")
"""Where the store is, for executors and nodes of jobs. Their credentials are their own."""


class StoredObject(NamedTuple):
    """What a listing says of an object."""

    name: str
    size: int
    modified: float
    """Seconds by the clock of the store, as `ObjectStore.now`."""


class Upload(NamedTuple):
    """An upload in parts that was begun and not ended: its parts cost storage."""

    name: str
    identifier: str
    num_bytes: int
    modified: float


class ObjectStore(ABC):
    """Reads, conditional writes and listings of small objects."""

    uri: str

    @abstractmethod
    def _read(self, name: str) -> bytes | None:
        """Content of a small object, None if there is none."""

    @abstractmethod
    def _create(self, name: str, data: bytes) -> bool:
        """Create an object durably unless it exists; False if it does."""

    @abstractmethod
    def read_version(self, name: str) -> tuple[bytes, str] | None:
        """Content of a small object and the version it is, None if there is none."""

    @abstractmethod
    def replace_version(self, name: str, data: bytes, version: str | None) -> str | None:
        """Write an object if it is the given version, or absent for None; the new version, None where it is not."""

    @abstractmethod
    def delete_version(self, name: str, version: str) -> bool:
        """Remove an object if it is the given version; False where it is not."""

    @abstractmethod
    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose names begin so, in the order of their names."""

    @abstractmethod
    def delete_objects(self, names: Iterable[str]) -> None:
        """Remove objects; those that are missing count as removed."""

    @abstractmethod
    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """The uploads in parts of the objects whose names begin so."""

    @abstractmethod
    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload; one that has ended is left as it is."""

    @abstractmethod
    def now(self) -> float:
        """The time by the clock that `StoredObject.modified` was taken from."""

    @abstractmethod
    def _sha256(self, name: str) -> str | None:
        """sha256 of an object's bytes, None if there is none."""
