"""Child processes that end when the process that started them ends; free ports."""

from __future__ import annotations

import ctypes
import signal
import socket

import psutil

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill the calling process when its parent's thread ends; a `preexec_fn`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_port(port: int, host: str = "127.0.0.1") -> int:
    """The port itself if nothing listens there. Raises ValueError naming it otherwise."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} on {host} is taken by {_listener(port)} ({error.strerror}): end it, or name another port"
            ) from error
    return port


def _listener(port: int) -> str:
    """The process that listens on a port, if this user may see it."""
    for process in psutil.process_iter():
        try:
            if any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for connection in process.net_connections("tcp")
            ):
                return f"process {process.pid} ({' '.join(process.cmdline())[:60]})"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return "another user's process"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
