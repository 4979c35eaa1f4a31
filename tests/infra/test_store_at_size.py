"""A store of many objects: requests do not grow with the files of an artifact, manifests do not either."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infra.storage import manifest_listing, s3_store
from infra.storage.adoption import adopt
from infra.storage.garbage import delete_garbage, find_garbage
from infra.storage.open_store import open_store
from infra.storage.parallel import NUM_THREADS, map_in_threads
from infra.storage.rerun_reason import explain_and_remember
from infra.storage.s3_store import S3Store
from infra.storage.store import CorruptArtifactError, step_key
from tests.support.toy_steps import Numbers, ensure, run_both, write_numbers


@pytest.fixture(params=["local", "s3"])
def store(request, home):
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return open_store(f"s3://glm46/size-{home.root.parent.name}", home)
    return open_store(None, home)


@contextmanager
def counted(store: S3Store) -> Iterator[Counter[str]]:
    """Requests by the name of the operation."""
    requests: Counter[str] = Counter()

    def count(model, **_) -> None:
        requests[model.name] += 1

    store.client.meta.events.register("before-call.s3", count)
    yield requests
    store.client.meta.events.unregister("before-call.s3", count)


def write_many(num_files: int):
    """The first toy step with more files."""

    def write(**arguments) -> Numbers:
        for number in range(num_files):
            arguments["output"].path(f"numbers/{number:03d}.txt").write_text(str(number))
        return Numbers(num_lines=num_files)

    write.__name__ = f"write_{num_files}"
    return type(write_numbers)(write, ("numbers/*.txt",), (), (), (), ())


def test_looking_at_an_artifact_asks_the_same_number_of_times_whatever_its_files(home, s3_server):
    store = S3Store(f"s3://glm46/looks-{home.root.parent.name}", home)
    asked = []
    for num_files in (1, 30):
        artifact = ensure(store, write_many(num_files))
        with counted(store) as requests:
            assert store.broken_files(artifact.manifest, deep=False) == []
        asked.append(requests)
    assert asked[0] == asked[1] == {"ListObjectsV2": 1}


def test_an_attempt_is_removed_in_batches(home, s3_server, monkeypatch):
    monkeypatch.setattr(s3_store, "MAX_DELETED_AT_ONCE", 10)
    store = S3Store(f"s3://glm46/batches-{home.root.parent.name}", home)
    artifact = ensure(store, write_many(25))
    with counted(store) as requests:
        store._discard(artifact.key, artifact.manifest.attempt)
    assert requests["DeleteObjects"] == 3 and not list(store.list_objects("objects/"))


def test_every_manifest_is_read_once_from_one_listing(home, s3_server):
    store = S3Store(f"s3://glm46/reads-{home.root.parent.name}", home)
    manifests = [artifact.manifest for artifact in run_both(store)]
    store.mark_invalid(manifests[1], "a test says so")
    manifests[1] = run_both(store)[1].manifest
    with counted(store) as requests:
        found = list(store.iterate_manifests())
    assert found == sorted(manifests, key=lambda manifest: manifest.key)
    assert requests == {"ListObjectsV2": 1, "GetObject": 2}


@pytest.fixture
def many_files(monkeypatch):
    """Every manifest counts as one of too many files."""
    monkeypatch.setattr(manifest_listing, "MAX_LISTED_IN_PLACE", 0)


def test_a_manifest_of_many_files_names_a_listing_and_reads_like_any_other(store, tmp_path, many_files, monkeypatch):
    numbers, total = run_both(store)
    stored = json.loads(store._read(f"manifests/{numbers.key}.json"))
    assert "content" not in stored and "evidence" not in stored
    assert store.read_manifest(numbers.key) == numbers.manifest and set(numbers.manifest.content)
    assert {manifest.key for manifest in store.iterate_manifests()} == {numbers.key, total.key}
    assert store.broken_files(numbers.manifest, deep=True) == []
    monkeypatch.setattr(manifest_listing, "MAX_LISTED_IN_PLACE", 2000)
    other = open_store(str(tmp_path / "other"), store.home)
    assert (numbers.digest, total.digest) == tuple(artifact.digest for artifact in run_both(other))


@pytest.mark.parametrize("damage", ["is missing", "is damaged"])
def test_a_listing_that_is_not_the_named_one_is_refused_and_the_step_computed_anew(damage, store, many_files):
    numbers, _ = run_both(store)
    name = json.loads(store._read(f"manifests/{numbers.key}.json"))["listing"]["name"]
    store.delete_objects([name])
    if damage == "is damaged":
        store._create(name, b"{}")
    with pytest.raises(CorruptArtifactError, match=rf"{damage}.*let `glm46 doctor` mark it") as refused:
        store.read_manifest(numbers.key)
    store.mark_manifest_invalid(refused.value.name, "as doctor does")
    computed: list[str] = []
    assert run_both(store, computed)[0].digest == numbers.digest and computed == ["write_numbers"]


def test_gc_and_adoption_keep_the_listing(store, many_files):
    numbers = ensure(store, write_numbers)
    newer = {**numbers.manifest.identity, "code": "newer"}
    explain_and_remember(store.home, "toy", "write_numbers", newer)
    adopt(store, store.home, numbers.key, step_key(newer), "only a message changed")
    delete_garbage(store, find_garbage(store, 0, is_cache_free=True))
    for key in (numbers.key, step_key(newer)):
        found = store.find(write_numbers, key)
        assert found is not None and found.manifest.content == numbers.manifest.content


def test_side_by_side_keeps_the_order_and_bounds_what_waits():
    begun: list[int] = []
    results = map_in_threads(lambda item: begun.append(item) or item * 2, iter(range(1000)))
    assert next(results) == 0 and len(begun) <= 2 * NUM_THREADS
    assert list(results) == [item * 2 for item in range(1, 1000)]
    assert threading.active_count() < 100
