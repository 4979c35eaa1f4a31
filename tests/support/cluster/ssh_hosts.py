"""Hosts that ssh reaches, for tests: each an sshd on this machine with a port and a host key of its own.

`ssh` on the PATH is then the real one with a configuration that knows these hosts. A host is killed with everything
that was started over it, as when the machine goes down.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.child_process import free_port

SSHD = "/usr/sbin/sshd"
SERVER = """
ListenAddress 127.0.0.1:{port}
HostKey {root}/{name}/host_key
AuthorizedKeysFile {root}/authorized_keys
PidFile {root}/{name}/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
SetEnv TEST_HOST={root}/{name}
"""
CLIENT = """
Host {name}
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {root}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {root}/known_hosts
  HostKeyAlias {name}
"""


@dataclass(frozen=True)
class SshHosts:
    root: Path
    names: tuple[str, ...]

    @property
    def hostfile(self) -> Path:
        return self.root / "hostfile"

    def kill_node(self, name: str) -> None:
        """End a host's sshd and what runs there."""
        os.kill(int((self.root / name / "sshd.pid").read_text()), signal.SIGKILL)
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("TEST_HOST") == str(self.root / name):
                os.kill(process.pid, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        subprocess.run([SSHD, "-f", str(self.root / name / "sshd_config")], check=True)
        deadline = time.monotonic() + 20
        while subprocess.run(["ssh", name, "true"], check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"sshd of {name} does not answer"
            time.sleep(0.1)


def missing_programs() -> str:
    """What a test needs and this machine lacks; empty where all is there."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        return "no sshd (apt-get install openssh-server)"
    return "" if os.geteuid() == 0 else "not root"


@contextmanager
def ssh_hosts(root: Path, names: tuple[str, ...] = ("node1", "node2")) -> Iterator[SshHosts]:
    """Hosts that answer; PATH begins with their `ssh` while they are up."""
    root.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own directory, which a service would make
    _make_key(root / "user_key")
    shutil.copy(root / "user_key.pub", root / "authorized_keys")
    client, known = "", ""
    for name in names:
        values = {"name": name, "root": root, "port": free_port(), "user": getpass.getuser()}
        (root / name).mkdir()
        _make_key(root / name / "host_key")
        (root / name / "sshd_config").write_text(SERVER.format(**values))
        client += CLIENT.format(**values)
        known += f"{name} {(root / name / 'host_key.pub').read_text()}"
    (root / "ssh_config").write_text(client)
    (root / "known_hosts").write_text(known)
    (root / "hostfile").write_text("".join(f"{name} slots=2\n" for name in names))
    (root / "bin").mkdir()
    (root / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {root}/ssh_config "$@"\n')
    (root / "bin" / "ssh").chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{root / 'bin'}:{path}"
    hosts = SshHosts(root, names)
    try:
        for name in names:
            hosts.start_node(name)
        yield hosts
    finally:
        for name in names:
            if psutil.pid_exists(int((root / name / "sshd.pid").read_text())):
                hosts.kill_node(name)
        os.environ["PATH"] = path


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
