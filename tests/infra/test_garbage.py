"""`glm46 gc` takes what nobody needs and nothing else: each kind with a neighbour that stays."""

from __future__ import annotations

import errno
import json
import shutil
import time

import pytest
from typer.testing import CliRunner

from flows.cli.command import app
from infra.home import Home
from infra.storage import lease
from infra.storage.adoption import adopt
from infra.storage.garbage import Garbage, delete_garbage, find_garbage
from infra.storage.lease import acquire_lease, lease_name
from infra.storage.open_store import open_store
from infra.storage.rerun_reason import explain_and_remember
from infra.storage.store import step_key
from tests.support.cluster.small_disk import small_disk
from tests.support.toy_steps import ensure, run_both, sum_numbers, write_numbers

ALL = 0.0
"""Age in seconds: whatever is there, a moment later."""
NOBODY = "d" * 64
"""A key under which nothing is committed."""


@pytest.fixture(params=["local", "s3"])
def store(request, home, monkeypatch):
    """With what no run of today makes older than the tests: leases end after a moment."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.2)
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return open_store(f"s3://glm46/garbage-{home.root.parent.name}", home)
    return open_store(None, home)


def put(store, name: str, data: bytes = b"left over") -> None:
    if not store.uri.startswith("s3://"):
        (store.root / name).parent.mkdir(parents=True, exist_ok=True)
    assert store._create(name, data)


def names(store) -> set[str]:
    return {found.name for found in store.list_objects("")}


def leave_lease(store, key: str) -> None:
    """As a power cut does: neither renewed nor released."""
    held = acquire_lease(store, key, store.home.root / "elsewhere", lambda message: None)
    held._try_to_write = lambda record: None
    held._released.set()
    held._thread.join()


def counts(garbage: Garbage) -> dict[str, tuple[int, int]]:
    return {heap.what: (heap.count, heap.num_bytes) for heap in garbage.heaps() if heap.count}


def collect(store) -> Garbage:
    return delete_garbage(store, find_garbage(store, ALL, is_cache_free=True))


def test_attempts_that_no_manifest_names_go_and_those_that_one_names_stay(store):
    numbers, total = run_both(store)
    collect(store)
    before = names(store)
    put(store, f"objects/{numbers.key}/of-a-loser/numbers/part-00000.txt")
    put(store, f"objects/{NOBODY}/of-a-killed-run/a.txt")
    put(store, f"objects/{NOBODY}/of-a-killed-run/b/c.txt")
    garbage = find_garbage(store, ALL, is_cache_free=True)
    assert counts(garbage)["attempts that no manifest names"] == (2, 27)
    assert names(store) > before, "finding removes nothing"
    delete_garbage(store, garbage)
    assert names(store) == before
    assert not store.broken_files(numbers.manifest, deep=True) + store.broken_files(total.manifest, deep=True)


def test_nothing_that_is_younger_goes(store):
    put(store, f"objects/{NOBODY}/just-now/a.txt")
    put(store, f"manifests/.key.json-{'0' * 32}")
    assert counts(find_garbage(store, 3600, is_cache_free=True)) == {}


def test_what_a_held_lease_covers_stays_and_what_its_killed_holder_left_goes(store, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 60.0)
    put(store, f"objects/{NOBODY}/attempt/a.txt")
    with store.locked(NOBODY):
        assert counts(collect(store)) == {}
    assert counts(collect(store))["attempts that no manifest names"] == (1, 9)


@pytest.mark.parametrize("days", [2, -2])
def test_what_is_in_use_stays_when_the_clock_jumps(days, store, monkeypatch):
    """Its files and its lease look two days old or are from the future; what nobody renews goes all the same."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)
    put(store, f"objects/{'e' * 64}/attempt/a.txt")
    leave_lease(store, "e" * 64)
    with store.locked(NOBODY):
        put(store, f"objects/{NOBODY}/attempt/a.txt")
        monkeypatch.setattr(type(store), "now", lambda store, now=store.now: now() + days * 24 * 3600)
        said: list[str] = []
        garbage = find_garbage(store, 24 * 3600, is_cache_free=True, say=said.append)
        delete_garbage(store, garbage)
        assert f"objects/{NOBODY}/attempt/a.txt" in names(store)
    is_forward = days > 0
    assert (f"objects/{'e' * 64}/attempt/a.txt" in names(store)) is not is_forward
    assert [sentence.split()[:4] for sentence in said] == [["waiting", "for", "1.5", "s"]] * is_forward


def test_leases_that_nobody_renews_are_shown_and_taken_over_before_their_files_go(store):
    put(store, f"objects/{NOBODY}/attempt/a.txt")
    leave_lease(store, NOBODY)
    deadline = time.monotonic() + 60
    while not (garbage := find_garbage(store, ALL, is_cache_free=True)).silent:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [record.home for record in garbage.silent] == [str(store.home.root / "elsewhere")]
    assert counts(garbage) == {"attempts that no manifest names": (1, 9), "leases that nobody holds": (1, 0)}
    found = store.read_version(lease_name(NOBODY))
    store.replace_version(lease_name(NOBODY), found[0].replace(b'"num_renewals": 0', b'"num_renewals": 1'), found[1])
    assert counts(delete_garbage(store, garbage)) == {}, "its holder has woken up meanwhile"
    store.replace_version(lease_name(NOBODY), found[0], store.read_version(lease_name(NOBODY))[1])
    assert counts(delete_garbage(store, garbage)) == counts(garbage) and names(store) <= {"conditional-create"}


def test_invalid_manifests_go_with_their_files_and_the_next_run_computes_anew(store):
    numbers, total = run_both(store)
    store.mark_invalid(total.manifest, "a test says so")
    removed = counts(collect(store))
    assert removed["manifests marked invalid"][0] == 2 and removed["attempts that no manifest names"][0] == 1
    assert not [name for name in names(store) if total.key in name]
    computed: list[str] = []
    again = ensure(store, sum_numbers, computed, numbers=numbers)
    assert (again.digest, again.manifest.generation, computed) == (total.digest, 0, ["sum_numbers"])


def test_an_invalid_generation_below_a_valid_one_loses_its_files_only(store):
    numbers, _ = run_both(store)
    store.mark_invalid(numbers.manifest, "a test says so")
    newer = ensure(store, write_numbers)
    collect(store)
    found = store.read_manifest(numbers.key)
    assert found == newer.manifest and found.generation == 1
    assert not [name for name in names(store) if numbers.manifest.attempt in name]


def test_files_of_adopted_work_stay_when_the_older_key_becomes_invalid(store):
    numbers = ensure(store, write_numbers)
    newer = {**numbers.manifest.identity, "code": "newer"}
    explain_and_remember(store.home, "toy", "write_numbers", newer)
    adopt(store, store.home, numbers.key, step_key(newer), "only a message changed")
    store.mark_invalid(numbers.manifest, "a test says so")
    assert "attempts that no manifest names" not in counts(collect(store))
    found = store.find(write_numbers, step_key(newer))
    assert found is not None and not store.broken_files(found.manifest, deep=True)


def test_half_written_files_and_old_leases_go(store):
    numbers, _ = run_both(store)
    for name in ("manifests/.key.json", "leases/.key", f"objects/{numbers.key}/{numbers.manifest.attempt}/.log.txt"):
        put(store, f"{name}-{'0123456789abcdef' * 2}")
    put(store, f"objects/{numbers.key}/{numbers.manifest.attempt}/MLmodel", b"a registry put it beside")
    removed = counts(collect(store))
    removed.pop("cached copies", None)
    assert removed == {"half-written files": (3, 27), "leases that nobody holds": (2, 0)}
    assert not [name for name in names(store) if name.startswith("leases/") or "/." in name]
    assert f"objects/{numbers.key}/{numbers.manifest.attempt}/MLmodel" in names(store)


def test_cached_copies_go_unless_a_run_of_this_home_may_read_them(store):
    copy = store.home.cache_dir / "key" / "attempt" / "a.txt"
    copy.parent.mkdir(parents=True)
    copy.write_text("copy")
    assert "cached copies" not in counts(find_garbage(store, ALL, is_cache_free=False))
    with store.locked("another"):
        assert "cached copies" not in counts(find_garbage(store, ALL, is_cache_free=True))
    assert counts(collect(store))["cached copies"] == (1, 4) and not copy.exists()


def test_a_path_into_the_cache_is_made_again_where_gc_has_removed_it(home, s3_server):
    store = open_store(f"s3://glm46/recached-{home.root.parent.name}", home)
    numbers = ensure(store, write_numbers)
    shutil.rmtree(home.cache_dir)
    assert numbers.path("numbers/part-00000.txt").read_text().startswith("0")


def test_uploads_in_parts_that_nobody_ended_go(home, s3_server):
    store = open_store(f"s3://glm46/uploads-{home.root.parent.name}", home)
    place = {"Bucket": store.bucket, "Key": f"{store.prefix}objects/{NOBODY}/attempt/big"}
    begun = store.client.create_multipart_upload(**place)["UploadId"]
    store.client.upload_part(**place, UploadId=begun, PartNumber=1, Body=b"x" * 1000)
    age = store.now() - next(store.list_uploads("objects/")).modified
    assert "uploads begun in parts" not in counts(find_garbage(store, age + 3600, is_cache_free=True))
    assert counts(collect(store))["uploads begun in parts"] == (1, 1000)
    assert not list(store.list_uploads("objects/"))


def test_a_manifest_that_cannot_be_read_stops_gc_before_it_removes_anything(store):
    put(store, f"manifests/{NOBODY}.json", b"{")
    with pytest.raises(ValueError, match=rf"manifests/{NOBODY}.json cannot be read.*`glm46 doctor` mark it"):
        find_garbage(store, ALL, is_cache_free=True)


def test_the_command_lists_by_default_and_removes_when_it_is_asked_to(home, tmp_path):
    store = open_store(None, Home(home.root))
    put(store, f"objects/{NOBODY}/attempt/a.txt")
    command = ["gc", "--older-than", "0", "--json"]
    listed = CliRunner().invoke(app, command)
    assert listed.exit_code == 0, listed.output
    assert "attempts that no manifest names: 1 (9 bytes)" in listed.stderr and json.loads(listed.stdout)
    assert (store.root / f"objects/{NOBODY}/attempt/a.txt").exists()
    removed = CliRunner().invoke(app, [*command, "--delete"])
    assert json.loads(removed.stdout)["attempts that no manifest names"] == {"count": 1, "bytes": 9}
    assert not (store.root / f"objects/{NOBODY}/attempt/a.txt").exists()


def test_a_full_disk_is_no_reason_to_keep_garbage(tmp_path):
    """It has no room for the lease under which files of a killed run go."""
    with small_disk(tmp_path / "disk", 1000):
        store = open_store(str(tmp_path / "disk" / "store"), Home(tmp_path / "home"))
        put(store, f"objects/{NOBODY}/of-a-killed-run/a.txt", b"x" * 20_000)
        put(store, f"objects/{'e' * 64}/of-a-killed-run/a.txt", b"x" * 20_000)
        fill_up(tmp_path / "disk")
        with pytest.raises(OSError, match="No space left"):
            store._create("leases/one-more", b"x" * 100)
        assert counts(collect(store))["attempts that no manifest names"] == (2, 40_000)
        assert {name for name in names(store) if name.startswith("objects/")} == set()


def fill_up(disk) -> None:
    """Until there is no room for a byte more."""
    with open(disk / "filling", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


LOOKING = (
    ("gc",),
    ("lineage", "model", "champion"),
    ("lineage", "document", "0" * 16),
    ("forget", "0" * 16),
    ("evidence", "--output", "evidence"),
    ("rollback", "tiny", "--reason", "worse"),
    ("jobs", "list"),
    ("jobs", "stop"),
    ("down",),
    ("exporter",),
)
"""Commands that look something up."""


@pytest.mark.parametrize("command", LOOKING)
@pytest.mark.parametrize("exists", [False, True])
def test_no_home_is_made_by_a_command_that_looks_something_up(command, exists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLM46_HOME", "team")
    if exists:
        (tmp_path / "team").mkdir()
    looked = CliRunner().invoke(app, command)
    assert looked.exit_code == 2 and "run `glm46 run tiny` first" in looked.stderr
    assert not list(tmp_path.rglob("team/*")) and (tmp_path / "team").exists() == exists


@pytest.mark.parametrize(
    "command",
    [
        ("gc",),
        ("checkpoint", "list"),
        ("plan", "micro"),
        ("lineage", "document", "0" * 16),
        ("doctor",),
        ("doctor", "--deep"),
        ("exporter",),
    ],
)
def test_a_store_that_is_not_there_is_no_empty_one(command, tmp_path, monkeypatch):
    """Of doctor it is one check of several."""
    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    looked = CliRunner().invoke(app, [*command, "--store", str(tmp_path / "typo")])
    assert looked.exit_code == (1 if command[0] == "doctor" else 2)
    assert f"store {tmp_path}/typo does not exist: name the one" in looked.output
    assert not (tmp_path / "typo").exists()
