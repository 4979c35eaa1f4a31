"""Processor seconds and memory of this process and all that it started, also of those that ended: Spark's Python
workers come and go, and not all are waited for by somebody who would add up their time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LOOK_SECONDS = 0.25
"""A process that ends loses at most what it used since the last look."""


class ProcessorTime:
    """Sums what each process has used when it was last seen."""

    def __init__(self, only_new: bool = False) -> None:
        self._own = psutil.Process()
        self._earlier = {process.pid for process in self._own.children(recursive=True)} if only_new else set[int]()
        self._used: dict[tuple[int, float], float] = {}
        self._one_at_a_time = threading.Lock()
        self.driver_mib: dict[str, int] = {"python": 0, "java": 0}
        """Largest resident set of this process and of its Java process, as far as it was seen."""

    def seconds(self) -> float:
        """Until now."""
        with self._one_at_a_time:
            for process in (self._own, *self._own.children(recursive=True)):
                if process.pid in self._earlier:
                    continue
                try:
                    times = process.cpu_times()
                    self._used[process.pid, process.create_time()] = times.user + times.system
                    if process == self._own or "java" in process.name():
                        kind = "python" if process == self._own else "java"
                        self.driver_mib[kind] = max(self.driver_mib[kind], process.memory_info().rss >> 20)
                except psutil.NoSuchProcess:
                    continue
            return sum(self._used.values())


@contextmanager
def processor_time(only_new: bool = False) -> Iterator[ProcessorTime]:
    """Looks at the processes while the block runs; with `only_new`, not at those that are children already."""
    meter, is_over = ProcessorTime(only_new), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            meter.seconds()

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield meter
    finally:
        is_over.set()
        watch.join()
