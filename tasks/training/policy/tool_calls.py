"""Runs the tools of many episodes at once, none for longer than its time.

A thread cannot be ended from outside. So a call that does not come back is left to its thread, which takes no further
call and ends with the process, and another thread takes its place.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass
class _Call(Generic[Result]):
    job: Callable[[], Result]
    has_started: threading.Event = field(default_factory=threading.Event)
    is_done: threading.Event = field(default_factory=threading.Event)
    started: float = 0.0
    ended: float = 0.0
    is_abandoned: bool = False
    results: list[Result] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


class ToolThreads:
    """Threads that wait for calls. Each keeps the sandbox in which it ran a program (tasks/data/sandbox)."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._waiting: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        for _ in range(num_threads or os.cpu_count() or 1):
            self._start()

    def run(self, jobs: Sequence[Callable[[], Result]], seconds: Sequence[float]) -> list[Result | None]:
        """What each job returned, in their order; None for one that ran longer than its `seconds`, not counting the
        time that it waited for a thread. Raises what a job raised."""
        calls = [_Call(job) for job in jobs]
        for call in calls:
            self._waiting.put(call)
        return [self._result(call, own) for call, own in zip(calls, seconds, strict=True)]

    def _start(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        call = None
        while call is None or not call.is_abandoned:
            call = self._waiting.get()
            call.started = time.monotonic()
            call.has_started.set()
            try:
                call.results.append(call.job())
            except BaseException as error:
                call.errors.append(error)
            call.ended = time.monotonic()
            call.is_done.set()

    def _result(self, call: _Call[Result], seconds: float) -> Result | None:
        call.has_started.wait()  # calls start in their order, and those before this one are done or abandoned
        if not call.is_done.wait(max(0.0, call.started + seconds - time.monotonic())):
            call.is_abandoned = True
            self._start()
            return None
        if call.ended - call.started > seconds:  # it came back while calls before it were waited for
            return None
        if call.errors:
            raise call.errors[0]
        return call.results[0]


@cache
def tool_threads() -> ToolThreads:
    """Those of this process."""
    return ToolThreads()
