"""Objects in S3, read by range and written whole: one client per process.

Endpoint and credentials come from the environment. The client repeats a request that fails. It does not repeat one
whose answer breaks off; `until_whole` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from configs.files.s3_refusals import explain_refusals, refuse_without_credentials

T = TypeVar("T")
S3 = "s3://"
MAX_ATTEMPTS = 8
FIRST_WAIT_SECONDS = 0.1


@cache
def s3_client() -> Any:
    """One client per process: making it takes longer than a small object. Raises StoreRefusedError where this host has
    no credentials, and later where the server refuses them."""
    import boto3
    from botocore.config import Config

    refuse_without_credentials(session := boto3.Session())
    client = session.client("s3", config=Config(retries={"mode": "standard", "max_attempts": MAX_ATTEMPTS}))
    explain_refusals(client)
    return client


@cache
def broken_answers() -> tuple[type[Exception], ...]:
    """What an answer that breaks off raises, also the answer of an error."""
    from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
    from urllib3.exceptions import HTTPError

    return (IncompleteReadError, ReadTimeoutError, ResponseStreamingError, HTTPError)


def until_whole(request: Callable[[], T]) -> T:
    """The result of a request, made again where its answer breaks off."""
    for attempt in range(MAX_ATTEMPTS - 1):
        try:
            return request()
        except broken_answers():
            time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
    return request()


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Of s3://bucket/key."""
    bucket, _, key = uri.removeprefix(S3).partition("/")
    return bucket, key


def read_range(uri: str, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of an object, none where it ends before. Raises FileNotFoundError."""
    from botocore.exceptions import ClientError

    bucket, key = bucket_and_key(uri)
    with _missing_is_no_file(uri):
        try:
            return until_whole(
                lambda: s3_client().get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}")["Body"].read()
            )
        except ClientError as error:
            if error.response["Error"]["Code"] == "InvalidRange":
                return b""
            raise


def download(uri: str, path: Path) -> None:
    """Write an object to a local file. Raises FileNotFoundError."""
    bucket, key = bucket_and_key(uri)
    with _missing_is_no_file(uri):
        until_whole(lambda: s3_client().download_file(bucket, key, str(path)))


@contextmanager
def _missing_is_no_file(uri: str) -> Iterator[None]:
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if _is_missing(error):
            raise FileNotFoundError(uri) from error
        raise


def _is_missing(error: Any) -> bool:
    return error.response["Error"]["Code"] in ("404", "NoSuchKey")


def upload(path: Path, uri: str) -> None:
    """Put a file, whole or not at all. An upload whose last answer is lost is complete: the server, asked again, knows
    no such upload."""
    from boto3.exceptions import S3UploadFailedError

    bucket, key = bucket_and_key(uri)
    try:
        s3_client().upload_file(str(path), bucket, key)
    except S3UploadFailedError:
        if _size(bucket, key) != path.stat().st_size:
            raise


def _size(bucket: str, key: str) -> int | None:
    from botocore.exceptions import ClientError

    try:
        return s3_client().head_object(Bucket=bucket, Key=key)["ContentLength"]
    except ClientError as error:
        if _is_missing(error):
            return None
        raise
