"""The Spark session: one per process, replaced for other memory, removed with its Java process and its files; no Java
is one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from infra.home import open_home
from infra.machine.doctor import check_java, require
from infra.machine.spark import _start, spark_session, stop_spark
from tests.conftest import ROOT
from tests.support.data_inputs import RESOURCES, in_partitions


def java_processes() -> int:
    """Java children of this process."""
    import psutil

    return sum("java" in child.name() for child in psutil.Process().children())


@pytest.mark.parametrize(("make", "message"), [(False, "has no bin/java"), (True, "11.0.2")])
def test_a_missing_or_old_java_is_one_sentence_with_the_fix(make, message, tmp_path, monkeypatch):
    if make:
        java = tmp_path / "bin" / "java"
        java.parent.mkdir()
        java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
        java.chmod(0o755)
        assert subprocess.run([java], capture_output=True, check=True).stderr
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=rf"java: .*{message}.*; install Java 17") as refused:
        require(check_java())
    assert "\n" not in str(refused.value)


def test_a_java_that_does_not_start_is_named_with_its_own_words(tmp_path, monkeypatch):
    """As under a limit of memory (`ulimit -v`), where Java writes to its standard output. It is installed."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nprintf '#\\n# There is insufficient memory.\\n'\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"java: \S+/bin/java -version ended with 1: There is .* memory\.; .* ulimit -v"
    ):
        require(check_java())


def test_a_user_without_a_name_is_refused_before_spark_starts(monkeypatch):
    """As in a container that was started with a number of its own (`docker run --user 4711`)."""
    require(check_java())
    monkeypatch.setattr(os, "geteuid", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"java: user 1073741824 has no name, .*; name it in /etc/passwd, or start"):
        require(check_java())


def test_a_spark_that_does_not_start_is_named_with_the_cause_and_not_with_frames(home, monkeypatch):
    def start(builder) -> None:
        os.write(2, b"Error: too many open files\n" + b"\tat java.base/Launcher.main(Launcher.java:1)\n" * 9)
        raise RuntimeError("Java gateway process exited")

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", start)
    with pytest.raises(ValueError, match=r"its log ended in: Error: too many open files$"):
        _start(RESOURCES, home.work_root)


def test_one_session_serves_all_and_stopping_it_ends_its_java_process_and_removes_its_files():
    session = spark_session(RESOURCES)
    directory = Path(session.sparkContext._jvm.System.getProperty("java.io.tmpdir"))
    assert directory.parent == open_home().work_root
    session.range(10).repartition(3).count()
    assert list(directory.glob("blockmgr-*")), "shuffles are where the Java process keeps its temporary files"
    assert spark_session(in_partitions(9)) is session
    assert session.conf.get("spark.sql.shuffle.partitions") == "9"
    assert java_processes() == 1
    stop_spark()
    stop_spark()
    assert java_processes() == 0 and not directory.exists()


def test_files_of_a_killed_process_go_when_the_next_one_starts_and_those_of_a_living_one_stay(home):
    def start(end: str) -> tuple[subprocess.Popen[str], Path]:
        script = f"import os, sys, infra.machine.spark; print(infra.machine.spark._own_directory(), flush=True); {end}"
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    living, used = start("sys.stdin.read()")
    killed, abandoned = start(f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    killed.wait()
    assert abandoned.is_dir() and used.is_dir()
    last, own = start("")
    last.wait()
    assert [path.is_dir() for path in (abandoned, used, own)] == [False, True, False]
    living.communicate("")
    assert os.listdir(home.work_root) == []


def test_spark_says_nothing_on_the_terminal(capfd):
    stop_spark()
    session = spark_session(RESOURCES)
    assert session.range(10).repartition(3).count() == 10
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
