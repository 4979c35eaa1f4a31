"""The Spark session: one per process, replaced for other memory, gone with its Java process; no Java is one sentence."""

from __future__ import annotations

import subprocess

import pytest

from infra.doctor import check_java, require
from infra.spark import spark_session, stop_spark
from tests.data_inputs import RESOURCES, in_partitions


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


def test_one_session_serves_all_and_stopping_it_ends_its_java_process():
    session = spark_session(RESOURCES)
    assert spark_session(in_partitions(9)) is session
    assert session.conf.get("spark.sql.shuffle.partitions") == "9"
    assert java_processes() == 1
    stop_spark()
    stop_spark()
    assert java_processes() == 0


def test_spark_says_nothing_on_the_terminal(capfd):
    stop_spark()
    session = spark_session(RESOURCES)
    assert session.range(10).repartition(3).count() == 10
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
