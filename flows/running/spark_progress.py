"""Shows live progress of Spark's jobs: a data step hands a few long ones to Spark and reports nothing while they
run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context

from infra.step import Progress

INTERVAL_SECONDS = 5.0


@contextmanager
def watched_jobs(report: Callable[[str, Progress], None]) -> Iterator[None]:
    """While the block runs, report every few seconds the number of the running Spark stage and how many of its tasks
    are done."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(INTERVAL_SECONDS):
            for number, progress in _running_stages():
                report(f"Spark stage {number}", progress)

    # with the caller's context, by which Prefect knows whose progress it is
    thread = threading.Thread(target=copy_context().run, args=(watch,), name="spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _running_stages() -> list[tuple[int, Progress]]:
    """The stage that began first: others wait for it or end soon."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        return []
    try:
        tracker = context.statusTracker()
        numbers = sorted(tracker.getActiveStageIds())[:1]
        stages = [(number, tracker.getStageInfo(number)) for number in numbers]
    except (Py4JError, AttributeError):  # the session was stopped meanwhile
        return []
    return [
        (number, Progress(info.numCompletedTasks, info.numTasks, "tasks"))
        for number, info in stages
        if info is not None
    ]
