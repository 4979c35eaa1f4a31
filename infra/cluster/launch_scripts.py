"""Scripts that setup writes: one that starts a run, one that submits it as a job, one that sets a shell's variables.

A phase's own script is written when it is submitted (infra/jobs/): only the run itself is started by these.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from infra.cluster.cluster_settings import ClusterSettings
from infra.machine.network import Network

DRIVER_CPUS = 4


def environment_script(network: Network) -> str:
    """Variables for programs of your own, such as nccl-tests. Jobs get them without it."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(network.variables.items())]
    return "\n".join(["# Source this. glm46 cluster setup writes it anew.", *lines, ""])


def launch_script(home_root: Path) -> str:
    """`launch.sh SCALE ...` is `glm46 run SCALE ...` with this home, from any directory."""
    glm46 = shlex.quote(str(Path(sys.executable).parent / "glm46"))
    return "\n".join(
        [
            "#!/bin/sh",
            "# launch.sh SCALE|FILE.yaml [options of glm46 run]",
            f"export GLM46_HOME={shlex.quote(str(home_root))}",
            f'exec {glm46} run "$@"',
            "",
        ]
    )


def driver_script(settings: ClusterSettings, cluster_dir: Path) -> str:
    """A job of one node for the run, which itself submits the jobs of its phases."""
    launch = shlex.quote(str(cluster_dir / "launch.sh"))
    if settings.kind == "pbs":
        options = {"-N": "glm46-driver", "-q": settings.partition, "-A": settings.account, "-j": "oe", "-r": "y"}
        options["-l select"] = f"1:ncpus={DRIVER_CPUS}"
        options["-o"] = str(cluster_dir / "driver.log")
        lines = [
            f"#PBS {name}{'=' if name.startswith('-l') else ' '}{shlex.quote(text)}"
            for name, text in options.items()
            if text
        ]
        usage = f"# qsub -v SCALE=FILE.yaml {cluster_dir / 'driver.pbs'}"
        return "\n".join(["#!/bin/bash", *lines, usage, 'cd "$PBS_O_WORKDIR" || exit 1', f'exec {launch} "$SCALE"', ""])
    options = {
        "job-name": "glm46-driver",
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(DRIVER_CPUS),
        "partition": settings.partition,
        "account": settings.account,
        "output": str(cluster_dir / "driver-%j.log"),
        "open-mode": "append",
        "signal": "B:USR1@120",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(text)}" for name, text in options.items() if text]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            f"# sbatch {cluster_dir / 'driver.sbatch'} SCALE|FILE.yaml [options of glm46 run]",
            "# Before its time limit it ends the run and goes back into the queue: the run continues.",
            "# A signal that comes before the run or after it ends this script.",
            "trap 'kill -TERM $! || exit 1' TERM",
            "trap 'kill -TERM $! || exit 1; wait $!; scontrol requeue $SLURM_JOB_ID' USR1",
            f'{launch} "$@" &',
            "wait $!",
            "while kill -0 $! 2> /dev/null; do wait $!; done  # a signal ended the wait",
            "wait $!",
            "",
        ]
    )
