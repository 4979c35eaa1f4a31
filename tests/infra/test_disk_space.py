"""A full disk is one sentence that names the directory and the fix, whoever noticed it; other errors keep their words
but Java's frames."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from types import SimpleNamespace

import pytest
import typer

from flows.cli.command_errors import failures, usage_errors
from infra.disk_space import explain_full_disk
from infra.home import Home
from infra.storage.open_store import open_store
from tests.support.cluster.small_disk import small_disk
from tests.support.toy_steps import run_both

JAVA_TRACE = """An error occurred while calling o62.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2935)
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.io.IOException: {}
\tat java.base/sun.nio.ch.FileDispatcherImpl.write0(Native Method)
\t... 12 more
"""


class SparkError(Exception):
    """What PySpark raises: the words of a Java process."""


def test_the_words_of_an_error_or_of_its_cause_say_that_a_disk_is_full(tmp_path):
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        SparkError(JAVA_TRACE.format("No space left on device")),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ):
        raised = RuntimeError("the step failed")
        raised.__cause__ = error
        for each in (error, raised):
            said = explain_full_disk(each, [tmp_path])
            assert str(tmp_path) in said and "make room, then run again" in said and "\n" not in said
    assert not explain_full_disk(SparkError(JAVA_TRACE.format("Connection reset")), [tmp_path])


def test_a_used_up_quota_is_said_and_the_disk_of_a_named_file_is_shown(tmp_path, home, capsys):
    said = explain_full_disk(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), [tmp_path])
    assert said.startswith("the disk quota of this user is used up (free: ") and "make room" in said
    elsewhere = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/weights.safetensors")
    assert "GiB under /dev/shm" in explain_full_disk(elsewhere, [tmp_path])
    with pytest.raises(typer.Exit) as ended, usage_errors():
        raise elsewhere
    assert ended.value.exit_code == 1 and "no space left on a disk" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), usage_errors():
        raise FileNotFoundError(errno.ENOENT, "No such file", "/dev/shm/other")


def test_a_server_that_fails_without_words_is_explained_by_the_room_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20 if path == tmp_path else 1 << 40)
    )
    assert f"no space left on {tmp_path} (" in explain_full_disk(
        RuntimeError("too many 500 error responses"), [tmp_path]
    )
    assert not explain_full_disk(ValueError("no scale 'hugee'"), [tmp_path]), "what the user wrote is wrong on any disk"


def test_a_command_prints_neither_pages_of_java_nor_a_traceback(home, capsys):
    for cause, expected in (("No space left on device", 1), ("Connection reset by peer", 4)):
        with pytest.raises(typer.Exit), failures(home):
            raise SparkError(JAVA_TRACE.format(cause))
        said = capsys.readouterr().err
        assert "DAGScheduler" not in said and "more" not in said and len(said.splitlines()) == expected + 1, said
        assert "DAGScheduler.scala:2935" in (home.run_dir / "last-error.log").read_text()


def test_a_file_of_another_user_is_named_with_its_owner_and_the_fix(home, capsys, monkeypatch):
    """A run with sudo leaves files of root in the home."""
    database = home.prefect_dir / "prefect.db"
    database.touch()
    for user, said in ((os.geteuid(), "is yours: give yourself the right"), (4711, f"belongs to user {os.geteuid()}")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(typer.Exit), failures(home):
            raise PermissionError(errno.EACCES, "Permission denied", str(database))
        assert f"{database} {said}" in capsys.readouterr().err


def test_a_disk_that_is_full_at_any_write_leaves_nothing_half_written_and_with_room_all_digests_are_the_same(tmp_path):
    disk = tmp_path / "disk"
    home, ended = Home(disk / "home"), []
    with small_disk(disk, 4) as resize:
        for num_kib in range(4, 400, 4):
            assert resize(num_kib)
            try:
                made = run_both(open_store(None, home))
                break
            except OSError as error:
                ended.append(error)
                said = explain_full_disk(error, [home.root])
                assert f"no space left on {home.root}" in said or f"no space left on {tmp_path}" in said, said
                whole = open_store(None, home)
                for manifest in whole.iterate_manifests():
                    assert not whole.broken_files(manifest, deep=True)
        else:
            pytest.fail("never enough room")
        expected = run_both(open_store(None, Home(tmp_path / "calm")))
        assert [each.digest for each in made] == [each.digest for each in expected]
        ways = {tuple(frame.name for frame in traceback.extract_tb(error.__traceback__)) for error in ended}
        assert len(ways) > 2, "it ended at writes of several kinds"
        assert not os.listdir(home.work_root) and not [path for path in disk.rglob(".*") if path.is_file()]
