"""The store in a bucket: a commit is a PUT with If-None-Match. Endpoint and credentials come from the environment."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from configs.files.atomic_files import replacing
from infra.home import Home
from infra.storage.store import Store

T = TypeVar("T")
PROBE = "conditional-create"
"""An empty object that every store holds."""
MAX_ATTEMPTS = 8
FIRST_WAIT_SECONDS = 0.1


class S3Store(Store):
    """Objects under s3://bucket/prefix; a commit is a PUT with If-None-Match: *. Endpoint and credentials come from the
    environment."""

    def __init__(self, uri: str, home: Home) -> None:
        import boto3
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            IncompleteReadError,
            ParamValidationError,
            ReadTimeoutError,
            ResponseStreamingError,
        )
        from urllib3.exceptions import HTTPError

        super().__init__(uri.rstrip("/"), home)
        self.bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self._client_error = ClientError
        self._broken_answers = (IncompleteReadError, ReadTimeoutError, ResponseStreamingError, HTTPError)
        home.cache_dir.mkdir(parents=True, exist_ok=True)
        try:
            self.client = boto3.client("s3")
            self.client.head_bucket(Bucket=self.bucket)
        except ParamValidationError as error:
            raise ValueError(f"store {uri} names no bucket: write s3://bucket/prefix") from error
        except (BotoCoreError, ClientError) as error:
            raise ValueError(
                f"store {uri} cannot be reached ({error}): check the bucket, AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID "
                f"and AWS_DEFAULT_REGION"
            ) from error

        self._refuse_overwriting()

    def _refuse_overwriting(self) -> None:
        """Some servers ignore If-None-Match: of two runs each would believe in a commit of its own."""
        if self._create(PROBE, b"") and self._create(PROBE, b""):
            raise ValueError(
                f"store {self.uri}: the server ignores If-None-Match, on which commits rest: name another store, or "
                f"update it"
            )

    def _missing(self, error: Exception) -> bool:
        return isinstance(error, self._client_error) and error.response["Error"]["Code"] in ("404", "NoSuchKey")  # pyright: ignore

    def _read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"].read()
            except self._client_error as error:
                if self._missing(error):
                    return None
                raise

        return self._until_whole(read)

    def _until_whole(self, request: Callable[[], T]) -> T:
        """The client repeats a request that fails, but not one whose answer breaks off, also that of an error."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return request()
            except self._broken_answers:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
        raise AssertionError(self.uri)

    def _create(self, name: str, data: bytes) -> bool:
        for attempt in range(MAX_ATTEMPTS):
            try:
                self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=data, IfNoneMatch="*")
                return True
            except self._client_error as error:
                code = error.response["Error"]["Code"]
                if code in ("PreconditionFailed", "412"):
                    return False
                # Another PUT is under way, which may fail yet: neither of both exists so far.
                if code not in ("ConditionalRequestConflict", "409") or attempt == MAX_ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
        raise AssertionError(name)

    def _size(self, name: str) -> int | None:
        try:
            return self.client.head_object(Bucket=self.bucket, Key=self.prefix + name)["ContentLength"]
        except self._client_error as error:
            if self._missing(error):
                return None
            raise

    def _fetch(self, name: str) -> Path:
        path = self.home.cache_dir / name.removeprefix("objects/")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with replacing(path) as temporary:
                    target = str(temporary)
                    self._until_whole(lambda: self.client.download_file(self.bucket, self.prefix + name, target))
            except self._client_error as error:
                if not self._missing(error):
                    raise
        return path

    def write_beside(self, name: str, data: bytes) -> None:
        """Put a file that no manifest names beside committed ones; one that is there stays."""
        self._create(name, data)

    @property
    def staging_root(self) -> Path:
        return self.home.cache_dir

    def _publish(self, key: str, attempt: str, names: list[str]) -> None:
        try:
            for name in names:
                self._upload(self.attempt_dir(key, attempt) / name, f"objects/{key}/{attempt}/{name}")
        finally:
            self._abort_uploads(f"{self.prefix}objects/{key}/{attempt}/")

    def _upload(self, path: Path, name: str) -> None:
        """An upload whose last answer is lost is complete, and asked again the server knows no such upload. Nobody else
        writes there."""
        from boto3.exceptions import S3UploadFailedError

        try:
            self.client.upload_file(str(path), self.bucket, self.prefix + name)
        except S3UploadFailedError:
            if self._size(name) != path.stat().st_size:
                raise

    def _abort_uploads(self, prefix: str) -> None:
        """End uploads in parts that were begun twice because an answer was lost: their parts cost storage until
        somebody does."""
        try:
            pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            for upload in [entry for page in pages for entry in page.get("Uploads", [])]:
                self.client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except self._client_error as error:
            # To list uploads is a permission of its own, and not every server can; there the bucket's rule for old
            # uploads ends them.
            if error.response["Error"]["Code"] not in ("AccessDenied", "NotImplemented", "MethodNotAllowed"):
                raise

    def _remove_below(self, key: str, attempt: str, name: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt) / name, ignore_errors=True)
        self._delete(f"{self.prefix}objects/{key}/{attempt}/{name}/")

    def _discard(self, key: str, attempt: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt), ignore_errors=True)
        prefix = f"{self.prefix}objects/{key}/{attempt}/"
        self._delete(prefix)

    def _delete(self, prefix: str) -> None:
        self._abort_uploads(prefix)
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for entry in page.get("Contents", []):
                self.client.delete_object(Bucket=self.bucket, Key=entry["Key"])

    def manifest_names(self) -> list[str]:
        prefix = f"{self.prefix}manifests/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        keys = (entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", []))
        return sorted(key for key in keys if key.endswith(".json"))
