"""Where the work of a section runs: on this machine, or as a job on nodes that somebody else gives."""

from __future__ import annotations

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from configs.schema.base import Frozen

Device = Literal["cpu", "cuda"]
OWN_VARIABLES = re.compile(
    "(LOCAL_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|GLM46_.*|DS_ACCELERATOR|TORCHDYNAMO_DISABLE|OMP_(NUM_THREADS|WAIT_POLICY)|PATH|"
    "TORCH_EXTENSIONS_DIR|PYTHONUNBUFFERED|CUDA_VISIBLE_DEVICES"
)
"""Variables that the launcher gives to a rank itself."""
CREDENTIALS = re.compile(r".*(SECRET|PASSWORD|CREDENTIAL|ACCESS_KEY|API_KEY|TOKEN$).*")
"""Names of variables that configurations, which are kept as evidence, do not hold."""


class QueueResources(Frozen):
    """Where a job gets its nodes; the launcher `local` asks nobody."""

    partition: str
    """Slurm's partition, PBS's queue, the namespace of Kubernetes; empty for the default, like the account."""
    account: str
    """Slurm's or PBS's account, the queue of Kueue."""
    time_limit_minutes: int = Field(gt=0)
    """Of one job: before it ends the ranks save, and the next job continues. The launcher `ssh` knows none."""
    hostfile: str
    """Of the launcher `ssh`: a host per line as `ssh` takes it, and `slots=N`, the ranks that it can have; empty for
    the others."""
    image: str
    """A container with the project and its environment, at the same paths as here. Of the launcher `kubernetes`, and of
    `slurm` with the plugin pyxis, where empty means none; empty for the others."""
    environment: dict[str, str]
    """Variables of the ranks of a job on nodes, for example a proxy or HF_HOME; empty for the launcher `local`, whose
    ranks have those of `glm46 run`. No credentials: nodes have their own."""
    volume_claim: str
    """Of the launcher `kubernetes`: the shared volume that pods mount as GLM46_HOME; empty for the others."""

    @model_validator(mode="after")
    def _leaves_to_the_launcher_what_it_sets(self) -> Self:
        for name in self.environment:
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"environment names {name!r}: a variable has letters, digits and underscores")
            if OWN_VARIABLES.fullmatch(name):
                raise ValueError(f"environment names {name}, which the launcher sets itself: leave it out")
            if CREDENTIALS.fullmatch(name.upper()):
                raise ValueError(
                    f"environment names {name}: configurations are kept as evidence, give the nodes credentials of "
                    f"their own"
                )
        return self


class JobResources(Frozen):
    """Where a section's work runs; nothing of it enters a key."""

    launcher: Literal["local", "slurm", "pbs", "kubernetes", "ssh"]
    """local: this machine; the others: a job."""
    device: Device
    """Device that a rank computes on; a job gets a GPU per rank for `cuda`. `glm46 plan` counts the memory that is used
    there."""
    queue: QueueResources


def unserved_rollouts(rollouts: str, server: str) -> list[str]:
    """Every reason against the server (`rollout_server`) that is to answer for `rollouts`."""
    if rollouts == "in_process":
        return [f"rollout_server is {server} with rollouts in_process: empty it, or set rollouts"] if server else []
    if urlsplit(server).scheme not in ("http", "https"):
        return [f"rollouts {rollouts} need a server, rollout_server is {server!r}: set it to its URL"]
    return []
