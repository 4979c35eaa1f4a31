"""Limits requests and tokens per minute over threads: a thread sleeps until its request may be sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """One queue for all threads; a request is charged before it is sent and corrected when its true size is known."""

    def __init__(
        self,
        requests_per_minute: int,
        tokens_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds_per_request, self._seconds_per_token = 60 / requests_per_minute, 60 / tokens_per_minute
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._next_request = self._next_token = clock()

    def wait(self, num_tokens: int) -> None:
        """Return when a request of this size may be sent."""
        with self._lock:
            now = self._clock()
            start = max(now, self._next_request, self._next_token)
            self._next_request = start + self._seconds_per_request
            self._next_token = start + num_tokens * self._seconds_per_token
        if start > now:
            self._sleep(start - now)

    def correct(self, num_tokens: int) -> None:
        """Charge the difference between the true and the announced number of tokens; it may be negative."""
        with self._lock:
            self._next_token += num_tokens * self._seconds_per_token

    def pause(self, seconds: float) -> None:
        """Send no request for this many seconds, because the server asked for it."""
        with self._lock:
            self._next_request = max(self._next_request, self._clock() + seconds)
