"""Keeps a proxy of the network (http_proxy) out of the way to this machine's own servers."""

from __future__ import annotations

import os

OWN_HOSTS = ("127.0.0.1", "localhost")
DIRECT = ("no_proxy", "NO_PROXY")
"""Variables with the hosts that no proxy is asked for, after which urllib, httpx and requests look."""


def reach_loopback_directly() -> None:
    """Add this machine to those variables, for this process and those that it starts."""
    for name in DIRECT:
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join([*hosts, *(host for host in OWN_HOSTS if host not in hosts)])


def exports() -> str:
    """The same as lines of a shell."""
    own = ",".join(OWN_HOSTS)
    return "".join(f'export {name}="{own}${{{name}:+,${name}}}"\n' for name in DIRECT)
