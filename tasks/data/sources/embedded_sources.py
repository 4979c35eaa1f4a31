"""The default corpus: Python's standard library without tests (code), pydoc's topics, package descriptions (web)."""

from __future__ import annotations

import os
import pydoc_data.topics
import re
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

OWN_DISTRIBUTION = "glm46"
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
GENERATED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize")
"""Names of files that a build or a distributor of Python adds to the library."""


def standard_library() -> list[tuple[str, Path]]:
    """(name, path) of every module's source, without tests and what a build of Python generated."""
    root = sysconfig.get_paths()["stdlib"]
    paths = []
    for parent, directories, files in os.walk(root):
        directories[:] = [
            name for name in directories if name not in SKIPPED_DIRECTORIES and not name.startswith(GENERATED_PREFIXES)
        ]
        wanted = [name for name in files if name.endswith(".py") and not name.startswith(GENERATED_PREFIXES)]
        paths.extend(Path(parent, name) for name in wanted)
    return sorted((f"python/{path.relative_to(root).as_posix()}", path) for path in paths)


def pydoc_topics() -> tuple[str, Path]:
    """(name, path) of the module whose dictionary holds Python's language reference by topic."""
    return "pydoc/topics.py", Path(pydoc_data.topics.__file__)


def package_descriptions() -> list[tuple[str, Path]]:
    """(name, path) of the metadata of every distribution that glm46 requires, directly or not, extras left out."""
    installed = _installed_metadata()
    descriptions: dict[str, Path] = {}
    waiting = _required(requires(OWN_DISTRIBUTION) or [])
    seen = {OWN_DISTRIBUTION}
    while waiting:
        name = waiting.pop()
        if name in seen or name not in installed:
            continue
        seen.add(name)
        version, path, requirements = _read_header(installed[name])
        descriptions[f"packages/{name}-{version}"] = path
        waiting.extend(_required(requirements))
    return sorted(descriptions.items())


def _installed_metadata() -> dict[str, Path]:
    """METADATA file of each installed distribution by its normalised name; earlier directories of sys.path win."""
    installed: dict[str, Path] = {}
    for directory in sys.path:
        for path in sorted(Path(directory).glob("*.dist-info/METADATA")) if directory else ():
            installed.setdefault(_normalise(path.parent.name.partition("-")[0]), path)
    return installed


def _read_header(path: Path) -> tuple[str, Path, list[str]]:
    """(version, path, requirement lines) of a METADATA file."""
    header = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    version = next(line.removeprefix("Version: ") for line in header if line.startswith("Version: "))
    return (
        version,
        path,
        [line.removeprefix("Requires-Dist: ") for line in header if line.startswith("Requires-Dist: ")],
    )


def _required(lines: list[str]) -> list[str]:
    """Normalised names of the requirements that hold here without extras."""
    requirements = [Requirement(line) for line in lines]
    return [
        _normalise(item.name) for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})
    ]


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
