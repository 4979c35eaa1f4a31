"""Chooses the launcher of a job."""

from __future__ import annotations

from pathlib import Path

from infra.jobs.kubernetes_jobs import Kubernetes
from infra.jobs.launchers import Launcher, LocalLauncher
from infra.jobs.pbs_jobs import Pbs
from infra.jobs.scheduled_jobs import ScheduledLauncher, scheduler_of
from infra.jobs.slurm_jobs import Slurm
from infra.jobs.ssh_jobs import Ssh

SCHEDULERS = {scheduler.name: scheduler for scheduler in (Slurm, Pbs, Kubernetes, Ssh)}


def open_launcher(name: str, work_root: Path) -> Launcher:
    """By the name in a phase's resources."""
    return LocalLauncher(work_root) if name == "local" else ScheduledLauncher(work_root, SCHEDULERS[name]())


def launcher_of(key: str, work_root: Path) -> Launcher:
    """Of a job that was submitted."""
    return open_launcher(scheduler_of(work_root / key) or "local", work_root)
