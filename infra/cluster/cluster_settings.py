"""What `glm46 cluster setup` was told of a cluster: $GLM46_HOME/cluster/cluster.json. `glm46 cluster check` reads it.

Settings of a phase (queue, ranks) stay in the YAML of a scale; these describe the cluster that is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from configs.files.atomic_files import replace_durably
from configs.schema import PhaseQueue
from infra.home import Home

Kind = Literal["slurm", "pbs", "kubernetes", "manual"]
TIME_LIMIT_MINUTES = 30
PATIENCE_MINUTES = 30.0


class ClusterSettings(BaseModel):
    """A cluster; without nodes of its own it is this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = "manual"
    num_nodes: int = 1
    gpus_per_node: int = 0
    """0: none is asked for, and what needs one is skipped."""
    hostfile: str = ""
    partition: str = ""
    account: str = ""
    image: str = ""
    volume_claim: str = ""
    nvme_dir: str = ""
    """A directory on a disk of each node; empty where nothing is kept there."""
    data: str = ""
    """A directory of documents; empty where they are in S3 or not there yet."""

    @property
    def launcher(self) -> str:
        """The launcher of jobs there."""
        if self.kind == "manual":
            return "ssh" if self.hostfile else "local"
        return self.kind

    @property
    def queue(self) -> PhaseQueue:
        """How short jobs are asked for."""
        return PhaseQueue(
            partition=self.partition,
            account=self.account,
            time_limit_minutes=TIME_LIMIT_MINUTES,
            hostfile=self.hostfile,
            image=self.image,
            environment={},
            volume_claim=self.volume_claim,
            max_missing_nodes=0,
            patience_minutes=PATIENCE_MINUTES,
        )


def make_settings(**values: str | int) -> ClusterSettings:
    """Raises ValueError in one sentence for what no cluster has."""
    kinds = get_args(Kind)
    if values["kind"] not in kinds:
        raise ValueError(f"--type {values['kind']}: give one of {', '.join(kinds)}")
    settings = ClusterSettings.model_validate(values)
    if settings.kind == "kubernetes" and not (settings.image and settings.volume_claim):
        raise ValueError("--type kubernetes: give --image and --volume-claim, which its pods need")
    for name in ("nvme_dir", "data"):
        path = getattr(settings, name)
        if path and not Path(path).is_absolute():
            raise ValueError(f"--{name.replace('_dir', '_path').replace('_', '-')} {path}: write the whole path")
    return settings


def read_settings(home: Home) -> ClusterSettings | None:
    """What setup wrote; None before."""
    path = home.root / "cluster" / "cluster.json"
    return ClusterSettings.model_validate_json(path.read_bytes()) if path.exists() else None


def write_settings(home: Home, settings: ClusterSettings) -> None:
    """Replace cluster.json durably."""
    path = home.root / "cluster" / "cluster.json"
    path.parent.mkdir(exist_ok=True)
    replace_durably(path, settings.model_dump_json(indent=1).encode())
