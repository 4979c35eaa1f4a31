"""A Postgres server of a test's own, started as the user that Debian's package makes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.child_process import free_port

BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), Path("/absent"))
USER = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
PASSWORD = "geheim9"
STOP_TIMEOUT_SECONDS = 30
needs_postgres = pytest.mark.skipif(
    not BINARIES.is_dir() or os.getuid() != 0, reason="needs Postgres, and root to start it as a user of its own"
)


@contextmanager
def postgres(root: Path, *names: str) -> Iterator[list[str]]:
    """A running server with its files in `root`, which pytest made: the URLs of its databases `names`, with
    PASSWORD."""
    port = free_port()
    for directory in (root, *list(root.parents)[:2]):
        directory.chmod(0o755)
    (root / "password").write_text(PASSWORD)
    shutil.chown(root, "postgres")
    initialise = ["-D", root / "data", "-U", "glm46", "-A", "scram-sha-256", f"--pwfile={root / 'password'}", "-N"]
    _run([*USER, BINARIES / "initdb", *initialise])
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={root}"
    (root / "options").write_text(f"{options} -c fsync=off -c max_connections=200")
    start_postgres(root)
    try:
        for name in names:
            _run(
                [BINARIES / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "glm46", name],
                env={"PGPASSWORD": PASSWORD},
            )
        yield [f"postgresql://glm46:{PASSWORD}@127.0.0.1:{port}/{name}" for name in names]
    finally:
        server = _server(root)
        server.send_signal(
            signal.SIGQUIT
        )  # not by pg_ctl: another pytest that starts takes the parents' rights from its user
        server.wait(STOP_TIMEOUT_SECONDS)


def start_postgres(root: Path) -> None:
    """Start the server with its files in `root`, also one that was killed."""
    options = (root / "options").read_text()
    _run([*USER, BINARIES / "pg_ctl", "-D", root / "data", "-w", "-l", root / "log", "-o", options, "start"])


def kill_postgres(root: Path) -> None:
    """End it with all its processes, as a power cut does."""
    server = _server(root)
    for process in (server, *server.children()):
        process.kill()
    server.wait(STOP_TIMEOUT_SECONDS)


def _server(root: Path) -> psutil.Process:
    return psutil.Process(int((root / "data" / "postmaster.pid").read_text().split()[0]))


def _run(command: list[str | Path], env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
