"""Logs a run while it runs: one line per finished stage, live progress of those that run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from flows.running.sparkline import Sparkline
from infra.step import Progress, Record

PROGRESS_INTERVAL_SECONDS = {True: 0.5, False: 10.0}


@dataclass(frozen=True)
class StageResult:
    """One line of the table; `digest` is empty for effects, which leave no artifact."""

    name: str
    seconds: float
    cached: bool
    reason: str
    digest: str
    figures: str
    key: str = ""
    """Step key; empty for effects."""


@dataclass
class _RunningStage:
    """What is shown of a stage that runs."""

    began: float
    line: str
    part: str = ""
    """The stage or the part of it that reported last: rate and time to go are of this one and of its unit."""
    unit: str = ""
    part_began: float = 0.0
    done_at_first: float = 0.0
    course: Sparkline = field(default_factory=Sparkline)
    figures_until: float = -1.0
    """A job's progress is read more often than it grows."""


@dataclass
class StageLog:
    """The stages of one run, in the order in which they ended. Lines go to standard error, so that `--json` owns
    standard output, and to `forward`."""

    forward: Callable[[str], None] = lambda line: None
    """Receives finished stages and messages, without the live progress: the log of the flow run in Prefect's UI."""
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    results: list[StageResult] = field(default_factory=list)
    _shown_at: float = 0.0
    _shown: dict[str, _RunningStage] = field(default_factory=dict)
    """The stages that run, in the order in which they began."""
    _failures: list[BaseException] = field(default_factory=list)
    _one_at_a_time: threading.RLock = field(default_factory=threading.RLock)

    def say(self, message: str) -> None:
        """Print one message."""
        with self._one_at_a_time:
            self._clear()
            self.console.print(message, markup=False)
        self.forward(message)

    def say_failure(self, message: str, error: BaseException) -> None:
        """Print that a branch failed, once: what waits for the branch fails with the same error."""
        with self._one_at_a_time:
            if any(error is other for other in self._failures):
                return
            self._failures.append(error)
        self.say(message)

    @contextmanager
    def running(self, stage: str) -> Iterator[None]:
        """Shows meanwhile that the stage runs and for how long, also where it reports no rows."""
        began, has_ended = time.monotonic(), threading.Event()
        with self._one_at_a_time:
            self._shown[stage], self._shown_at = _RunningStage(began, stage), began

        def show() -> None:
            while not has_ended.wait(PROGRESS_INTERVAL_SECONDS[self.console.is_terminal]):
                with self._one_at_a_time:
                    self._show()

        shown = threading.Thread(target=show, name="stage-log", daemon=True)
        shown.start()
        try:
            yield
        finally:
            has_ended.set()
            shown.join()
            with self._one_at_a_time:
                del self._shown[stage]

    def progress(self, stage: str, progress: Progress, part: str = "") -> str:
        """Show how far a stage or a part of it has come; returns the line, with rate and time to go since its first
        report."""
        now = time.monotonic()
        with self._one_at_a_time:
            shown = self._shown[stage]
            name = f"{stage}, {part}" if part else stage
            if (shown.part, shown.unit) != (name, progress.unit):
                shown.part, shown.unit, shown.part_began, shown.done_at_first = name, progress.unit, now, progress.done
                shown.course, shown.figures_until = Sparkline(), -1.0
            if progress.figure is not None and progress.done > shown.figures_until:
                shown.figures_until = progress.done
                shown.course.add(progress.figure)
            shown.line = _describe(shown, progress, now)
            self._show()
            return shown.line

    def _show(self) -> None:
        """All running stages, unless they were shown a moment ago; a terminal has one line for them."""
        now, is_terminal = time.monotonic(), self.console.is_terminal
        if now - self._shown_at < PROGRESS_INTERVAL_SECONDS[is_terminal]:
            return
        self._shown_at = now
        lines = [f"{shown.line}, {now - shown.began:,.0f} s so far" for shown in self._shown.values()]
        if is_terminal:
            width = self.console.width // len(lines) - 3
            self.console.file.write(f"\r\x1b[2K  {' | '.join(line[:width] for line in lines)}")
            self.console.file.flush()
        else:
            for line in lines:
                self.console.print(f"  {line}", markup=False)

    def finish(self, result: StageResult) -> None:
        """Record a finished stage and print its line."""
        self.results.append(result)
        state = "cached" if result.cached else result.reason
        self.say(
            f"{result.name:<44} {result.seconds:7.1f} s  {state}{f'  ({result.figures})' if result.figures else ''}"
        )

    def _clear(self) -> None:
        if self.console.is_terminal:
            self.console.file.write("\r\x1b[2K")


def _describe(shown: _RunningStage, progress: Progress, now: float) -> str:
    if not progress.unit:
        return f"{shown.part}: {progress.message}"
    seconds = now - shown.part_began
    rate = (progress.done - shown.done_at_first) / max(seconds, 1e-9)
    line = f"{shown.part}: {progress.done:,.0f}{f' of {progress.total:,.0f}' if progress.total else ''} {progress.unit}"
    if rate > 0 and seconds > 1:
        line += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.2g}/s"
        if progress.total:
            line += f", {max(progress.total - progress.done, 0) / rate:,.0f} s to go"
    line += f", {progress.message}" if progress.message else ""
    return f"{line} {shown.course}".rstrip()


def key_figures(record: Record, most: int = 4) -> str:
    """The first numbers and verdicts of a record, in words."""
    shown = [(name, value) for name, value in record.shown.items() if isinstance(value, bool | int | float)]
    return ", ".join(f"{name.removeprefix('num_').replace('_', ' ')} {_number(value)}" for name, value in shown[:most])


def _number(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
