"""The store's contract, the same for a local directory and for S3; kills of a real process; identity of code and
recipe."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace

import pytest

from infra.home import Home
from infra.machine.doctor import _look_at, check_store
from infra.storage.adoption import adopt
from infra.storage.open_store import open_store
from infra.storage.rerun_reason import explain_and_remember
from infra.storage.s3_store import S3Store
from infra.storage.store import CorruptArtifactError, step_key
from tests.conftest import ROOT
from tests.support.faulty_s3 import Request, faulty
from tests.support.toy_steps import Numbers, ensure, run_both, sum_numbers, write_numbers


@pytest.fixture(params=["local", "s3"])
def store(request, home):
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return open_store(f"s3://glm46/{home.root.parent.name}", home)
    return open_store(None, home)


def test_second_run_finds_what_the_first_committed(store):
    first, second = [], []
    assert run_both(store, first)[1].record.total == sum(range(20))
    assert run_both(store, second)[1].digest == run_both(store)[1].digest
    assert (first, second) == (["write_numbers", "sum_numbers"], [])


def test_evidence_does_not_enter_the_digest(store, tmp_path, monkeypatch):
    from infra.home import open_home

    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "other"))
    other = open_store(None, open_home())
    ours, theirs = ensure(store, write_numbers), ensure(other, write_numbers)
    assert ours.manifest.evidence != theirs.manifest.evidence
    assert ours.digest == theirs.digest


def test_a_manifest_says_what_its_process_read_and_wrote_itself_and_the_store_when_it_was_committed(store):
    before = time.time()
    numbers, total = run_both(store)
    assert before - 1 <= numbers.committed_at <= total.committed_at <= time.time() + 1, "S3 counts whole seconds"
    sizes = {name: entry.size for name, entry in {**numbers.manifest.content, **numbers.manifest.evidence}.items()}
    assert (numbers.manifest.read_bytes, numbers.manifest.written_bytes) == (0, sum(sizes.values()))
    assert total.manifest.read_bytes == sum(size for name, size in sizes.items() if name.startswith("numbers/"))


def test_of_two_racing_writers_one_wins_and_both_use_it(store, monkeypatch):
    barrier = threading.Barrier(2)
    create = store._create

    def meet_then_create(name, data):
        if name.startswith("manifests/"):
            barrier.wait(timeout=20)
        return create(name, data)

    monkeypatch.setattr(store, "_create", meet_then_create)
    held = types.SimpleNamespace(confirm=lambda: None, fence=1)
    monkeypatch.setattr(store, "locked", lambda key, say: contextlib.nullcontext())
    monkeypatch.setattr(store, "_leases", collections.defaultdict(lambda: held))
    monkeypatch.setattr(
        store.home.__class__, "work_dir", lambda home, key: home.root / "work" / threading.current_thread().name
    )
    winners = []
    threads = [
        threading.Thread(target=lambda: winners.append(ensure(store, write_numbers)), name=f"writer-{n}")
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 2
    assert winners[0].manifest.attempt == winners[1].manifest.attempt
    attempts = {found.name.split("/")[2] for found in store.list_objects("objects/")}
    assert attempts == {winners[0].manifest.attempt}, "of the other attempt nothing stays"
    assert winners[0].path("numbers/part-00000.txt").read_text().startswith("0")


def test_a_corrupt_file_is_named_and_the_next_run_computes_it_anew(store):
    numbers, total = run_both(store)
    name = f"objects/{numbers.key}/{numbers.manifest.attempt}/numbers/part-00001.txt"
    damaged = numbers.path("numbers/part-00001.txt").read_bytes()[::-1]
    if store.uri.startswith("s3://"):
        store.client.put_object(Bucket=store.bucket, Key=store.prefix + name, Body=damaged)
        numbers.path("numbers/part-00001.txt").unlink()
    else:
        (store.root / name).write_bytes(damaged)
    fresh = open_store(store.uri, store.home)
    with pytest.raises(CorruptArtifactError, match=r"part-00001.txt: corrupt.*write_numbers is computed anew"):
        fresh.load(numbers.key, write_numbers.record_type).path("numbers/part-00001.txt")
    computed: list[str] = []
    again, total_again = run_both(fresh, computed)
    assert (computed, again.manifest.generation) == (["write_numbers"], 1)
    assert (again.digest, total_again.digest) == (numbers.digest, total.digest)


@pytest.mark.parametrize("name", ["store", "my store"])
def test_what_an_executor_finds_corrupt_is_computed_anew_whatever_the_path(name, tmp_path):
    store = open_store(str(tmp_path / name), Home(tmp_path / "home"))
    numbers = ensure(store, write_numbers)
    damaged = numbers.files("numbers/*.txt")[0].uri

    def read(*, numbers, output):
        raise RuntimeError(f"task failed:\n CorruptFileError: {damaged} is corrupt: it was removed. Run again")

    with pytest.raises(CorruptArtifactError, match=r"part-00000\.txt is corrupt: it was removed"):
        ensure(store, replace(sum_numbers, function=read), numbers=numbers)
    computed: list[str] = []
    ensure(store, write_numbers, computed)
    assert computed == ["write_numbers"]


def change(store, name: str, edit) -> None:
    """Replace an object of a store by what `edit` makes of it."""
    if store.uri.startswith("s3://"):
        store.client.put_object(Bucket=store.bucket, Key=store.prefix + name, Body=edit(store._read(name)))
    else:
        (store.root / name).write_bytes(edit((store.root / name).read_bytes()))


def test_doctor_marks_a_flipped_bit_that_no_run_reads_and_the_next_run_heals_it(store):
    _, total = run_both(store)
    change(
        store,
        f"objects/{total.key}/{total.manifest.attempt}/total.txt",
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    )
    shutil.rmtree(store.home.cache_dir, ignore_errors=True)
    assert run_both(store)[1].key == total.key, "a run that finds everything reads nothing"
    assert check_store(store, deep=False)[0].passed
    (damaged,) = check_store(store, deep=True)
    assert not damaged.passed and "sum_numbers" in damaged.found and "total.txt" in damaged.found
    computed: list[str] = []
    assert run_both(store, computed)[1].digest == total.digest and computed == ["sum_numbers"]
    assert check_store(store, deep=True)[0].passed


def test_every_one_byte_change_of_an_artifact_or_manifest_is_found(store):
    """What `glm46 doctor --deep` looks at, without marking it."""
    artifacts = {artifact.key: artifact for artifact in run_both(store)}
    chance = random.Random(7)
    names = [
        name
        for key, artifact in artifacts.items()
        for name in (
            f"manifests/{key}.json",
            *(found.name for found in store.list_objects(f"objects/{key}/{artifact.manifest.attempt}/") if found.size),
        )
    ]
    for _ in range(25):
        name = chance.choice(names)
        content = store._read(name)
        index, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        change(store, name, lambda old, i=index, b=bit: old[:i] + bytes([old[i] ^ b]) + old[i + 1 :])
        key = next(key for key in artifacts if key in name)
        _, broken, corrupt = _look_at(store, True, key)
        assert broken or corrupt is not None, (name, index, bit)
        change(store, name, lambda _, content=content: content)
    assert check_store(store, deep=True)[0].passed


def with_value(**values):
    """An edit of a manifest's JSON."""
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (with_value(digest="0" * 64), "does not agree with its own digest"),
        (with_value(record={"num_lines": 21}), "does not agree with its own digest"),
        (with_value(identity={"step": "write_numbers"}), "does not agree with its own key"),
        (lambda data: data[: len(data) // 2], "is not a manifest"),
        (lambda data: b"", "is not a manifest"),
    ],
)
def test_a_manifest_that_was_changed_is_refused_by_name_and_doctor_makes_room_for_a_new_one(edit, problem, store):
    numbers, total = run_both(store)
    change(store, f"manifests/{numbers.key}.json", edit)
    with pytest.raises(
        CorruptArtifactError, match=rf"manifests/{numbers.key}.json {problem}.*remove it, or let `glm46 doctor` mark it"
    ):
        run_both(store)
    assert problem in check_store(store, deep=False)[0].found
    computed: list[str] = []
    assert run_both(store, computed)[1].digest == total.digest and computed == ["write_numbers"]


def test_a_damaged_copy_in_the_cache_is_fetched_again_and_the_object_stands(home, s3_server):
    store = S3Store("s3://glm46/cached", home)
    numbers = ensure(store, write_numbers)
    numbers.path("numbers/part-00001.txt").write_bytes(b"damaged")
    assert check_store(store, deep=True)[0].passed
    numbers.path("numbers/part-00001.txt").write_bytes(b"damaged")
    assert (
        S3Store(store.uri, home).load(numbers.key, Numbers).path("numbers/part-00001.txt").read_text().startswith("10")
    )


def test_locks_and_work_directories_go_when_nobody_needs_them(store):
    run_both(store)
    run_both(store)
    assert not list(store.home.work_root.iterdir())


def test_what_a_run_left_that_was_killed_right_after_its_commit_goes_with_the_next_that_finds_it(store):
    def find() -> tuple[types.SimpleNamespace, bool]:
        identity = write_numbers.identity(None, {})
        return store.find_or_compute(write_numbers, identity, lambda output: write_numbers(output=output), print, print)

    committed, _ = find()
    work_dir = store.home.work_dir(committed.key)
    work_dir.mkdir()
    (work_dir / "attempt").write_text(committed.manifest.attempt)
    (store.home.work_root / f"{committed.key}.lock").touch()
    found, was_there = find()
    assert was_there and found.digest == committed.digest and found.path("numbers/part-00000.txt").exists()
    assert not list(store.home.work_root.iterdir())


def test_of_many_who_want_one_lock_one_holds_it_at_a_time(store):
    inside, most, waited = [], [], []

    def enter() -> None:
        for _ in range(20):
            with store.locked("key", waited.append):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80 and max(most) == 1 and waited


def test_a_missing_file_is_a_miss_not_a_hit(store):
    numbers = ensure(store, write_numbers)
    name = f"objects/{numbers.key}/{numbers.manifest.attempt}/log.txt"
    if store.uri.startswith("s3://"):
        store.client.delete_object(Bucket=store.bucket, Key=store.prefix + name)
    else:
        (store.root / name).unlink()
    computed: list[str] = []
    assert ensure(store, write_numbers, computed).digest == numbers.digest
    assert computed == ["write_numbers"]


def test_a_step_that_raises_commits_nothing_and_leaves_no_half_written_object(store):
    def fail(**arguments):
        arguments["output"].path("numbers/part-00000.txt").write_text("half")
        raise RuntimeError("power cut")

    broken = type(write_numbers)(fail, ("numbers/*",), (), (), (), ())
    with pytest.raises(RuntimeError, match="power cut"):
        ensure(store, broken)
    assert store.manifest_names() == []
    with pytest.raises(RuntimeError):
        ensure(store, broken)
    attempts = list((store.home.cache_dir if store.uri.startswith("s3://") else store.root / "objects").glob("*/*"))
    assert len(attempts) == 1, "the second try removes what the first left"


def test_a_killed_program_run_again_ends_in_the_same_digest(tmp_path):
    environment = {**os.environ, "GLM46_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "TOY_SECONDS": "0.2"}
    command = [sys.executable, "-m", "tests.support.toy_steps", str(tmp_path / "store")]
    seed = 46
    draw = random.Random(seed)
    for _ in range(3):
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.1, 0.9))
        process.send_signal(signal.SIGKILL)
        process.wait()
    interrupted = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    clean = {**environment, "GLM46_HOME": str(tmp_path / "clean")}
    command[3] = str(tmp_path / "clean-store")
    assert (
        interrupted == subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    attempts = list((tmp_path / "store" / "objects").glob("*/*"))
    assert len(attempts) == 2, f"seed {seed}: garbage of killed runs stayed: {attempts}"


def test_committed_files_are_readable_by_whom_the_umask_lets(home):
    def secretive(**arguments) -> Numbers:
        path = arguments["output"].path("numbers/part.txt")
        path.write_text("1")
        path.chmod(0o600)
        return Numbers(num_lines=1)

    before = os.umask(0o027)
    try:
        artifact = ensure(open_store(None, home), type(write_numbers)(secretive, ("numbers/*",), (), (), (), ()))
    finally:
        os.umask(before)
    assert artifact.path("numbers/part.txt").stat().st_mode & 0o777 == 0o640


def test_undeclared_files_are_refused(store):
    def litter(**arguments):
        arguments["output"].path("surprise.txt").write_text("x")
        return write_numbers.record_type(num_lines=0)

    with pytest.raises(AssertionError, match=r"does not declare: \['surprise.txt'\]"):
        ensure(store, type(write_numbers)(litter, ("numbers/*",), (), (), (), ()))


def test_the_sum_depends_on_the_numbers_digest(store):
    numbers, total = run_both(store)
    assert total.manifest.identity["inputs"] == {"numbers": numbers.digest}
    assert sum_numbers.name == total.manifest.step


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://x", "only a local directory or s3://"),
        ("s3://absent-bucket/x", "cannot be reached"),
        ("", "--store is empty"),  # not the directory in which the command is given
    ],
)
def test_an_unusable_store_says_so(uri, message, home, s3_server):
    with pytest.raises(ValueError, match=message):
        open_store(uri, home)


def test_a_store_that_cannot_be_written_says_so(home, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ValueError, match="cannot be written"):
        open_store(str(tmp_path / "file"), home)


def test_a_server_that_overwrites_an_object_is_refused(home, s3_server):
    store = S3Store("s3://glm46/overwriting", home)
    store.client.delete_object(Bucket=store.bucket, Key=f"{store.prefix}conditional-create")

    def ignore_the_condition(params, **_):
        params["headers"].pop("If-None-Match", None)

    store.client.meta.events.register("before-call.s3.PutObject", ignore_the_condition)
    with pytest.raises(ValueError, match="ignores If-None-Match"):
        store._refuse_overwriting()


def test_a_commit_that_meets_another_under_way_is_tried_again_and_skips_no_generation(home, s3_server, monkeypatch):
    from botocore.exceptions import ClientError

    store = S3Store("s3://glm46/conflict", home)
    put, conflicts = store.client.put_object, [1, 2]

    def conflict(**arguments):
        if conflicts and arguments["Key"].startswith("conflict/manifests/"):
            conflicts.pop()
            raise ClientError({"Error": {"Code": "ConditionalRequestConflict"}}, "PutObject")
        return put(**arguments)

    monkeypatch.setattr(store.client, "put_object", conflict)
    assert ensure(store, write_numbers).manifest.generation == 0 and not conflicts


@pytest.fixture
def faulty_store(home, s3_server, monkeypatch):
    """A store, the faults that a proxy before it makes at the next requests of a method and a path, and those it has
    made."""
    plan: dict[tuple[str, str], str] = {}

    def next_fault(request: Request) -> str:
        planned = [fault for fault in plan if fault[0] == request.method and fault[1] in request.path]
        return plan.pop(planned[0]) if planned else ""

    with faulty(s3_server, next_fault) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        yield S3Store(f"s3://glm46/{home.root.parent.name}", home), plan, server.faults


def test_a_small_read_whose_answer_is_cut_or_lost_is_tried_again(faulty_store):
    store, plan, faults = faulty_store
    numbers = ensure(store, write_numbers)
    for fault in ("cut", "lost", "500", "reset"):
        plan["GET", "/manifests/"] = fault
        assert store.read_manifest(numbers.key) == numbers.manifest
    assert [made.split()[0] for made in faults] == ["cut", "lost", "500", "reset"]
    plan["GET", "/manifests/"] = "cut"
    assert store.read_manifest("0" * 64) is None, "the answer that broke off said that there is none"
    assert faults[-1].startswith("cut GET")


@pytest.mark.parametrize("request_of_part", [("POST", "?uploads"), ("PUT", "partNumber=1"), ("POST", "?uploadId=")])
def test_an_upload_in_parts_whose_answer_is_lost_is_whole_and_leaves_no_parts(request_of_part, faulty_store):
    """The server began it, took a part or put all together, and the client, who does not know, asks again."""
    store, plan, faults = faulty_store
    content = os.urandom(20 << 20)

    def write_much(**arguments) -> Numbers:
        arguments["output"].path("numbers/part-00000.txt").write_bytes(content)
        return Numbers(num_lines=1)

    plan[request_of_part] = "lost"
    big = ensure(store, type(write_numbers)(write_much, ("numbers/*",), (), (), (), ()))
    assert faults and not plan
    shutil.rmtree(store.home.cache_dir)
    assert big.path("numbers/part-00000.txt").read_bytes() == content
    assert not store.client.list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix).get("Uploads")


def test_work_is_adopted_beside_a_generation_that_was_invalid(store):
    numbers = ensure(store, write_numbers)
    newer = {**numbers.manifest.identity, "code": "newer"}
    explain_and_remember(store.home, "toy", "write_numbers", newer)
    adopt(store, store.home, numbers.key, step_key(newer), "only a message changed")
    first = store.read_manifest(step_key(newer))
    store.mark_invalid(first, "a file is gone")
    adopt(store, store.home, numbers.key, step_key(newer), "only a message changed")
    assert (first.generation, store.read_manifest(step_key(newer)).generation) == (0, 1)


def test_adopted_work_is_under_the_new_key_and_says_so(store):
    numbers = ensure(store, write_numbers)
    newer = {**numbers.manifest.identity, "code": "newer"}
    explain_and_remember(store.home, "toy", "write_numbers", newer)
    adopt(store, store.home, numbers.key, step_key(newer), "only a message changed")
    adopted = store.find(write_numbers, step_key(newer))
    assert adopted is not None
    assert (adopted.digest, adopted.manifest.adopted_from) == (numbers.digest, f"{numbers.key}: only a message changed")
    assert adopted.path("numbers/part-00000.txt").read_text().startswith("0")
    with pytest.raises(ValueError, match="committed already"):
        adopt(store, store.home, numbers.key, step_key(newer), "again")


def test_unfinished_work_moves_and_other_work_is_not_adopted(store):
    older = {"step": "write_numbers", "recipe": None, "inputs": {}, "code": "old", "distributions": {}}
    newer, other = {**older, "code": "new"}, {**older, "recipe": {"x": 1}}
    for identity in (older, newer, other):
        explain_and_remember(store.home, "toy", "write_numbers", identity)
    store.home.work_dir(step_key(older)).mkdir()
    with pytest.raises(ValueError, match="differ in recipe"):
        adopt(store, store.home, step_key(older), step_key(other), "no")
    with pytest.raises(ValueError, match=r"no run .* asked for key"):
        adopt(store, store.home, step_key(older), "f" * 64, "no")
    with pytest.raises(ValueError, match="--reason is empty"):
        adopt(store, store.home, step_key(older), step_key(newer), " ")
    adopt(store, store.home, step_key(older), step_key(newer), "a comment in the worker")
    assert not store.home.work_dir(step_key(older)).exists()
    with store.locked(step_key(newer)):
        artifact = store.compute(
            write_numbers,
            step_key(newer),
            newer,
            lambda output: write_numbers(output=output),
            lambda p: None,
            print,
            lambda n, m: None,
            time.monotonic,
        )
    assert artifact.manifest.adopted_from == f"{step_key(older)}: a comment in the worker"
