"""Ends a command within seconds on Ctrl-C, SIGTERM and a closed terminal; one sentence says what keeps running without
it.

A thread sees the signal through the interpreter's wake-up descriptor. Prefect and PySpark replace any other handler by
their own, and the main thread may be inside a call that takes minutes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from flows.cli.command_errors import EXIT_FAILED
from flows.cli.jobs import running_jobs
from infra.home import Home

CONTINUE = "run again to continue"
STANDARD_ERROR = 2
"""A duplicate of this descriptor is kept from the start: while Spark starts, the descriptor leads to Spark's log."""
GRACE_SECONDS = 2.0
"""Seconds in which the main thread may end in order: mark the flow run, stop servers and Spark. The next run repairs
what is not done."""


@contextmanager
def interruptible(home: Home, advice: str = CONTINUE) -> Iterator[None]:
    """End the process soon after a signal that asks for it, whatever the block does; a second signal ends it at once.
    `advice` says what the same command does when it is run again."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP, and that holds
            signal.signal(number, signal.default_int_handler)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    terminal, is_announced = os.dup(STANDARD_ERROR), threading.Event()
    threading.Thread(target=_leave_on_signal, args=(reader, terminal, home, advice, is_announced), daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        is_announced.wait(GRACE_SECONDS)
        raise SystemExit(EXIT_FAILED) from None
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
        os.close(terminal)


def _leave_on_signal(reader: int, terminal: int, home: Home, advice: str, is_announced: threading.Event) -> None:
    if not os.read(reader, 1):
        return  # the block has ended
    with suppress(OSError):  # the terminal may be gone
        os.write(terminal, f"\nglm46: interrupted; {advice}".encode())
    threading.Thread(target=_tell_what_goes_on, args=(terminal, home, is_announced), daemon=True).start()
    is_announced.wait(GRACE_SECONDS)  # a scheduler may need longer to answer
    is_announced.set()
    select.select([reader], [], [], GRACE_SECONDS)
    os._exit(EXIT_FAILED)


def _tell_what_goes_on(terminal: int, home: Home, is_announced: threading.Event) -> None:
    try:
        with suppress(OSError):
            os.write(terminal, f"{_what_goes_on(home)}\n".encode())
    finally:
        is_announced.set()


def _what_goes_on(home: Home) -> str:
    jobs = running_jobs(home)
    if not jobs:
        return ""
    names = " and ".join(f"{job.stage} ({job.short_key})" for job in jobs)
    return f". This keeps running detached: {names}. `glm46 jobs list` shows it, `glm46 jobs stop` lets it save and end"
