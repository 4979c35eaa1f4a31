"""What a process of the command line inherits and needs: standard streams that are open, a current directory, UTF-8."""

from __future__ import annotations

import codecs
import locale
import os
import sys
from pathlib import Path


def open_closed_streams() -> None:
    """Lead standard streams that are closed (`2>&-`) to the null device: else the first file that is opened becomes
    what this process and its children write messages to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # takes the lowest number that is free: that of the closed stream
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def refuse_removed_directory() -> None:
    """End the process where the current directory is gone: neither a home nor Java is found from there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.exit("glm46: the current directory was removed: change to another one")


def refuse_other_encoding() -> None:
    """End the process where Python would read text files in another encoding than UTF-8: configurations and documents
    would be other text, without an error."""
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8":
        sys.exit(
            f"glm46: files would be read as {encoding}, and their text is UTF-8: set PYTHONUTF8=1 or LC_ALL=C.UTF-8"
        )
