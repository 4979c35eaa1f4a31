"""The store in a bucket: a commit is a PUT with If-None-Match. Endpoint and credentials come from the environment."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from configs.files.atomic_files import replacing
from configs.files.s3_objects import FIRST_WAIT_SECONDS, MAX_ATTEMPTS, until_whole
from configs.files.s3_refusals import StoreRefusedError, explain_refusals, refuse_other_region
from infra.home import Home
from infra.storage.manifest_store import MANIFESTS
from infra.storage.object_store import StoredObject, Upload
from infra.storage.parallel import NUM_THREADS
from infra.storage.store import Store

PROBE = "conditional-create"
"""An empty object that every store holds."""
NO_VERSION = '"00000000000000000000000000000000"'
"""An ETag that no object has."""
MAX_DELETED_AT_ONCE = 1000
"""Objects that one request may remove."""
READ_BYTES = 1 << 20


class S3Store(Store):
    """Objects under s3://bucket/prefix; a commit is a PUT with If-None-Match: *. Endpoint and credentials come from the
    environment."""

    def __init__(self, uri: str, home: Home, writes: bool = True) -> None:
        """`writes` False opens a store that a run has written, with the right to read it. Raises ValueError for another
        place."""
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

        super().__init__(uri.rstrip("/"), home)
        self.bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self._client_error = ClientError
        try:
            retries = {"mode": "standard", "max_attempts": MAX_ATTEMPTS}
            self.client = boto3.client("s3", config=Config(max_pool_connections=NUM_THREADS, retries=retries))
            explain_refusals(self.client)
            region = self.client.head_bucket(Bucket=self.bucket).get("BucketRegion", "")
        except ParamValidationError as error:
            raise ValueError(f"store {uri} names no bucket: write s3://bucket/prefix") from error
        except (BotoCoreError, ClientError) as error:
            raise ValueError(
                f"store {uri} cannot be reached ({error}): check the bucket, AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID "
                f"and AWS_DEFAULT_REGION"
            ) from error
        refuse_other_region(self.uri, region, self.client.meta.region_name)
        if writes:
            home.cache_dir.mkdir(parents=True, exist_ok=True)
            self._refuse_overwriting()
        elif not any(True for prefix in (MANIFESTS, PROBE) for _ in self.list_objects(prefix)):
            raise ValueError(f"{self.uri} is no store: name the one that the runs were made with")

    def _refuse_overwriting(self) -> None:
        """Some servers ignore If-None-Match or If-Match: of two runs each would believe in a commit, or a lease, of its
        own."""
        ignored = "If-None-Match" if self._create(PROBE, b"") and self._create(PROBE, b"") else ""
        if not ignored and self.replace_version(PROBE, b"", NO_VERSION) is not None:
            ignored = "If-Match"
        if ignored:
            raise ValueError(
                f"store {self.uri}: the server ignores {ignored}, on which commits and leases rest: name another "
                f"store, or update it"
            )

    def _missing(self, error: Exception) -> bool:
        return isinstance(error, self._client_error) and error.response["Error"]["Code"] in ("404", "NoSuchKey")  # pyright: ignore

    def _read(self, name: str) -> bytes | None:
        found = self.read_version(name)
        return None if found is None else found[0]

    def _create(self, name: str, data: bytes) -> bool:
        return self.replace_version(name, data, None) is not None

    def read_version(self, name: str) -> tuple[bytes, str] | None:
        """The version of an object is its ETag."""

        def read() -> tuple[bytes, str] | None:
            try:
                answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)
                return answer["Body"].read(), answer["ETag"]
            except self._client_error as error:
                if self._missing(error):
                    return None
                raise

        return until_whole(read)

    def replace_version(self, name: str, data: bytes, version: str | None) -> str | None:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        for attempt in range(MAX_ATTEMPTS):
            try:
                answer = self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=data, **condition)
                return answer["ETag"]
            except self._client_error as error:
                code = error.response["Error"]["Code"]
                if code in ("PreconditionFailed", "412") or self._missing(error):
                    return None
                if code == "NotImplemented":
                    raise StoreRefusedError(
                        f"store {self.uri}: the server cannot write on a condition ({', '.join(condition)}), on which "
                        f"commits and leases rest: name another store, or update it"
                    ) from error
                # Another PUT is under way, which may fail yet: neither of both exists so far.
                if code not in ("ConditionalRequestConflict", "409") or attempt == MAX_ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
        raise AssertionError(name)

    def delete_version(self, name: str, version: str) -> bool:
        try:
            self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name, IfMatch=version)
        except self._client_error as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "412") or self._missing(error):
                return False
            raise
        return True

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + prefix)
        for page in pages:
            for entry in page.get("Contents", []):
                name = entry["Key"].removeprefix(self.prefix)
                yield StoredObject(name, entry["Size"], entry["LastModified"].timestamp())

    def delete_objects(self, names: Iterable[str]) -> None:
        waiting = [{"Key": self.prefix + name} for name in names]
        for start in range(0, len(waiting), MAX_DELETED_AT_ONCE):
            chosen = waiting[start : start + MAX_DELETED_AT_ONCE]
            answer = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": chosen, "Quiet": True})
            if refused := answer.get("Errors"):
                raise StoreRefusedError(
                    f"store {self.uri}: {len(refused)} objects cannot be removed, the first is {refused[0]['Key']} "
                    f"({refused[0]['Code']}): allow s3:DeleteObject, then run again"
                )

    def now(self) -> float:
        """By the clock of the server."""
        headers = self.client.head_bucket(Bucket=self.bucket)["ResponseMetadata"]["HTTPHeaders"]
        return parsedate_to_datetime(headers["date"]).timestamp()

    def _sha256(self, name: str) -> str | None:
        def read() -> str | None:
            digest = hashlib.sha256()
            try:
                body = self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"]
            except self._client_error as error:
                if self._missing(error):
                    return None
                raise
            for block in body.iter_chunks(READ_BYTES):
                digest.update(block)
            return digest.hexdigest()

        return until_whole(read)

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
                    until_whole(lambda: self.client.download_file(self.bucket, self.prefix + name, target))
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
            self._abort_uploads(f"objects/{key}/{attempt}/")

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
        """End uploads in parts that were begun twice because an answer was lost."""
        for upload in self._uploads(prefix):
            self.abort_upload(upload)

    def _uploads(self, prefix: str) -> Iterator[Upload]:
        """Without their sizes, each of which would be a request."""
        try:
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            for page in pages:
                for entry in page.get("Uploads", []):
                    name = entry["Key"].removeprefix(self.prefix)
                    yield Upload(name, entry["UploadId"], 0, entry["Initiated"].timestamp())
        except self._client_error as error:
            # To list uploads is a permission of its own, and not every server can; there the bucket's rule for old
            # uploads ends them.
            if error.response["Error"]["Code"] not in ("AccessDenied", "NotImplemented", "MethodNotAllowed"):
                raise

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        for upload in self._uploads(prefix):
            place = {"Bucket": self.bucket, "Key": self.prefix + upload.name, "UploadId": upload.identifier}
            pages = self.client.get_paginator("list_parts").paginate(**place)
            yield upload._replace(num_bytes=sum(part["Size"] for page in pages for part in page.get("Parts", [])))

    def abort_upload(self, upload: Upload) -> None:
        try:
            self.client.abort_multipart_upload(
                Bucket=self.bucket, Key=self.prefix + upload.name, UploadId=upload.identifier
            )
        except self._client_error as error:
            if error.response["Error"]["Code"] != "NoSuchUpload":
                raise

    def _remove_below(self, key: str, attempt: str, name: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt) / name, ignore_errors=True)
        self._delete_below(f"objects/{key}/{attempt}/{name}/")

    def _discard(self, key: str, attempt: str) -> None:
        shutil.rmtree(self.attempt_dir(key, attempt), ignore_errors=True)
        self._delete_below(f"objects/{key}/{attempt}/")

    def _delete_below(self, prefix: str) -> None:
        self._abort_uploads(prefix)
        self.delete_objects(found.name for found in self.list_objects(prefix))
