"""Opens source files wherever they lie, hashes and decompresses them while they are read. Runs in executors: imports no Spark.

A place is an absolute path, `s3://bucket/key`, or `hf://owner/name@revision/file` (a file of a Hugging Face dataset, kept in its cache).
"""

from __future__ import annotations

import bz2
import hashlib
import io
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from isal import igzip, isal_zlib

if TYPE_CHECKING:
    from collections.abc import Iterator

S3, HUGGING_FACE = "s3://", "hf://"
ETAG = "etag:"
"""What the digest of an object without a stored SHA-256 begins with: its entity tag in S3 follows."""
BLOCK_BYTES = 1 << 20
INFLATED_BYTES = 1 << 16
"""Decompressed at once: what is lost before a break."""
OBJECT_BLOCK_BYTES = 8 << 20
"""Bytes per ranged request: about what one connection carries in a tenth of a second."""
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
GARBLED: tuple[type[Exception], ...] = (EOFError, OSError, cast("type[Exception]", isal_zlib.error))
"""What a damaged stream raises while it is read; `truncated_*` names the codec."""


class ChangedSourceError(Exception):
    """An object is not the listed one any more."""


def codec_of(name: str) -> str:
    """gzip, bz2 or zstd by a file's ending; empty for none."""
    return next((codec for suffix, codec in CODECS.items() if name.lower().endswith(suffix)), "")


def stem_of(name: str) -> str:
    """The name in lower case without the ending of a compression."""
    lower = name.lower()
    return next((lower.removesuffix(suffix) for suffix in CODECS if lower.endswith(suffix)), lower)


def open_source(place: str, digest: str = "", buffer_bytes: int = OBJECT_BLOCK_BYTES) -> BinaryIO:
    """The bytes as stored, seekable. `digest` as listed: an object in S3 that has another one by now raises ChangedSourceError."""
    if place.startswith(S3):
        return cast("BinaryIO", io.BufferedReader(ObjectReader(place, digest), buffer_bytes))
    if place.startswith(HUGGING_FACE):
        return open(_cached_file(place), "rb")
    return open(place, "rb")


def decompressed(name: str, file: BinaryIO | HashingReader) -> io.BufferedIOBase:
    """A stream of the decompressed bytes; damage raises one of GARBLED where it is met."""
    codec, raw = codec_of(name), cast("BinaryIO", file)
    if codec == "gzip":
        return cast("io.BufferedIOBase", igzip.IGzipFile(fileobj=raw))
    if codec == "bz2":
        return cast("io.BufferedIOBase", bz2.BZ2File(raw))
    if codec == "zstd":
        import pyarrow as pa

        # Arrow's reader goes on over frames, bounds what one read inflates, and raises where the last frame is cut.
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(cast("io.RawIOBase", stream), INFLATED_BYTES)
    return cast("io.BufferedIOBase", raw)


def blocks(stream: io.BufferedIOBase) -> Iterator[bytes]:
    """The rest of a stream."""
    while block := stream.read(BLOCK_BYTES):
        yield block


class HashingReader(io.BufferedIOBase):
    """A forward-only file that hashes what is read from it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._raw.read(-1 if size is None else size)
        self._digest.update(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int | None = -1, /) -> bytes:
        data = self._raw.readline(-1 if size is None else size)
        self._digest.update(data)
        return data

    def drain(self) -> None:
        """Read what is left, so that the digest is the whole file's."""
        while self.read(BLOCK_BYTES):
            pass

    def hexdigest(self) -> str:
        """sha256 of what was read."""
        return self._digest.hexdigest()


class ObjectReader(io.RawIOBase):
    """An object in S3 by ranged requests, each tied to the listed entity tag; credentials are the environment's."""

    def __init__(self, place: str, digest: str) -> None:
        self._bucket, _, self._key = place.removeprefix(S3).partition("/")
        self._tag = digest.removeprefix(ETAG) if digest.startswith(ETAG) else ""
        self._position = 0
        self._size = self._request("head_object")["ContentLength"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = self._request("get_object", Range=f"bytes={self._position}-{end - 1}")["Body"].read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _request(self, operation: str, **arguments: str) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        arguments |= {"IfMatch": f'"{self._tag}"'} if self._tag else {}
        try:
            return getattr(s3_client(), operation)(Bucket=self._bucket, Key=self._key, **arguments)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (404, 412):
                raise ChangedSourceError(f"{S3}{self._bucket}/{self._key}") from error
            raise


def is_listed(file: HashingReader, digest: str) -> bool:
    """Whether the file that was read to its end is the listed one. Every request for an object was tied to its tag already."""
    return digest.startswith(ETAG) or file.hexdigest() == digest


@cache
def s3_client() -> Any:
    """One client per process: making it takes longer than a small object."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 8}))


def _cached_file(place: str) -> str:
    from huggingface_hub import hf_hub_download

    dataset, _, rest = place.removeprefix(HUGGING_FACE).partition("@")
    revision, _, name = rest.partition("/")
    return hf_hub_download(dataset, name, repo_type="dataset", revision=revision)
