"""Says in one sentence why tasks failed in executors: Spark's own message is the trace of two languages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from configs.files.s3_refusals import NOTHING_LOST

PYTHON_ERROR = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(?P<name>[\w.]+)(?:: (?P<message>.*))?")
OF_THE_USER = ("StoreRefusedError", "CorruptFileError")
"""Errors whose message says what to do."""
NO_MODULE = re.compile(r"No module named '(?P<module>[\w.]+)'")
NO_PYTHON = re.compile(r'Cannot run program "(?P<python>[^"]+)"')
OTHER_PYTHON = re.compile(r"worker has different version: (?P<theirs>\S+) than that in driver: (?P<ours>\d+\.\d+)")


class ExecutorFailedError(RuntimeError):
    """A task failed as often as Spark tries it."""


@contextmanager
def executor_errors() -> Iterator[None]:
    """Raise what failed in an executor as one sentence: a ValueError where it says what to do, else
    ExecutorFailedError."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        if (explained := explain(str(error))) is not None:
            raise explained from error
        raise


def explain(trace: str) -> Exception | None:
    """The error of the executor in a message of Spark; None where the message is not about Python there."""
    if absent := NO_PYTHON.search(trace):
        return ValueError(
            f"executors have no Python at {absent['python']}; {NOTHING_LOST}: set PYSPARK_PYTHON to its path there"
        )
    if other := OTHER_PYTHON.search(trace):
        return ValueError(
            f"executors have Python {other['theirs']}, the driver has {other['ours']}; {NOTHING_LOST}: set "
            f"PYSPARK_PYTHON to a Python {other['ours']} that they have"
        )
    errors = list(PYTHON_ERROR.finditer(trace))
    if not errors:
        return None
    name, message = errors[-1]["name"].rpartition(".")[2], errors[-1]["message"] or ""
    if missing := NO_MODULE.search(message):
        return ValueError(
            f"executors have no Python module {missing['module']}; {NOTHING_LOST}: install the packages of "
            f"pyproject.toml there, or set PYSPARK_PYTHON to a Python that has them (the driver sends them the "
            f"project's own code)"
        )
    return ValueError(message) if name in OF_THE_USER else ExecutorFailedError(f"{name}: {message}")
