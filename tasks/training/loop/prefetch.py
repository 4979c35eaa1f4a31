"""Reads the data of the next step while the present one computes.

The data depend only on the step's plan. So a step that was not foreseen (after a resume, a rollback) is simply read
then: order and content cannot change.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
Plan = TypeVar("Plan")


class Prefetcher(Generic[Plan, T]):
    """`read(plan)` returns load(plan), loaded ahead where `following(plan before)` foresaw it. Errors are raised by the
    `read` that asks for it."""

    def __init__(self, load: Callable[[Plan], T], following: Callable[[Plan], Plan | None]) -> None:
        self._load, self._following = load, following
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: tuple[Plan, Future[T]] | None = None

    def read(self, plan: Plan) -> T:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == plan:
            loaded = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].cancel()
            loaded = self._load(plan)
        following = self._following(plan)
        if following is not None:
            self._ahead = following, self._threads.submit(self._load, following)
        return loaded

    def close(self) -> None:
        """Wait for what is being read, and end the thread."""
        self._ahead = None
        self._threads.shutdown(wait=True, cancel_futures=True)
