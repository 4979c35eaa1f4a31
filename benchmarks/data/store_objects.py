"""Requests, seconds and memory of the store at artifacts of many small objects, in a bucket and in a directory, beside
one request per object, which a look at an artifact would else cost.

    python -m benchmarks.data.store_objects [--bucket 10000] [--directory 10000 100000] [--write]

Each size has a store of its own: one committed artifact, and as much again of a killed run's attempt. A process of its
own opens the store and measures each operation: `manifest` reads the manifest with its listing, `look` finds missing
files and wrong sizes, `deep` compares every checksum (one GetObject per object; not in a bucket of more than
--deep-objects), `garbage` finds what nobody needs in the whole store, `delete` removes the killed run's attempt. The
bucket is in moto's server on this machine (make env installs it), which is one Python process that is filled before it
listens: most seconds are its own. It would sort the whole bucket for each page of a listing; here it keeps the sorted
bucket while no object comes or goes, as a server with an index does. peak_mib is the largest size of the process during
the operation, start_mib its size before the first.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import report
from infra.child_process import free_port
from infra.home import Home
from infra.step import FileEntry, Manifest, digest_of
from infra.storage.garbage import delete_garbage, find_garbage
from infra.storage.open_store import open_store
from infra.storage.s3_store import S3Store
from infra.storage.store import Store, step_key

IDENTITY = {"step": "write_objects", "recipe": None, "inputs": {}, "code": "", "distributions": {}}
KEY = step_key(IDENTITY)
BUCKET = "benchmark"
CONTENT = b"a small object\n"
RESET_PEAK = "5"
"""Written to clear_refs (proc(5))."""


def main() -> None:
    """Both kinds of store at each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", type=int, nargs="+", default=[10_000], help="objects per artifact of a bucket")
    parser.add_argument("--directory", type=int, nargs="+", default=[10_000], help="the same of a directory")
    parser.add_argument("--peer-objects", type=int, default=2_000, help="objects that are asked for one by one")
    parser.add_argument("--deep-objects", type=int, default=10_000, help="largest artifact whose contents are compared")
    parser.add_argument("--write", action="store_true", help="store the record in benchmarks/results")
    arguments = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as directory, s3_server(arguments.bucket):
        places = [("s3", size, f"s3://{bucket_of(size)}/store") for size in arguments.bucket]
        places += [("directory", size, f"{directory}/{size}") for size in arguments.directory]
        for kind, num_objects, uri in places:
            if kind == "directory":
                write_files(Path(uri), num_objects)
            commit(open_store(uri, Home(Path(directory) / "home")), num_objects)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
                is_deep = kind == "directory" or num_objects <= arguments.deep_objects
                row = child.submit(measure, uri, directory, min(num_objects, arguments.peer_objects), is_deep).result()
            table.append({"objects": num_objects, "store": kind, **row})
            print(table[-1], flush=True)
    largest = [row for row in table if row["store"] == "s3"][-1]
    report(
        "store_objects",
        ours=largest["objects"] / largest["look"]["seconds"],
        peer=largest["one_by_one"]["objects"] / largest["one_by_one"]["seconds"],
        unit="objects/s looked at in a bucket",
        table=table,
    )


@contextmanager
def s3_server(sizes: list[int]) -> Iterator[None]:
    """A server with a filled bucket for each size; its address is in the environment while it runs."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port, sizes), daemon=True)
    server.start()
    settings = {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        while not _answers(url):
            assert server.is_alive(), "moto's server did not start"
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.join()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def serve(port: int, sizes: list[int]) -> None:
    """Fill the buckets and answer requests until the process is ended."""
    import logging

    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends
    from moto.server import main as run_server

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for num_objects in sizes:
        backend.create_bucket(bucket_of(num_objects), "us-east-1")
        for name in object_names(num_objects):
            backend.put_object(bucket_of(num_objects), f"store/{name}", CONTENT)
    keep_listings(backend)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    run_server(["-H", "127.0.0.1", "-p", str(port)])


def keep_listings(backend: Any) -> None:
    """Let a page of a listing be cut from the one before, until the number of objects changes."""
    list_whole, kept = backend.list_objects, {}

    def list_objects(bucket: Any, prefix: str | None, delimiter: str | None, marker: Any, max_keys: Any) -> Any:
        if marker is not None or max_keys is not None:
            return list_whole(bucket, prefix, delimiter, marker, max_keys)
        asked = (bucket.name, prefix, delimiter)
        if kept.get(asked, (None,))[0] != len(bucket.keys):
            kept[asked] = (len(bucket.keys), list_whole(bucket, prefix, delimiter, None, None))
        return kept[asked][1]

    backend.list_objects = list_objects


def bucket_of(num_objects: int) -> str:
    return f"{BUCKET}-{num_objects}"


def file_names(num_objects: int) -> list[str]:
    """Of the artifact."""
    return [f"parts/part-{number:06d}.txt" for number in range(num_objects)]


def object_names(num_objects: int) -> Iterator[str]:
    """Of the committed attempt and of the killed one."""
    for attempt in ("committed", "killed"):
        yield from (f"objects/{KEY}/{attempt}/{name}" for name in file_names(num_objects))


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/moto-api/", timeout=1).close()
    except OSError:
        return False
    return True


def write_files(root: Path, num_objects: int) -> None:
    """A directory with the files of both attempts."""
    for attempt in ("committed", "killed"):
        (root / "objects" / KEY / attempt / "parts").mkdir(parents=True)
    for name in object_names(num_objects):
        (root / name).write_bytes(CONTENT)


def commit(store: Store, num_objects: int) -> None:
    """The artifact's manifest."""
    names = file_names(num_objects)
    entry = FileEntry(size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    digest = digest_of({"record": {}, "content": {name: entry.sha256 for name in names}})
    store.create_manifest(
        Manifest(
            key=KEY,
            generation=0,
            object_key=KEY,
            attempt="committed",
            digest=digest,
            identity=IDENTITY,
            record={},
            content=dict.fromkeys(names, entry),
            evidence={},
            seconds=0,
        )
    )


def measure(uri: str, directory: str, num_one_by_one: int, is_deep: bool) -> dict[str, Any]:
    """Seconds and requests of each operation on a filled store, and the memory that they took."""
    store = open_store(uri, Home(Path(directory) / "home"))
    row: dict[str, Any] = {"start_mib": _peak_mib()}
    with counted(store) as requests:

        def timed(name: str, operation: Callable[[], Any]) -> Any:
            requests.clear()
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
            started = time.monotonic()
            result = operation()
            row[name] = {"seconds": round(time.monotonic() - started, 3), "requests": dict(requests)}
            row[name]["peak_mib"] = _peak_mib()
            return result

        manifest = timed("manifest", lambda: store.read_manifest(KEY))
        assert timed("look", lambda: store.broken_files(manifest, deep=False)) == []
        assert not is_deep or timed("deep", lambda: store.broken_files(manifest, deep=True)) == []
        garbage = timed("garbage", lambda: find_garbage(store, 0, is_cache_free=True))
        chosen = sorted(manifest.content)[:num_one_by_one]
        timed("one_by_one", lambda: [_ask_for_one(store, name) for name in chosen])
        row["one_by_one"]["objects"] = num_one_by_one
        removed = timed("delete", lambda: delete_garbage(store, garbage))
    assert removed.attempts == garbage.attempts and garbage.attempts[0].num_files == len(manifest.content)
    beside = store.list_objects(f"objects/{KEY}/committed/.listing")
    row["manifest_bytes"] = sum(found.size for found in [*store.list_objects("manifests/"), *beside])
    return row


@contextmanager
def counted(store: Store) -> Iterator[Counter[str]]:
    """Requests to a bucket by the name of the operation."""
    requests: Counter[str] = Counter()
    if isinstance(store, S3Store):
        store.client.meta.events.register("before-call.s3", lambda model, **_: requests.update([model.name]))
    yield requests


def _ask_for_one(store: Store, name: str) -> int:
    """Size of one object, by a request of its own."""
    path = f"objects/{KEY}/committed/{name}"
    if isinstance(store, S3Store):
        return store.client.head_object(Bucket=store.bucket, Key=store.prefix + path)["ContentLength"]
    return (Path(store.uri) / path).stat().st_size


def _peak_mib() -> int:
    """Largest size of this process since it was reset; the system's own figure keeps that of the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


if __name__ == "__main__":
    main()
