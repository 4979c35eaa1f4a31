"""`glm46 run` as a process of its own: what verification and the speedrun do again from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flows.show.outcome import RunOutcome
from infra.servers.databases import MLFLOW_DATABASE, PREFECT_DATABASE

COMMAND = "from flows.cli.command import main; main()"
RESULTS = (0, 3)
"""Exit codes of a run that came to its end, accepted or refused: the weights exist."""


def whole_run(home_dir: Path, *arguments: str) -> RunOutcome:
    """The outcome of `glm46 run` with these arguments in a home. Its messages go to standard error. Raises RuntimeError
    where it fails."""
    command = [sys.executable, "-c", COMMAND, "run", *arguments, "--json"]
    # A home of its own has databases of its own: servers that other runs share are none of its business.
    shared = (PREFECT_DATABASE, MLFLOW_DATABASE)
    own = {name: value for name, value in os.environ.items() if name not in shared}
    environment = {**own, "GLM46_HOME": str(home_dir)}
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode not in RESULTS:
        raise RuntimeError(
            f"glm46 run {' '.join(arguments)} in {home_dir} ended with exit code {finished.returncode}: see above"
        )
    return RunOutcome.model_validate_json(finished.stdout.splitlines()[-1])
