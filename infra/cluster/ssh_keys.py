"""A key of this user that hosts with the same home directory let in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PUBLIC_KEYS = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")


def describe_key(ssh_dir: Path) -> str:
    """What is missing, empty where a key is authorized."""
    key = _public_key(ssh_dir)
    if key is None:
        return f"make {ssh_dir / 'id_ed25519'} without a passphrase and add it to {ssh_dir / 'authorized_keys'}"
    return "" if _is_authorized(ssh_dir, key) else f"add {key} to {ssh_dir / 'authorized_keys'}"


def authorize_own_key(ssh_dir: Path) -> None:
    """Make a key where there is none, and let it in here. Raises ValueError where ssh-keygen fails."""
    ssh_dir.mkdir(mode=0o700, exist_ok=True)
    if _public_key(ssh_dir) is None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh_dir / "id_ed25519")]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            raise ValueError("no ssh-keygen: install it (Debian: apt-get install openssh-client)") from None
        except subprocess.CalledProcessError as error:
            raise ValueError(f"ssh-keygen: {error.stderr.strip()}") from error
    key = _public_key(ssh_dir)
    assert key is not None, ssh_dir
    if _is_authorized(ssh_dir, key):
        return
    authorized = ssh_dir / "authorized_keys"
    before = authorized.read_text() if authorized.exists() else ""
    separator = "" if not before or before.endswith("\n") else "\n"
    descriptor = os.open(authorized, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(separator + key.read_text())


def _public_key(ssh_dir: Path) -> Path | None:
    return next((path for name in PUBLIC_KEYS if (path := ssh_dir / name).is_file()), None)


def _is_authorized(ssh_dir: Path, key: Path) -> bool:
    """By the key itself: comments and options differ."""
    authorized, body = ssh_dir / "authorized_keys", key.read_text().split()[1]
    return authorized.is_file() and any(body in line.split() for line in authorized.read_text().splitlines())
