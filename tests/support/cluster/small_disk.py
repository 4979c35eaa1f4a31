"""A directory on a disk of its own, whose size a test sets: what it holds and no more makes it full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(disk: Path, num_kib: int) -> Iterator[Callable[[int], bool]]:
    """Mounts it at a new directory; gives a function that sets its size in KiB and says whether what it holds fits.
    Skips the test of a user who may not mount."""
    disk.mkdir()

    def resize(num_kib: int, *flags: str) -> bool:
        options = ",".join([*flags, f"size={num_kib}k"])
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, check=False)
        return done.returncode == 0

    if os.getuid() or not resize(num_kib):
        pytest.skip("needs a user who may mount")
    try:
        yield lambda num_kib: resize(num_kib, "remount")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def used_kib(disk: Path) -> int:
    """KiB that it holds."""
    return shutil.disk_usage(disk).used >> 10
