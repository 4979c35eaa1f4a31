"""Runs the tests of a source tree that somebody else wrote, in a sandbox with pytest.

The tree is shown read-only, and what the tests write fails: there is no writable file. In: a tree as path to text, and
its test files. Out: the ids of the tests that pass.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from tasks.data.sandbox import sandbox_walls, tree_tests_process
from tasks.data.sandbox.code_sandbox import ENVIRONMENT, MEMORY_BYTES, WALL_SECONDS, loader_input, sandbox_command

INSIDE = (sandbox_walls, tree_tests_process)
CPU_SECONDS = 120
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
"""pytest and what it imports."""


def passing_tests(tree: Mapping[str, str], test_files: Sequence[str], isolation: str) -> set[str]:
    """Ids of the passing tests, as pytest writes them; none where the tests came to no end. Raises ValueError for a
    path that leaves the tree, and where pytest is not installed."""
    with tempfile.TemporaryDirectory(prefix="glm46-tree-") as directory:
        root = Path(directory)
        for name, text in tree.items():
            path = root / _inside(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        root.chmod(0o755)
        present = [name for name in test_files if name in tree]
        packages = _packages()
        shown = (directory, packages.name)
        job = json.dumps({"tree": directory, "packages": packages.name, "files": present}).encode()
        given = loader_input(isolation, INSIDE, shown, (CPU_SECONDS, MEMORY_BYTES)) + job + b"\n"
        try:
            done = subprocess.run(
                sandbox_command(isolation, shown),
                input=given,
                capture_output=True,
                check=False,
                cwd="/",
                env=ENVIRONMENT,
                start_new_session=True,
                timeout=2 * CPU_SECONDS + WALL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return set()
    return set(json.loads(done.stdout)) if done.returncode == 0 and done.stdout else set()


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} leaves the tree that it belongs to: name a path in it")
    return path


@cache
def _packages() -> tempfile.TemporaryDirectory[str]:
    """A directory with only pytest, which lives as long as this process: the sandbox shows no other package."""
    directory = tempfile.TemporaryDirectory(prefix="glm46-pytest-")
    for name in PYTEST:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"{name} is not installed, which the tests of a repository need: pip install pytest")
        if spec.submodule_search_locations:
            shutil.copytree(spec.submodule_search_locations[0], Path(directory.name) / name)
        else:
            shutil.copy2(spec.origin, directory.name)
    Path(directory.name).chmod(0o755)
    return directory
