"""The corpus that is always there: Python's standard library without tests (code), pydoc's topics and package descriptions (web)."""

from __future__ import annotations

import pydoc_data.topics
import re
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

OWN_DISTRIBUTION = "glm46"
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}


def standard_library() -> list[tuple[str, Path]]:
    """(name, path) of every module's source, without tests, test support and what a build of Python generated."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        skipped = SKIPPED_DIRECTORIES.intersection(parts[:-1]) or parts[0].startswith(("config-", "_sysconfigdata", "sitecustomize"))
        if not skipped:
            found.append((f"python/{'/'.join(parts)}", path))
    return sorted(found)


def pydoc_topics() -> tuple[str, Path]:
    """(name, path) of the module whose dictionary holds Python's language reference by topic."""
    return "pydoc/topics.py", Path(pydoc_data.topics.__file__)


def package_descriptions() -> list[tuple[str, Path]]:
    """(name, path) of the metadata of every distribution that glm46 requires, directly or not, extras left out."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [OWN_DISTRIBUTION]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        path = _metadata_path(installed)
        if name != OWN_DISTRIBUTION and path is not None:
            found[f"packages/{name}-{installed.version}"] = path
        waiting.extend(_requirements(installed))
    return sorted(found.items())


def _requirements(installed: Distribution) -> list[str]:
    requirements = [Requirement(line) for line in installed.requires or []]
    wanted = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    return [re.sub(r"[-_.]+", "-", item.name).lower() for item in wanted]


def _metadata_path(installed: Distribution) -> Path | None:
    path = Path(str(installed.locate_file(""))) / f"{installed.metadata['Name']}-{installed.version}.dist-info" / "METADATA"
    candidates = [path, *(Path(str(installed.locate_file(file))) for file in installed.files or [] if file.name == "METADATA")]
    return next((candidate for candidate in candidates if candidate.is_file()), None)
