"""Lists the files of `s3://bucket/prefix` and of Hugging Face datasets, with a digest of each.

A dataset is `hf://owner/name[@revision][/config]`. Nothing is downloaded: an object is identified by its entity tag,
a file of a dataset by the digest that its revision holds. Credentials come from the environment (AWS_*, HF_TOKEN) and
are never written anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.files.s3_objects import S3, s3_client
from tasks.data.readers.source_bytes import ETAG, HUGGING_FACE

CARD = "readme.md"
DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[\w.-]+|[\w.-]+))?(?:/(.+))?")
"""Name, revision (the hub keeps its Parquet copies under refs/convert/parquet) and directory."""
SHA256 = re.compile(r"[0-9a-f]{64}")
NO_FILE = "{} holds no file: name a prefix or dataset that does with --data"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a bucket or a dataset."""

    name: str
    """Relative to the prefix or dataset."""
    address: str
    digest: str
    size: int
    licence: str = ""


def dataset_and_file(address: str) -> tuple[str, str]:
    """(`hf://owner/name[@revision]`, the file's name in it) of a file of a dataset. Raises ValueError for another
    address."""
    parsed = DATASET.fullmatch(address.removeprefix(HUGGING_FACE))
    if parsed is None or not parsed[3]:
        raise ValueError(f"{address} names no file of a dataset: write hf://owner/name/file")
    return address.removesuffix(f"/{parsed[3]}"), parsed[3]


def is_remote(data: str) -> bool:
    """Whether `--data` names a bucket or a dataset, not a directory."""
    return data.startswith((S3, HUGGING_FACE))


def remote_files(data: str) -> list[RemoteFile]:
    """The files of a bucket, or of a dataset without its cards, sorted by name. Raises ValueError where it cannot be
    listed or is empty."""
    files = _dataset_files(data) if data.startswith(HUGGING_FACE) else _objects(data)
    if not files:
        raise ValueError(NO_FILE.format(data))
    return sorted(files, key=lambda file: file.name)


def refuse_missing_address(data: str) -> None:
    """Raises ValueError where a bucket or dataset cannot be listed or is empty; costs one request."""
    if data.startswith(HUGGING_FACE):
        _dataset_files(data)
    elif not next(iter(_pages(data, MaxKeys=1)), {}).get("Contents"):
        raise ValueError(NO_FILE.format(data))


def _objects(data: str) -> list[RemoteFile]:
    bucket, prefix = _bucket_and_prefix(data)
    files = []
    for page in _pages(data):
        for entry in page.get("Contents", ()):
            name = entry["Key"][len(prefix) :]
            if name and not name.endswith("/") and not any(part.startswith(".") for part in name.split("/")):
                address, digest = f"{S3}{bucket}/{entry['Key']}", ETAG + entry["ETag"].strip('"')
                files.append(RemoteFile(name, address, digest, entry["Size"]))
    return files


def _bucket_and_prefix(data: str) -> tuple[str, str]:
    bucket, _, prefix = data.removeprefix(S3).partition("/")
    return bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""


def _pages(data: str, **options: int) -> Iterator[dict[str, Any]]:
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

    bucket, prefix = _bucket_and_prefix(data)
    try:
        yield from s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **options)
    except ParamValidationError as error:
        raise ValueError(f"{data} names no bucket: write s3://bucket/prefix") from error
    except (BotoCoreError, ClientError) as error:
        fix = "check the name, AWS_ENDPOINT_URL_S3 and the credentials in the environment"
        raise ValueError(f"{data} cannot be listed ({error}): {fix}") from error


def _dataset_files(data: str) -> list[RemoteFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    parsed = DATASET.fullmatch(data.removeprefix(HUGGING_FACE))
    if parsed is None:
        raise ValueError(
            f"--data {data} names no dataset: write hf://owner/name, hf://owner/name@revision or hf://owner/name/config"
        )
    dataset, revision, config = parsed[1], parsed[2], (parsed[3] or "").strip("/")
    try:
        info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        fix = "check the name, the network, HF_ENDPOINT and HF_TOKEN, or download it and name the directory"
        raise ValueError(
            f"dataset {data} cannot be listed ({type(error).__name__}: {str(error).splitlines()[0]}): {fix}"
        ) from error
    licence = _licence(info)
    files = [file for file in info.siblings or () if file.rfilename.lower().rpartition("/")[2] != CARD]
    kept = [file for file in files if not config or file.rfilename.startswith(f"{config}/")]
    if not kept:
        known = sorted({file.rfilename.split("/")[0] for file in files if "/" in file.rfilename})
        raise ValueError(
            f"dataset {dataset} has no files under {config!r}: name one of its directories "
            f"({', '.join(known) or 'none'})"
        )
    return [
        RemoteFile(
            file.rfilename,
            f"{HUGGING_FACE}{dataset}@{info.sha}/{file.rfilename}",
            _digest(file),
            file.size or 0,
            licence,
        )
        for file in kept
        if not any(part.startswith(".") for part in file.rfilename.split("/"))
    ]


def _digest(file: Any) -> str:
    """The SHA-256 of a large file; a small one is identified by its blob id in git."""
    stored = file.lfs.sha256 if file.lfs else ""
    return stored if SHA256.fullmatch(stored) else ETAG + str(file.blob_id)


def _licence(info: Any) -> str:
    stated = getattr(info.card_data, "license", None) if info.card_data else None
    return stated if isinstance(stated, str) else ""
