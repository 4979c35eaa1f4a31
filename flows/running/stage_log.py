"""Logs a run while it runs: one line per finished stage, live progress of the running one."""

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
class StageLog:
    """The stages of one run, in order. Lines go to standard error, so that `--json` owns standard output, and to
    `forward`."""

    forward: Callable[[str], None] = lambda line: None
    """Receives finished stages and messages, without the live progress: the log of the flow run in Prefect's UI."""
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    results: list[StageResult] = field(default_factory=list)
    _shown_at: float = 0.0
    _began: tuple[str, float, float] = ("", 0.0, 0.0)
    _course: Sparkline = field(default_factory=Sparkline)
    _figures_until: float = -1.0
    """A job's progress is read more often than it grows."""
    _line: str = ""
    _one_at_a_time: threading.RLock = field(default_factory=threading.RLock)

    def say(self, message: str) -> None:
        """Print one message."""
        with self._one_at_a_time:
            self._clear()
            self.console.print(message, markup=False)
        self.forward(message)

    @contextmanager
    def running(self, stage: str) -> Iterator[None]:
        """Shows meanwhile that the stage runs and for how long, also where it reports no rows."""
        began, has_ended = time.monotonic(), threading.Event()
        self._line, self._shown_at = stage, began

        def show() -> None:
            while not has_ended.wait(PROGRESS_INTERVAL_SECONDS[self.console.is_terminal]):
                with self._one_at_a_time:
                    self._show(f"{self._line}, {time.monotonic() - began:,.0f} s so far")

        shown = threading.Thread(target=show, name="stage-log", daemon=True)
        shown.start()
        try:
            yield
        finally:
            has_ended.set()
            shown.join()

    def progress(self, stage: str, progress: Progress) -> str:
        """Show how far a stage has come; returns the line, with rate and time to go since the stage's first report."""
        now = time.monotonic()
        if self._began[0] != stage:
            self._began, self._course, self._figures_until = (stage, now, progress.done), Sparkline(), -1.0
        if progress.figure is not None and progress.done > self._figures_until:
            self._figures_until = progress.done
            self._course.add(progress.figure)
        rate = (progress.done - self._began[2]) / max(now - self._began[1], 1e-9)
        line = f"{stage}: {progress.done:,.0f}{f' of {progress.total:,.0f}' if progress.total else ''} {progress.unit}"
        if rate > 0 and now - self._began[1] > 1:
            line += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.2g}/s"
            if progress.total:
                line += f", {max(progress.total - progress.done, 0) / rate:,.0f} s to go"
        line += f", {progress.message}" if progress.message else ""
        line += f" {self._course}".rstrip()
        with self._one_at_a_time:
            self._line = line
            self._show(line)
        return line

    def _show(self, line: str) -> None:
        """Unless another line was shown a moment ago."""
        now, is_terminal = time.monotonic(), self.console.is_terminal
        if now - self._shown_at < PROGRESS_INTERVAL_SECONDS[is_terminal]:
            return
        self._shown_at = now
        if is_terminal:
            self.console.file.write(f"\r\x1b[2K  {line[: self.console.width - 3]}")
            self.console.file.flush()
        else:
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


def key_figures(record: Record, most: int = 4) -> str:
    """The first numbers and verdicts of a record, in words."""
    shown = [(name, value) for name, value in record if isinstance(value, bool | int | float)]
    return ", ".join(f"{name.removeprefix('num_').replace('_', ' ')} {_number(value)}" for name, value in shown[:most])


def _number(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
