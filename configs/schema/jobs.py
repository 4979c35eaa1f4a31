"""Where the work of a section runs: on this machine, or as a job on nodes that somebody else gives."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.schema.base import Frozen

Device = Literal["cpu", "cuda"]


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
    """Of the launcher `kubernetes`: the project and its environment, at the same paths as here; empty for the
    others."""
    volume_claim: str
    """Of the launcher `kubernetes`: the shared volume that pods mount as GLM46_HOME; empty for the others."""


class JobResources(Frozen):
    """Where a section's work runs; nothing of it enters a key."""

    launcher: Literal["local", "slurm", "pbs", "kubernetes", "ssh"]
    """local: this machine; the others: a job."""
    device: Device
    """Device that a rank computes on; a job gets a GPU per rank for `cuda`. `glm46 plan` counts the memory that is used
    there."""
    queue: QueueResources
