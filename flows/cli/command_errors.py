"""Ends a failed command of `glm46`: one clear message on standard error, an exit code, the traceback in a file."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from infra.disk_space import NO_ROOM, explain_full_disk
from infra.home import Home, named_home, private_file

EXIT_FAILED, EXIT_USAGE, EXIT_REFUSED = 1, 2, 3
MAX_MESSAGE_CHARS = 4000
"""Most characters of a message: some servers answer with all that they were sent. The whole text is in the log."""
JAVA_FRAME = re.compile(r"\n\s*(?:at [\w.$/<>]+\(.*\)|\.\.\. \d+ more)(?=\n|$)")


@contextmanager
def usage_errors(*directories: Path) -> Iterator[None]:
    """Refuses what the user wrote in one sentence, with exit code 2. A full disk is one sentence too, with exit code 1;
    a command that writes elsewhere than below the home or here names those directories."""
    try:
        yield
    except ValueError as error:
        print(f"glm46: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"glm46: {explain_full_disk(error, (named_home().root, Path.cwd(), *directories))}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None


@contextmanager
def failures(home: Home, *directories: Path) -> Iterator[None]:
    """One clear message and exit code 1; the traceback goes to a file that the message names. A command that writes
    elsewhere than below the home names those directories: so a full disk is recognised."""
    try:
        yield
    except (typer.Exit, SystemExit):
        raise
    except KeyboardInterrupt:
        print("glm46: interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    except Exception as error:
        path = home.run_dir / "last-error.log"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        full_disk = explain_full_disk(error, (home.root, *directories))
        said = f"{kind}{JAVA_FRAME.sub('', str(error))[:MAX_MESSAGE_CHARS]}{_whose(error)}"
        print(f"glm46: {full_disk or said}", file=sys.stderr)
        try:
            private_file(path).write_text(traceback.format_exc())
            kept = f"the traceback is in {path}"
        except OSError as full:
            fix = ": make room on that disk, then run again to continue" if full.errno in NO_ROOM else ""
            kept = f"{path}, for the traceback, cannot be written ({full.strerror}){fix}"
        if kind:
            print(f"glm46: {kept}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None


def _whose(error: Exception) -> str:
    """The owner of a file that this user may not use, with the fix; empty for other errors. A run with sudo leaves
    files of root."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return ""
    path = Path(error.filename)
    owned = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    owner = owned.lstat().st_uid
    if owner == os.geteuid():
        return f"; {owned} is yours: give yourself the right to use it (chmod u+rwX)"
    fix = "run as that user, or let it give you the file (chown)"
    return f"; {owned} belongs to user {owner}, you are {os.geteuid()}: {fix}"
