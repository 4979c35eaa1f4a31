"""The environment of the peers whose packages cannot stand beside ours: `make env-peers` makes it."""

from __future__ import annotations

from pathlib import Path

PEERS_PYTHON = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"


def peers_python() -> str:
    """Path of its Python. SystemExit where it was not made."""
    if not PEERS_PYTHON.is_file():
        raise SystemExit(f"this benchmark measures a peer by {PEERS_PYTHON}, which is not there: run `make env-peers`")
    return str(PEERS_PYTHON)
