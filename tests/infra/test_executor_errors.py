"""What fails in an executor reaches the user as one sentence: a missing Python, another one, a missing module, and any
other error by its name."""

from __future__ import annotations

import pytest

from configs.files.s3_objects import s3_client
from configs.files.s3_refusals import StoreRefusedError
from infra.machine.executor_errors import ExecutorFailedError, executor_errors
from infra.machine.spark import spark_session
from tests.support.data_inputs import RESOURCES


@pytest.fixture
def fail_in_executor():
    """Runs a function in a task."""
    session = spark_session(RESOURCES)

    def run(function) -> str:
        def in_task(batches):
            function()
            yield from batches

        with pytest.raises((ValueError, ExecutorFailedError)) as failed, executor_errors():
            session.range(10).mapInArrow(in_task, "id long").collect()
        assert "\n" not in str(failed.value)
        return f"{failed.typename}: {failed.value}"

    return run


def import_what_is_not_there() -> None:
    import no_such_module  # noqa: F401 # pyright: ignore[reportMissingImports]


def refuse() -> None:
    raise StoreRefusedError("the credential has expired")


def fail_twice() -> None:
    try:
        {}["first"]
    except KeyError as error:
        raise RuntimeError("the second") from error


def test_errors_of_a_task_are_named_without_their_trace(fail_in_executor):
    sentence = fail_in_executor(import_what_is_not_there)
    assert "ValueError: executors have no Python module no_such_module;" in sentence and "pyproject.toml" in sentence
    assert fail_in_executor(refuse) == "ValueError: the credential has expired"
    assert fail_in_executor(fail_twice) == "ExecutorFailedError: RuntimeError: the second"


def test_a_python_that_executors_do_not_have_is_named(fail_in_executor, monkeypatch):
    context = spark_session(RESOURCES).sparkContext
    with monkeypatch.context() as patch:
        patch.setattr(context, "pythonExec", "/nowhere/python")
        assert "executors have no Python at /nowhere/python;" in fail_in_executor(print)
    monkeypatch.setattr(context, "pythonVer", "3.9")
    assert "executors have Python 3.11, the driver has 3.9;" in fail_in_executor(print)


def test_errors_of_the_driver_stay_what_they_are():
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException), executor_errors():
        spark_session(RESOURCES).range(1).select("no_such_column").collect()
    with pytest.raises(KeyError), executor_errors():
        {}["first"]


def test_a_host_without_credentials_is_named(monkeypatch, tmp_path):
    import socket

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3_client.cache_clear()
    with pytest.raises(StoreRefusedError, match=f"host {socket.gethostname()} has no credentials.*AWS_ACCESS_KEY_ID"):
        s3_client()
