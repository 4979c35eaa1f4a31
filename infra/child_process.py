"""Child processes that do not outlive whoever started them, and free ports."""

from __future__ import annotations

import ctypes
import signal
import socket

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill the calling process when its parent's thread ends; a `preexec_fn`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
