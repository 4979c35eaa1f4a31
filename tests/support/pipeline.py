"""Runs the real command line: in a process of its own, as a user would, or in this one, where it starts no servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from infra.code_digest import ROOT


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def outcome(self) -> dict:
        """The JSON line that `run --json` ends with."""
        return json.loads(self.stdout.strip().splitlines()[-1])

    @property
    def digests(self) -> dict[str, str]:
        """Digest by stage, effects left out."""
        return {stage["name"]: stage["digest"] for stage in self.outcome["stages"] if stage["digest"]}

    @property
    def computed(self) -> list[str]:
        """Steps that were not in the store."""
        return [stage["name"] for stage in self.outcome["stages"] if stage["digest"] and not stage["cached"]]


def environment(home: Path, tree: Path = ROOT, **more: str) -> dict[str, str]:
    """The environment of a command: its own home, the packages of `tree`."""
    own = {
        "GLM46_HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(tree), more.pop("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    }
    return {**inherited, **own, **more}


def command(*arguments: str) -> list[str]:
    """The command line of glm46 under this interpreter."""
    return [sys.executable, "-c", "from flows.cli.command import main; main()", *arguments]


def glm46(*arguments: str, home: Path, tree: Path = ROOT, timeout: float = 900, **more: str) -> Finished:
    """Run a command to its end."""
    done = subprocess.run(
        command(*arguments),
        cwd=tree,
        env=environment(home, tree, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def here(*arguments: str, home: Path, **more: str) -> Finished:
    """Run a command that starts no servers to its end in this process, without the seconds of another one's imports."""
    from flows.cli.command import main

    out, err = StringIO(), StringIO()
    with (
        patch.dict(os.environ, environment(home, **more), clear=True),
        patch.object(sys, "argv", ["glm46", *arguments]),
        chdir(ROOT),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int), end.code
            return Finished(end.code, out.getvalue(), err.getvalue())
    return Finished(0, out.getvalue(), err.getvalue())


def refused(*arguments: str, home: Path, **more: str) -> Finished:
    """How a command ends that is refused before it starts anything."""
    ended = here(*arguments, home=home, **more)
    assert ended.exit_code, f"glm46 {' '.join(arguments)} was not refused: {ended.stdout}{ended.stderr}"
    return ended
