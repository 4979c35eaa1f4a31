"""Opens local and remote source files, and decompresses them while they are hashed.

An address is an absolute path, `s3://bucket/key`, or `hf://owner/name@revision/file` (a file of a Hugging Face
dataset, kept in its cache). Runs in executors: imports no Spark.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from configs.files.s3_objects import S3, s3_client
from configs.files.s3_refusals import StoreRefusedError
from tasks.data.readers.stored_streams import DamagedStreamError, HashingReader, MemberReader, ZstdReader

HUGGING_FACE = "hf://"
ETAG = "etag:"
"""Prefix of a digest that is an entity tag or a blob id, not a SHA-256."""
BLOCK_BYTES = 1 << 20
INFLATED_BYTES = 1 << 18
"""Bytes decompressed at once."""
OBJECT_BLOCK_BYTES = 8 << 20
"""Bytes per ranged request: about what one connection carries in a tenth of a second."""
CODECS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
GARBLED: tuple[type[Exception], ...] = (DamagedStreamError,)
"""Exceptions of a damaged stream, raised after its last good byte; the reason `truncated_*` names the codec."""
MAX_ATTEMPTS = 6
"""Attempts at a request whose answer breaks off; botocore itself repeats requests without an answer and throttled
ones."""
FIRST_WAIT_SECONDS = 0.2
CHANGED_STATUS, RANGE_NOT_SATISFIABLE = (404, 412), 416


class UnreadableSourceError(Exception):
    """A disk, a network or a permission keeps a source from being read: its content may be whole."""


class ChangedSourceError(Exception):
    """A source is not the listed one any more."""


def codec_of(name: str) -> str:
    """gzip, bz2, xz or zstd by a file's ending; empty for none."""
    return next((codec for suffix, codec in CODECS.items() if name.lower().endswith(suffix)), "")


def stem_of(name: str) -> str:
    """The name in lower case without the suffix of a compression."""
    lower = name.lower()
    return next((lower.removesuffix(suffix) for suffix in CODECS if lower.endswith(suffix)), lower)


def open_source(address: str, digest: str = "", buffer_bytes: int = OBJECT_BLOCK_BYTES) -> BinaryIO:
    """The bytes as stored, seekable. An object in S3 whose digest is not the listed `digest` raises ChangedSourceError.

    Any other failure raises UnreadableSourceError, here or while the file is read.
    """
    if address.startswith(S3):
        return cast("BinaryIO", io.BufferedReader(ObjectReader(address, digest), buffer_bytes))
    try:
        path = _cached_file(address) if address.startswith(HUGGING_FACE) else address
        return cast("BinaryIO", io.BufferedReader(_LocalFile(path), INFLATED_BYTES))
    except OSError as error:
        raise UnreadableSourceError(f"{address}: {_reason(error)}") from error


def decompressed(name: str, file: HashingReader) -> io.BufferedIOBase:
    """A stream of the decompressed bytes; raises one of GARBLED at a damage."""
    codec = codec_of(name)
    if not codec:
        return file
    return io.BufferedReader(ZstdReader(file) if codec == "zstd" else MemberReader(file, codec), INFLATED_BYTES)


def blocks(stream: io.BufferedIOBase) -> Iterator[bytes]:
    """The rest of a stream, up to its end or a damage."""
    while block := stream.read1(BLOCK_BYTES):
        yield block


class _LocalFile(io.FileIO):
    """A local file whose read errors are UnreadableSourceError: a failing disk does not mean a damaged file."""

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # pyright: ignore[reportAssignmentType]

    def readinto(self, buffer: Any, /) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise UnreadableSourceError(f"{self.name}: {_reason(error)}") from error


class ObjectReader(io.RawIOBase):
    """An object in S3 by ranged requests, each tied to the listed entity tag; credentials are the environment's."""

    def __init__(self, address: str, digest: str) -> None:
        self._address = address
        self._bucket, _, self._key = address.removeprefix(S3).partition("/")
        self._tag = digest.removeprefix(ETAG) if digest.startswith(ETAG) else ""
        self._position = 0
        self._size: int | None = None
        """Size from the first answer, so that a small object costs one request."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END and self._size is None:
            self._size = self._request("head_object")["ContentLength"]
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        if not len(buffer) or (self._size is not None and self._position >= self._size):
            return 0
        data = self._range(self._position, self._position + len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _range(self, begin: int, end: int) -> bytes:
        """The bytes of a range. Raises UnreadableSourceError where every answer breaks off."""
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        for attempt in range(MAX_ATTEMPTS):
            try:
                response = self._request("get_object", Range=f"bytes={begin}-{end - 1}")
                self._size = int(response["ContentRange"].rpartition("/")[2]) if response else begin
                return response["Body"].read() if response else b""
            except (BotoCoreError, HTTPError, OSError) as error:  # HTTPError: the answer of an error broke off
                if attempt == MAX_ATTEMPTS - 1:
                    raise UnreadableSourceError(
                        f"{self._address}: bytes {begin} to {end} broke off {MAX_ATTEMPTS} times: {error}"
                    ) from error
                time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
        raise AssertionError(self._address)

    def _request(self, operation: str, **arguments: str) -> dict[str, Any]:
        """The answer; an empty one for a range that begins where the object ends."""
        from botocore.exceptions import BotoCoreError, ClientError

        arguments |= {"IfMatch": f'"{self._tag}"'} if self._tag else {}
        try:
            return getattr(s3_client(), operation)(Bucket=self._bucket, Key=self._key, **arguments)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status == RANGE_NOT_SATISFIABLE:
                return {}
            if status in CHANGED_STATUS:
                raise ChangedSourceError(self._address) from error
            raise UnreadableSourceError(f"{self._address}: {error}") from error
        except (BotoCoreError, StoreRefusedError) as error:
            raise UnreadableSourceError(f"{self._address}: {error}") from error


def is_listed(file: HashingReader, digest: str) -> bool:
    """Whether a file is the listed one: reads the rest of it. Every request for an object was tied to its tag
    already."""
    if digest.startswith(ETAG):
        return True
    file.drain()
    return file.hexdigest() == digest


def _reason(error: OSError) -> str:
    return error.strerror or (str(error).splitlines() or [type(error).__name__])[0]


def _cached_file(address: str) -> str:
    from huggingface_hub import hf_hub_download

    dataset, _, rest = address.removeprefix(HUGGING_FACE).partition("@")
    revision, _, name = rest.partition("/")
    return hf_hub_download(dataset, name, repo_type="dataset", revision=revision)
