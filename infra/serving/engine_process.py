"""Runs another project's server as a child that ends when standard input closes, as our own server does.

    python -m infra.serving.engine_process PROGRAM ARGUMENT...

So no engine outlives the process that started it, even if that was killed. Engines start processes of their own: the
whole session is ended, first with SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.child_process import die_with_parent, free_port, take_port
from infra.serving.model_server import ModelServer, refuse_open_host, start_server, stop_model_server

GRACE_SECONDS = 10
ENGINE_ENVIRONMENT = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Of programs of another environment: they do not import our modules, ask no hub for files, and report to nobody."""
START_SECONDS = 3600
"""A model of 714 GB is read from a disk or a network for many minutes."""


@contextmanager
def running_engine(
    command: list[str], host: str, port: int, log_path: Path, environment: Mapping[str, str]
) -> Iterator[ModelServer]:
    """A server of another project for the length of a block, once it has answered /health. Raises RuntimeError with
    the end of its log when it stops or does not answer."""
    supervised = [sys.executable, "-m", "infra.serving.engine_process", *command]
    server = start_server(supervised, host, port, log_path, START_SECONDS, {**ENGINE_ENVIRONMENT, **environment})
    try:
        yield server
    finally:
        stop_model_server(server)


def engine_port(host: str, port: int, api_key: str) -> int:
    """The port, a free one for 0. Raises ValueError for a port in use and for a host that needs a key."""
    refuse_open_host(host, api_key)
    return take_port(port, host) if port else free_port(host)


def main() -> None:
    """Run the command to its end or to that of standard input; its exit code is ours."""
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
    )
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    code = process.wait()
    _signal_session(process.pid, signal.SIGKILL)
    sys.exit(code if code >= 0 else 128 - code)


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _signal_session(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal_session(process.pid, signal.SIGKILL)


def _signal_session(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


if __name__ == "__main__":
    main()
