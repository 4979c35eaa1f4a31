"""Machines without a common directory, on one machine: each is a network, mount, process and host-name namespace on a
bridge. A node writes only to a /tmp of its own; all else is read-only. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.child_process import die_with_parent
from infra.code_digest import ROOT

NEEDED = ("ip", "unshare", "nsenter")
SET_UP = r"""
set -eu
hostname "$NODE"
mount -t tmpfs tmpfs /mnt
mkdir /mnt/code /mnt/python
mount --bind "$CODE" /mnt/code
mount --bind "$PYTHON_HOME" /mnt/python
for directory in /tmp /var/tmp /dev/shm; do mount -t tmpfs tmpfs $directory; done
mkdir -p "$CODE"
if [ "$HAS_CODE" = yes ]; then mount --bind /mnt/code "$CODE"; else mount -t tmpfs tmpfs "$CODE"; fi
mkdir -p "$PYTHON_HOME"
mount --bind /mnt/python "$PYTHON_HOME"
umount -l /mnt
printf '%s' "$HOSTS" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
while read -r _ target _; do
  case $target in
    /tmp|/var/tmp|/dev|/dev/*|/proc|/proc/*|/sys|/sys/*) ;;
    *) mount -o remount,bind,ro "$target" ;;
  esac
done < /proc/self/mounts
echo ready
while :; do sleep 60 & wait || :; done
"""
"""Hides the project's code from nodes that shall not have it; keeps the environment of Python, which may be in it. The
first process of a node is this shell: it reaps, and nothing in the node can kill it."""


def missing_right() -> str:
    """Why nodes cannot be made here; empty where they can."""
    missing = [command for command in NEEDED if shutil.which(command) is None]
    if missing:
        return f"namespaces need {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    return "" if os.geteuid() == 0 else "namespaces for networks and mounts need root"


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    address: str
    first_process: int

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs a command in the node."""
        return ["nsenter", "-t", str(self.first_process), "-m", "-p", "-n", "-u", "--wd=/tmp", "--", *arguments]

    def start(self, *arguments: str, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process of the node; the log is a file of this machine."""
        with open(log, "ab") as file:
            return subprocess.Popen(self.command(*arguments), env=dict(environment), stdout=file, stderr=file)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """How a short command ended."""
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=60, check=False)

    def write(self, path: str, text: str) -> None:
        """Write a file of the node."""
        subprocess.run(self.command("tee", path), input=text, stdout=subprocess.DEVNULL, text=True, check=True)

    def kill_processes(self) -> None:
        """kill -9 of everything that runs there."""
        self.run("bash", "-c", "kill -9 -1")


@dataclass(frozen=True)
class Network:
    """A bridge with nodes; this machine has an address on it too."""

    host: str
    nodes: tuple[Node, ...]


@contextmanager
def network_of_nodes(names: Mapping[str, bool]) -> Iterator[Network]:
    """A node for each name; the value says whether the project's code is there."""
    number = os.getpid()
    subnet = f"10.{64 + number % 64}.{number // 64 % 256}"
    bridge, host = f"glm{number}", f"{subnet}.1"
    addresses = {name: f"{subnet}.{position}" for position, name in enumerate(names, 11)}
    hosts = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{host}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        nodes = []
        for position, (name, has_code) in enumerate(names.items()):
            first = stack.enter_context(_first_process(name, hosts, has_code))
            nodes.append(Node(name, addresses[name], first))
            end = f"{bridge}-{position}"
            _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(first))
            _ip("link", "set", end, "master", bridge, "up")
            inside = ("nsenter", "-t", str(first), "-n", "ip")
            subprocess.run([*inside, "addr", "add", f"{addresses[name]}/24", "dev", "eth0"], check=True)
            subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
            subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        yield Network(host, tuple(nodes))


@contextmanager
def _first_process(name: str, hosts: str, has_code: bool) -> Iterator[int]:
    """Everything in the node dies with it."""
    settings = {
        "NODE": name,
        "HOSTS": hosts,
        "CODE": str(ROOT),
        "PYTHON_HOME": sys.prefix,
        "HAS_CODE": "yes" if has_code else "no",
    }
    namespaces = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
    keeper = subprocess.Popen(
        ["unshare", *namespaces, "bash", "-c", SET_UP],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        assert keeper.stdout is not None
        said = keeper.stdout.readline().strip()
        assert said == "ready", f"node {name}: {said}"
        yield psutil.Process(keeper.pid).children()[0].pid
    finally:
        keeper.kill()
        keeper.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
