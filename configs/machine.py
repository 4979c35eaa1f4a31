"""This machine: what its compiled code depends on, and where the virtual environment keeps that code.

An environment may be used on other machines: from a shared disk, in an image, as a copy. Code compiled with
-march=native is an illegal instruction on a processor without its features, so each kind of machine has a directory of
its own, by a digest of architecture and processor features.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROCESSOR_FILE = Path("/proc/cpuinfo")
NATIVE_ROOT = Path(sys.prefix) / "torch_extensions"
SOURCE_SUFFIXES = (".cpp", ".h")
DESCRIPTION_FILE = "machine.txt"
NAMED_FEATURES = ("avx2", "avx512f", "amx_tile")


INCLUDED = re.compile(r'^#include "(.+)"', re.M)


def with_headers(source: Path) -> list[Path]:
    """A C++ file and the headers beside it that it includes, directly or not."""
    files = [source]
    for path in files:
        files += [
            header for name in INCLUDED.findall(path.read_text()) if (header := path.with_name(name)) not in files
        ]
    return [source, *sorted(files[1:])]


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide which compiled code runs on it."""

    processor: str
    features: str
    """Instruction sets, as the kernel lists them."""

    @property
    def native_dir(self) -> Path:
        """Directory of the code that is compiled for this kind of machine."""
        digest = hashlib.sha256(f"{platform.machine()}\n{self.features}".encode())
        return NATIVE_ROOT / digest.hexdigest()[:16]

    def __str__(self) -> str:
        named = [name for name in NAMED_FEATURES if name in self.features.split()]
        return " ".join([self.processor, *named])


@cache
def this_machine() -> Machine:
    """The machine of this process."""
    try:
        lines = PROCESSOR_FILE.read_text().splitlines()
    except OSError:
        return Machine(platform.processor() or platform.machine(), "")
    pairs = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    processor = next((value for name, value in pairs if name == "model name"), platform.machine())
    return Machine(processor, next((value for name, value in pairs if name in ("flags", "Features")), ""))


def compiler() -> str:
    """The C++ compiler's command."""
    return os.environ.get("CXX", "c++")


def make_native_dir() -> Path:
    """The directory of this machine's code, created if needed, with a description for people who see it on another
    machine."""
    directory = this_machine().native_dir
    directory.mkdir(parents=True, exist_ok=True)
    (directory / DESCRIPTION_FILE).write_text(f"{this_machine()}\n")
    return directory


def describe_missing(paths: Iterable[Path]) -> str:
    """One sentence about compiled files that are not there: for which machine, and for which others the environment
    holds code."""
    names = ", ".join(path.stem.partition("-")[0] for path in paths)
    described = (path.read_text().strip() for path in sorted(NATIVE_ROOT.glob(f"*/{DESCRIPTION_FILE}")))
    others = [text for text in described if text != str(this_machine())]
    return f"{names}: not compiled for this machine ({this_machine()})" + (
        f", only for {'; '.join(others)}" if others else ""
    )
