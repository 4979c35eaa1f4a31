"""Checks the code that was compiled for this machine: the kernels of model/ and DeepSpeed's op."""

from __future__ import annotations

import sys

from infra.jobs.build_ops import op_path
from infra.machine.doctor import Check, check_native_code
from model.kernels.native_library import kernel_sources, library_path


def native_code() -> Check:
    """The check of all compiled code that a run loads."""
    return check_native_code([*map(library_path, kernel_sources()), op_path()])


def warn_of_missing_code() -> None:
    """Say what this run will compile first, and for which machine it was compiled."""
    check = native_code()
    if check.fix:
        print(f"{check.found}; {check.fix}", file=sys.stderr)
