"""Opens the store that a URI names: a local directory or a bucket."""

from __future__ import annotations

from pathlib import Path

from infra.home import Home, refuse_missing_home
from infra.storage.local_store import LocalStore
from infra.storage.manifest_store import MANIFESTS
from infra.storage.s3_store import S3Store
from infra.storage.store import Store


def open_store(uri: str | None, home: Home, writes: bool = True) -> Store:
    """The store at a URI: a local directory, s3://bucket/prefix, or None for the home's own. `writes` False writes
    nothing to open it. Raises ValueError if it cannot be used."""
    if uri is not None and not uri.strip():
        raise ValueError("--store is empty: name a directory or s3://bucket/prefix, or leave the option out")
    if uri is not None and uri.startswith("s3://"):
        return S3Store(uri, home, writes)
    if uri is not None and "://" in uri:
        raise ValueError(f"store {uri}: only a local directory or s3://bucket/prefix is supported")
    return LocalStore(home.store_dir if uri is None else Path(uri).absolute(), home, writes)


def open_known_store(uri: str | None, home: Home, writes: bool = False) -> Store:
    """The store at a URI that something is looked up in: one that is not there, or that no run wrote, is a mistake, and
    no store is made of it; nor a home for the home's own (None). `writes` False asks for no right to write. Raises
    ValueError."""
    if uri is None and not (home.store_dir / MANIFESTS).is_dir():
        refuse_missing_home(home, ", or name a store with --store")
    if uri is not None and "://" not in uri and not (Path(uri) / MANIFESTS).is_dir():
        wrong = "is no store" if Path(uri).exists() else "does not exist"
        raise ValueError(f"store {Path(uri).absolute()} {wrong}: name the one that the runs were made with")
    return open_store(uri, home, writes)
