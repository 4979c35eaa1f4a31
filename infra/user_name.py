"""The name of the user who decides something, for the record of it."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """The number of a user who has no name, as a container may start one."""
    try:
        return getpass.getuser()
    except KeyError:
        return str(os.getuid())
