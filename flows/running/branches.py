"""Parts of a flow that do not need each other, side by side where they compute on different machines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from flows.running.run import Run

T = TypeVar("T")


class Branches:
    """Runs branches in the order in which they begin, or at the same time.

    Side by side, each has a thread: Prefect's timeline shows its tasks beside the others'. A step that computes on this
    machine waits for its turn there (Computation.computes_here). The result of a branch is that of its future; a branch
    may wait for those that began before it. Where one fails, the others go on to their end, so that the next run finds
    their results, and the block raises its error. An interruption waits for nothing.
    """

    def __init__(self, run: Run, *, are_side_by_side: bool) -> None:
        self._run, self._are_side_by_side = run, are_side_by_side
        self._begun: dict[str, Future[object]] = {}
        self._errors: list[BaseException] = []

    def begin(self, name: str, branch: Callable[[], T]) -> Future[T]:
        """The future of a branch; without a second machine it has ended when this returns, or its error is raised."""
        future: Future[T] = Future()
        if not self._are_side_by_side:
            future.set_result(branch())
            return future
        self._begun[name] = future  # pyright: ignore[reportArgumentType]
        # with the flow's context, by which Prefect knows whose tasks these are
        context = copy_context()
        threading.Thread(target=context.run, args=(self._run_to_its_end, name, branch, future), daemon=True).start()
        return future

    def _run_to_its_end(self, name: str, branch: Callable[[], T], future: Future[T]) -> None:
        try:
            result = branch()
        except BaseException as error:
            self._errors.append(error)
            self._say_failure(f"{name} failed: ", error)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _say_failure(self, what: str, error: BaseException) -> None:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        self._run.log.say_failure(f"{what}{first_line}. What runs beside it goes on; the next run finds it", error)

    def __enter__(self) -> Branches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not all(future.done() for future in self._begun.values()):
            self._say_failure("", error)
        if error is None or isinstance(error, Exception):
            wait(self._begun.values())
        if error is None and self._errors:
            raise self._errors[0]
